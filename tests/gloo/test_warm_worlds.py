"""Whatever a trial does to its Horovod world, the next one has a sound one: the same, or a new one."""

from __future__ import annotations

import os
import sys

import cloudpickle
import pytest
from trial_runner import is_kept, sound

from horovod_tune import report

pytestmark = [pytest.mark.processes, pytest.mark.slow]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_trial_that_reports_on_rank_zero_and_is_stopped_leaves_its_workers(runner):
    """Rank 1 waits in a collective that rank 0 never enters: it is thrown out, and the world made again."""

    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        for _ in range(100):
            hvd.allreduce(torch.ones(1))
            if hvd.rank() == 0:
                report(loss=1)

    assert is_kept(runner, train, stop_after=1)


def test_a_trial_that_shuts_down_and_starts_again_leaves_its_workers(runner):
    def train(config):
        import horovod.torch as hvd
        import torch

        for _ in range(2):
            hvd.init()
            hvd.allreduce(torch.ones(1))
            hvd.shutdown()
        hvd.init()

    assert is_kept(runner, train)


def test_a_trial_that_shuts_down_on_one_rank_leaves_a_sound_world_or_is_replaced(runner):
    def train(config):
        import horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            hvd.shutdown()

    is_kept(runner, train)


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_a_collective_that_was_never_waited_for_is_replaced(runner, ranks):
    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        if hvd.rank() in config["ranks"]:
            hvd.allreduce_async(torch.ones(1))

    assert not is_kept(runner, train, ranks=ranks)
    assert "never waited for" in runner.replaced_because


def test_ranks_that_count_their_collectives_differently_leave_their_workers(runner):
    """Horovod pairs collectives without a name by their number on each rank."""

    def train(config):
        import horovod.torch as hvd
        import torch
        from horovod.torch import mpi_ops

        hvd.init()
        numbers = [mpi_ops.allreduce_async(torch.zeros(1), name="a")]
        if hvd.rank() == 0:
            nowhere = hvd.ProcessSet([0])
            nowhere.process_set_id = 10**6
            with pytest.raises(ValueError):
                hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=nowhere)
        numbers.append(mpi_ops.allreduce_async(torch.zeros(1), name="b"))
        for number in numbers:
            hvd.synchronize(number)
        assert numbers[1] - numbers[0] == 2 - hvd.rank()

    assert is_kept(runner, train)


def test_process_sets_of_a_trial_are_gone_after_it(runner):
    def train(config):
        import horovod.torch as hvd

        hvd.init(process_sets=[hvd.ProcessSet([0])])
        assert len(hvd.mpi_ops._basics._get_process_set_ids_and_ranks()) == 2

    def look(config):
        import horovod.torch as hvd

        hvd.init()
        assert list(hvd.mpi_ops._basics._get_process_set_ids_and_ranks()) == [0]

    assert is_kept(runner, train)
    assert is_kept(runner, look)


def test_a_trial_gets_the_world_that_its_environment_asks_for(runner):
    """A new world counts its collectives from 1; a kept one keeps counting."""

    def first_number(config):
        import horovod.torch as hvd
        import torch

        os.environ.update(config["environment"])
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1))
        hvd.synchronize(handle)
        report(number=handle)

    def number(**environment: str) -> int:
        (told,) = runner.run(first_number, environment=environment)
        return told["number"]

    runner.run(sound)
    assert number() > 1
    # In new processes: Horovod would crash in a second world with another threshold.
    assert number(HOROVOD_FUSION_THRESHOLD="1000") == 1
    assert "HOROVOD_FUSION_THRESHOLD was set" in runner.replaced_because
    assert number(HOROVOD_FUSION_THRESHOLD="2000") == 1
    assert number() == 1
    assert runner.replaced_because == ""
    assert number() > 1
