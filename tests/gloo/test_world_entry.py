"""Entering a world: a mistake of the function is distinguished from a lost rank."""

from __future__ import annotations

import json

import pytest
from horovod_worlds import run_worlds
from processes import run_python

pytestmark = pytest.mark.processes

ENTERED = """
import json
from horovod_tune.gloo.horovod_world import HorovodWorld, is_call_before_init

world = HorovodWorld()
world.load()
import horovod.torch as hvd
import torch

told = [world.has_entered()]
hvd.init()
told.append(world.has_entered())
assert world.keep(timeout_s=30) == []
told.append(world.has_entered())
# A rank is lost while the others take the kept world: Horovod says that there is none.
take = world._all_agree
world._all_agree = lambda fits: (world.close(), take(fits))[1]
try:
    hvd.init()
except Exception as error:
    told += [is_call_before_init(error), world.has_entered()]
hvd.shutdown()
told.append(world.has_entered())
print(json.dumps(told))
"""

OTHER_SETTINGS = """
import os
from horovod_tune.gloo.horovod_world import HorovodWorld

world = HorovodWorld()
world.load()
import horovod.torch as hvd

hvd.init()
hvd.shutdown()
hvd.init()
assert world.keep(timeout_s=30) == []
os.environ["HOROVOD_FUSION_THRESHOLD"] = "1000"
try:
    hvd.init()
except ValueError as error:
    print(error)
del os.environ["HOROVOD_FUSION_THRESHOLD"]
hvd.init()
"""

REFUSED = """
import json
from horovod_tune.gloo.horovod_world import is_collective_error
import horovod.torch as hvd
import torch

hvd.init()
told = []
for length, op in (1 + hvd.rank(), hvd.Sum), (1, hvd.Adasum):
    try:
        hvd.allreduce(torch.ones(length), op=op, name="gradient")
    except Exception as error:
        told.append(is_collective_error(error))
told.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="next").item())
print(json.dumps({"told": told}))
"""

SYNCHRONISED = """
from horovod_tune.gloo.horovod_world import HorovodWorld

world = HorovodWorld()
world.load()
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
state = hvd.elastic.TorchState(model=model)
for value in (7.0, 9.0):  # rank 0's, and one that is not committed
    torch.nn.init.constant_(model.weight, value)
    if value == 7.0:
        state.sync()
state.restore()
print(model.weight.item())
"""


def test_a_collective_that_horovod_refuses_is_no_loss_of_a_rank() -> None:
    (world,) = run_worlds("a:2", program=REFUSED)
    assert world.said == [{"told": [False, False, 2.0]}] * 2


def test_a_state_returns_to_what_was_synchronised_and_not_to_its_first_values() -> None:
    """A rank that joined is rank 0 after the next loss, before it has committed itself."""
    assert run_python("-c", SYNCHRONISED).stdout.split() == ["7.0"]


def test_a_process_makes_no_world_with_other_settings_than_its_first() -> None:
    ran = run_python("-c", OTHER_SETTINGS)
    assert "HOROVOD_FUSION_THRESHOLD changed after this process's first Horovod world" in ran.stdout


def test_a_world_that_breaks_while_it_is_entered_is_not_a_call_before_init() -> None:
    ran = run_python("-c", ENTERED)
    assert json.loads(ran.stdout.splitlines()[-1]) == [False, True, False, True, True, False]
