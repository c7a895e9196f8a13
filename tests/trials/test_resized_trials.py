"""Trials that schedulers pause or resize continue where they were, with the ranks of their resources."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from counting import train
from processes import records_of
from ray import tune
from ray.tune import PlacementGroupFactory, TuneError
from ray.tune.schedulers import FIFOScheduler, HyperBandScheduler, ResourceChangingScheduler

from horovod_tune import DistributedTrainableCreator, commit, get_checkpoint, get_state, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Run = Callable[..., Any]


def undisturbed(analysis: Any) -> list[dict[str, Any]]:
    """The reports of the one trial, which has each step with an undisturbed run's sum."""
    records = records_of(analysis)
    assert all(each["sum"] == sum(range(each["step"] + 1)) for each in records)
    return records


def at(**resources: Any) -> Any:
    """An allocation function that gives these resources at these reports ("after_2")."""
    return lambda controller, trial, result, scheduler: resources.get(f"after_{result['training_iteration']}")


def test_a_trial_has_the_ranks_of_its_new_resources(tune_run: Run) -> None:
    resources = at(after_2={"cpu": 4}, after_4=PlacementGroupFactory([{}, {"CPU": 1}]))
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"steps": 6},
        scheduler=ResourceChangingScheduler(FIFOScheduler(), resources),
    )
    records = undisturbed(analysis)
    assert [each["step"] for each in records] == [1, 2, 3, 4, 5, 6]
    assert [each["ranks"] for each in records] == [2, 2, 4, 4, 1, 1]
    assert [each["world_size"] for each in records] == [2, 2, 4, 4, 1, 1]


@pytest.mark.parametrize(
    ("resizes", "sizes"),
    [
        pytest.param(False, {2}, marks=pytest.mark.contract, id="paused"),
        pytest.param(True, {2, 3, 4}, id="both"),
    ],
)
def test_trials_that_pause_continue_where_they_were(tune_run: Run, resizes: bool, sizes: set[int]) -> None:
    scheduler: Any = HyperBandScheduler(max_t=4, reduction_factor=2)
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"steps": 4, "x": tune.grid_search([1, 2, 3])},
        metric="loss",
        mode="min",
        scheduler=ResourceChangingScheduler(scheduler) if resizes else scheduler,
    )
    assert [trial.status for trial in analysis.trials] == ["TERMINATED"] * 3
    histories = analysis.trial_dataframes.values()
    assert max(history["step"].max() for history in histories) == 4
    for history in histories:
        assert history["step"].tolist() == list(range(1, len(history) + 1)), "no step twice, none left out"
        assert set(history["ranks"]) <= sizes
        assert history["ranks"].tolist() == history["world_size"].tolist()


def test_resources_that_make_no_sense_end_the_search_with_the_reason(tune_run: Run) -> None:
    with pytest.raises(TuneError, match="SpecError: cannot resize a trial to 3 CPU: a rank holds 2 CPU"):
        tune_run(
            DistributedTrainableCreator(train, num_slots=1, num_cpus_per_slot=2),
            config={"steps": 4},
            scheduler=ResourceChangingScheduler(FIFOScheduler(), at(after_1={"CPU": 3})),
        )


def train_with_commits(config: dict[str, Any]) -> None:
    """The same, with no checkpoint: what was committed is what continues."""
    import horovod.torch as hvd
    import torch

    from horovod_tune.backends.horovod import horovod_elastic

    horovod_elastic.PIECE_BYTES = 1000  # a state comes to a rank that joins in several
    weights = bytes(range(256)) * 20
    hvd.init()
    assert get_checkpoint() is None
    state = get_state() or {"step": 0, "sum": 0.0, "weights": weights}
    assert state.pop("weights") == weights
    while state["step"] < config["steps"]:
        step = state["step"] + 1
        mean = hvd.allreduce(torch.tensor([float(step)], dtype=torch.float64)).item()
        state = {"step": step, "sum": state["sum"] + mean}
        time.sleep(config.get("pause_s", 0.0))
        report(**state, ranks=hvd.size(), pids=",".join(map(str, hvd.allgather_object(os.getpid()))))
        commit({**state, "weights": weights})


def train_with_horovods_api(config: dict[str, Any]) -> None:
    """The same with Horovod's elastic API."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < config["steps"]:
            mean = hvd.allreduce(torch.tensor([float(state.step + 1)]))
            with torch.no_grad():
                state.model.weight += mean
            state.step += 1
            time.sleep(config.get("pause_s", 0.0))
            report(step=state.step, sum=state.model.weight.item(), ranks=hvd.size())
            state.commit()

    loop(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


class GrowsAndShrinks:
    """Gives the trial 4 CPUs after its second report and 3 when it has them; it may end when it has those."""

    def __init__(self) -> None:
        self.is_done = False

    def __call__(self, controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
        held = trial.placement_group_factory.required_resources["CPU"]
        self.is_done = held == 3 == result["world_size"]
        if held == 3 or result["world_size"] < held or result["step"] < 2:
            return None
        return {"CPU": 4 if held == 2 else 3}


@pytest.mark.parametrize(
    ("function", "options"),
    [(train_with_commits, {"num_slots": 2}), (train_with_horovods_api, {"num_workers": 2})],
    ids=["one host", "anywhere"],
)
def test_an_elastic_trial_is_resized_while_it_runs(
    tune_run: Run, function: Any, options: dict[str, Any]
) -> None:
    resources = GrowsAndShrinks()
    analysis = tune_run(
        DistributedTrainableCreator(function, **options, min_workers=1),
        config={"steps": 5000, "pause_s": 0.05},
        scheduler=ResourceChangingScheduler(FIFOScheduler(), resources),
        stop=lambda trial_id, result: resources.is_done,
    )
    records = undisturbed(analysis)
    changes = [(each["step"], each["ranks"], each["world_change"]) for each in records]
    assert [step for step, _, _ in changes] == list(range(1, len(records) + 1)), changes
    sizes = [each["ranks"] for each in records]
    # One may be ready before the other, and joins first.
    grown = sizes.index(4)
    assert sizes[0] == 2 and sizes[:grown] == sorted(sizes[:grown]) and set(sizes[grown:]) == {4, 3}
    assert set(each["world_change"] for each in records) == {
        "",
        "more workers join",
        "a scheduler reduced the trial to 3 rank(s)",
    }
    (trial,) = analysis.trials
    assert trial.placement_group_factory.required_resources == {"CPU": 3}
    if function is train_with_commits:
        before, after, shrunk = (set(records[step]["pids"].split(",")) for step in (1, grown, -1))
        assert before < after and before < shrunk < after, "those that stay keep their processes"


@pytest.mark.parametrize(
    ("function", "options", "ranks"),
    [(train_with_commits, {}, 4), (train_with_horovods_api, {"min_workers": 1}, 1)],
    ids=["not elastic", "fewer than it began with"],
)
def test_ranks_that_only_commit_start_again_from_their_last_commit(
    tune_run: Run, function: Any, options: dict[str, Any], ranks: int
) -> None:
    analysis = tune_run(
        DistributedTrainableCreator(function, num_slots=2, **options),
        config={"steps": 6},
        scheduler=ResourceChangingScheduler(FIFOScheduler(), at(after_3={"CPU": ranks})),
    )
    # The scheduler resizes at a report, which comes before the commit: the last step is done again.
    steps = [(1, 2), (2, 2), (3, 2), (3, ranks), (4, ranks), (5, ranks), (6, ranks)]
    assert [(each["step"], each["ranks"]) for each in undisturbed(analysis)] == steps
