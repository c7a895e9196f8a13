"""A Horovod whose private APIs have changed: worlds are not kept, and nothing unsafe starts."""

from __future__ import annotations

import json

from processes import run_python

PROGRAM = """
import json
import horovod.common.basics as basics
import horovod.common.elastic

original = basics.HorovodBasics.init

def init(self, comm=None, process_sets=None, new_in_this_horovod=None):
    return original(self, comm, process_sets)

basics.HorovodBasics.init = init
del horovod.common.elastic.notification_manager

from horovod_tune.gloo.horovod_world import HorovodWorld

world = HorovodWorld()
world.load()
import horovod.torch as hvd
import horovod.torch.elastic as elastic
import torch

told = {"sums": [], "replaced": [], "up": []}
for _ in range(2):
    hvd.init()
    told["sums"].append(hvd.allreduce(torch.ones(1)).item())
    told["replaced"].append(len(world.keep(timeout_s=30)))
    told["up"].append(hvd.is_initialized())
try:
    elastic.run(print)
except Exception as error:
    told["elastic"] = type(error).__name__
print(json.dumps(told))
"""


def test_a_changed_horovod_makes_a_world_for_each_trial_and_warns_once_of_each_loss() -> None:
    ran = run_python("-c", PROGRAM)
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told == {"sums": [1.0, 1.0], "replaced": [1, 1], "up": [False, False], "elastic": "NotElastic"}
    warned = [line for line in ran.stderr.splitlines() if "differs from what horovod_tune was" in line]
    assert len(warned) == 2
    assert "so every trial starts new workers" in warned[0] and "hvd.elastic.run is refused" in warned[1]
