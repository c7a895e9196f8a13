"""What Tune imports in the driver before a search starts."""

from __future__ import annotations

from processes import run_python

PROGRAM = """
import sys, threading

from ray.air._internal import usage
from ray.tune import Callback
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback, TBXLoggerCallback

from horovod_tune.trainable import patch_tune

original = usage._count_callbacks
patch_tune()

class Own(Callback): ...
class OwnLogger(LoggerCallback): ...

given = [CSVLoggerCallback(), JsonLoggerCallback(), TBXLoggerCallback()]
given += [Own(), OwnLogger(), OwnLogger(), "no callback"]
ours = usage._count_callbacks(given)
print(sorted({"torch", "mlflow", "wandb", "comet_ml", "aim"} & set(sys.modules)))
print(dict(ours) == dict(original(given)), dict(usage._count_callbacks(None)) == dict(original(None)))

from ray.air.integrations.wandb import WandbLoggerCallback

given.append(WandbLoggerCallback("project"))
print(dict(usage._count_callbacks(given)) == dict(original(given)))
import torch

print(torch.ones(2).sum().item())
"""


def test_torch_and_integrations_that_no_callback_is_of_are_not_imported() -> None:
    printed = run_python("-c", PROGRAM).stdout.splitlines()
    assert printed == ["[]", "True True", "True", "2.0"]
