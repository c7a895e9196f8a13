"""What the serialised training function brings to the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_python

pytestmark = pytest.mark.processes


def test_objects_of_the_config_have_the_classes_that_the_function_knows(tmp_path: Path) -> None:
    """Both arrive by value, the config as Ray sends it."""
    sends = """
import enum, sys
from ray import cloudpickle
from horovod_tune.function.shipping import dumps
class Mode(enum.Enum):
    FAST = 1
def train(config):
    return config["mode"] is Mode.FAST and isinstance(config["mode"], Mode)
open("function", "wb").write(dumps(train))
open("config", "wb").write(cloudpickle.dumps({"mode": Mode.FAST}))
"""
    receives = """
import pickle
function, config = (pickle.load(open(name, "rb")) for name in ("function", "config"))
print(function(config))
"""
    run_python("-c", sends, cwd=tmp_path)
    assert run_python("-c", receives, cwd=tmp_path).stdout.strip() == "True"
