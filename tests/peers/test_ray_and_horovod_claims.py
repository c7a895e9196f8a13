"""What Ray's tests of its old Horovod integration and Horovod's of its executor claim, tried on ours.

Claims that other tests cover already are not repeated here.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import eventually
from ray import tune
from ray.tune import Checkpoint

from horovod_tune import DistributedTrainableCreator

# Those of Horovod's executor that hold for any number of ranks are tried with four.
RANKS = 4

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("ray_session")]
pytest.importorskip("horovod")


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """The ranks cannot import this file, so its functions travel as code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def count(config: dict[str, Any]) -> None:
    """Train without an end, with a checkpoint an epoch where that is wanted."""
    import horovod.torch as hvd

    from horovod_tune import report

    hvd.init()
    epoch = 0
    while True:
        epoch += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "epoch").write_text(str(epoch))
            checkpoint = Checkpoint.from_directory(directory) if config["keeps"] else None
            report({"rank": hvd.rank(), "epoch": epoch}, checkpoint=checkpoint)


def train_from_rank_zeros_state(config: dict[str, Any]) -> None:
    """Start apart on every rank, in weights and in the optimizer's momentum, and take over rank 0's."""
    import horovod.torch as hvd
    import torch

    from horovod_tune import report

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()

    def everyones() -> list[tuple[int, Any, Any, Any]]:
        weights = [each.tolist() for each in model.parameters()]
        moments = [each["exp_avg"].tolist() for each in optimizer.state.values()]
        mine = (hvd.local_rank(), weights, moments, optimizer.param_groups[0]["lr"])
        return hvd.allgather_object(mine)

    before = everyones()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = everyones()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    optimizer.zero_grad()
    model(torch.full((1, 3), float(hvd.rank()))).sum().backward()
    gradient = model.weight.grad
    optimizer.step()
    report(before=before, after=after, gradient=gradient[0].tolist(), trained=everyones())


def test_four_ranks_take_over_rank_zeros_weights_and_optimizer_and_stay_equal(
    tune_run: Callable[..., Any],
) -> None:
    trainable = DistributedTrainableCreator(train_from_rank_zeros_state, num_hosts=1, num_slots=RANKS)
    result = tune_run(trainable).trials[0].last_result
    before, after, trained = result["before"], result["after"], result["trained"]
    assert sorted(each[0] for each in before) == list(range(RANKS)), "the local ranks"
    assert result["hosts"].endswith(f":{RANKS}") and "," not in result["hosts"], "all on one host"
    for part in (1, 2, 3):  # weights, moments, learning rate
        assert all(before[rank][part] != before[0][part] for rank in range(1, RANKS)), "they start apart"
        assert all(after[rank][part] == before[0][part] for rank in range(RANKS))
    assert result["gradient"] == pytest.approx([1.5] * 3), "the mean of 0, 1, 2 and 3"
    assert all(each[1:] == trained[0][1:] for each in trained) and trained[0][1] != after[0][1]


def test_trials_end_at_the_stop_criterion_with_a_checkpoint_where_one_was_made_and_free_what_they_held(
    ray_session: Any, tune_run: Callable[..., Any]
) -> None:
    every = ray_session.cluster_resources()["CPU"]
    analysis = tune_run(
        DistributedTrainableCreator(count, num_hosts=1, num_slots=2),
        config={"keeps": tune.grid_search([True, False])},
        num_samples=2,
        stop={"training_iteration": 2},
    )
    assert len(analysis.trials) == 4
    for trial in analysis.trials:
        assert (trial.last_result["training_iteration"], trial.last_result["rank"]) == (2, 0)
        assert (trial.checkpoint is not None) == trial.config["keeps"]
        if trial.config["keeps"]:
            assert Path(trial.checkpoint.path, "epoch").read_text() == "2"
    eventually(lambda: ray_session.available_resources().get("CPU") == every, within_s=60)
