"""Entering a world: its own mistake is told from a lost rank; a changed Horovod keeps no world."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import ray
from processes import run_python

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


def test_a_process_makes_no_world_with_other_settings_than_its_first() -> None:
    ran = run_python("-c", OTHER_SETTINGS)
    assert "HOROVOD_FUSION_THRESHOLD differs from this process's first Horovod world" in ran.stdout


def test_a_world_that_breaks_while_it_is_entered_is_not_a_call_before_init() -> None:
    ran = run_python("-c", ENTERED)
    assert json.loads(ran.stdout.splitlines()[-1]) == [False, True, False, True, True, False]


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


@pytest.mark.slow
def test_a_rank_finds_horovods_library_whatever_other_threads_ask_of_python(ray_session: Any) -> None:
    class Rank:
        """A rank whose main thread fills Python's table of its build as slowly as the imports allow."""

        def find_horovod(self) -> bool:
            import sysconfig

            from horovod_tune.actors.training_actor import TrainingActor
            from horovod_tune.gloo.horovod_world import HorovodWorld

            python: Any = sysconfig
            fill = python._init_posix

            def fill_slowly(table: dict[str, Any]) -> None:
                for thread in threading.enumerate():
                    if thread.name == "ray_import" and thread is not threading.current_thread():
                        thread.join(120)
                fill(table)

            python._init_posix = fill_slowly
            python._CONFIG_VARS, python._CONFIG_VARS_INITIALIZED = None, False
            rank = TrainingActor(HorovodWorld)
            sysconfig.get_paths()
            rank.load()
            import horovod.torch

            return bool(horovod.torch._MPI_LIB_AVAILABLE)

    assert ray.get(ray.remote(Rank).remote().find_horovod.remote(), timeout=180)
