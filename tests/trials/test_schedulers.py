"""Tune's schedulers that pause trials, or give them other resources, on trials of two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest
from ray.tune.schedulers import HyperBandScheduler, ResourceChangingScheduler

from horovod_tune import DistributedTrainableCreator

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 4


def train(config):
    import tempfile

    import horovod.torch as hvd
    import torch

    from horovod_tune import get_checkpoint, report

    hvd.init()
    start = get_checkpoint()
    done = int(Path(start.path, "step").read_text()) if start is not None else 0
    for step in range(done + 1, STEPS + 1):
        ranks = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step").write_text(str(step))
            report(loss=config["x"] / step, step=step, ranks=ranks, checkpoint=folder)


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param(
            HyperBandScheduler(max_t=STEPS, reduction_factor=2),
            marks=pytest.mark.contract,
            id="trials that pause",
        ),
        pytest.param(
            ResourceChangingScheduler(HyperBandScheduler(max_t=STEPS, reduction_factor=2)),
            marks=pytest.mark.slow,
            id="trials that pause and get more CPUs",
        ),
    ],
)
def test_paused_trials_continue_where_they_were(tune_run, scheduler):
    from ray import tune

    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"x": tune.grid_search([1, 2, 3])},
        metric="loss",
        mode="min",
        scheduler=scheduler,
    )
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 3
    histories = analysis.trial_dataframes.values()
    assert max(history["step"].max() for history in histories) == STEPS
    for history in histories:
        assert history["step"].tolist() == list(range(1, len(history) + 1)), "no step twice, none left out"
        assert set(history["ranks"]) <= ({2} if isinstance(scheduler, HyperBandScheduler) else {2, 3, 4})
        assert history["ranks"].tolist() == history["world_size"].tolist()
