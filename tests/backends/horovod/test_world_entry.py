"""Entering a world: a mistake of the function is distinguished from a lost rank."""

from __future__ import annotations

import json

import pytest
from horovod_worlds import run_worlds
from processes import run_python

pytestmark = pytest.mark.processes

ENTERED = """
import json
from horovod_tune.backends.horovod.horovod_world import HorovodWorld

world = HorovodWorld()
world.load()
import horovod.torch as hvd

told = [world.has_entered()]
hvd.init()
told += [world.has_entered(), hvd.size()]
world.close()  # a rank is lost
told += [world.has_entered(), hvd.size()]
hvd.shutdown()
told.append(world.has_entered())
hvd.init()
told += [world.has_entered(), hvd.size()]
print(json.dumps(told))
"""

REFUSED = """
import json
from horovod_tune.backends.horovod.horovod_world import is_collective_error
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
from horovod_tune.backends.horovod.horovod_world import HorovodWorld

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


def test_a_world_that_has_broken_was_entered_and_its_size_remains_readable() -> None:
    ran = run_python("-c", ENTERED)
    assert json.loads(ran.stdout.splitlines()[-1]) == [False, True, 1, True, 1, False, True, 1]
