"""Real trials: real Ray, real Horovod, 2 ranks each. One search runs most of them, one after the other."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import error_of, results_of
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from horovod_tune import DistributedTrainableCreator, report
from horovod_tune.errors import ResourcesUnavailable

# The search over all cases counts to the test that comes first.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_session")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Training functions, by the name that a trial's config has.
CASES: dict[str, Callable[[dict[str, Any]], Any]] = {}


def case(function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    CASES[function.__name__] = function
    return function


def train(config: dict[str, Any]) -> Any:
    import horovod.torch as hvd

    hvd.init()
    return CASES[config["case"]](config)


@pytest.fixture(scope="module")
def trials(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One trial for each case, one after the other on the same training actors."""
    analysis = tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"case": tune.grid_search(list(CASES)), "lr": 0.5, "text": "x"},
        name="experiment",
        storage_path=str(tmp_path_factory.mktemp("cases")),
        verbose=0,
        raise_on_failed_trial=False,
    )
    return {trial.config["case"]: trial for trial in analysis.trials}


def reported(trial: Any) -> list[dict[str, Any]]:
    """Return the results of a trial that has ended well."""
    assert trial.status == "TERMINATED", Path(trial.error_file).read_text()
    return results_of(trial)


@case
def averages(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    print("python", hvd.rank())
    os.write(2, b"library %d\n" % hvd.rank())
    report(
        rank=hvd.rank(),
        size=hvd.size(),
        local=hvd.local_size(),
        mean=hvd.allreduce(torch.tensor(float(hvd.rank()))),
        types=[type(config[name]).__name__ for name in ("lr", "text")],
    )
    print("y" * 10**6, "last", hvd.rank())


def test_ranks_form_one_world_average_their_gradients_and_have_a_log_each(trials: Any) -> None:
    (result,) = reported(trials["averages"])
    assert (result["rank"], result["size"], result["local"], result["mean"]) == (0, 2, 2, 0.5)
    assert result["types"] == ["float", "str"]
    for rank in (0, 1):
        text = Path(trials["averages"].path, f"rank_{rank}.log").read_text()
        assert text.count(f"python {rank}\n") == 1 and text.count(f"library {rank}\n") == 1
        assert f"yyy last {rank}\n" in text, "also what was printed after the last report"


def steps(config: dict[str, Any], count: int) -> Iterator[dict[str, int]]:
    yield from ({"step": step} for step in range(count))


class Trainer:
    def __call__(self, config: dict[str, Any]) -> Iterator[dict[str, int]]:
        yield {"step": 7}


CASES["a partial"] = functools.partial(steps, count=3)
CASES["a callable object"] = Trainer()
CASES["returns"] = lambda config: {"step": 4}


def test_yielded_and_returned_metrics_count_as_reports(trials: Any) -> None:
    names = ("a partial", "a callable object", "returns")
    found = [[result["step"] for result in reported(trials[name])] for name in names]
    assert found == [[0, 1, 2], [7], [4]]


@case
def asks_tune(config: dict[str, Any]) -> None:
    context = tune.get_context()
    tune.report(
        {
            "id": context.get_trial_id(),
            "name": context.get_trial_name(),
            "dir": context.get_trial_dir(),
            "experiment": context.get_experiment_name(),
            "cpus": context.get_trial_resources().required_resources["CPU"],
            "none": tune.get_checkpoint() is None,
            "hosts": "of the function's own",
        }
    )


def test_tunes_own_context_and_report_work_in_every_rank(trials: Any) -> None:
    trial = trials["asks_tune"]
    (result,) = reported(trial)
    assert (result["id"], result["name"]) == (trial.trial_id, str(trial))
    assert (result["experiment"], result["cpus"], result["none"]) == ("experiment", 2.0, True)
    assert result["hosts"] == "of the function's own", "which replaces the trial's"
    assert result["dir"].endswith(os.path.basename(trial.path))


@case
def exits(config: dict[str, Any]) -> None:
    report(loss=1.0)
    sys.exit(0)


@case
def raises_a_huge_error(config: dict[str, Any]) -> None:
    raise ValueError("the start " + "x" * (20 << 20) + " the end")


def test_a_mistake_of_a_function_is_explained_in_its_trials_error(trials: Any) -> None:
    text = error_of(trials["exits"])
    assert "SystemExit: 0" in text and "To end a trial early, return from the function." in text
    text = error_of(trials["raises_a_huge_error"])
    assert "the start" in text and "the end" in text and len(text) < 1_000_000


@case
def removes_its_directory(config: dict[str, Any]) -> None:
    import horovod.torch as hvd

    report(loss=1.0)
    if hvd.rank() == 0:
        shutil.rmtree(os.getcwd())


@case
def is_sound(config: dict[str, Any]) -> None:
    report(loss=1.0)


def test_trials_that_harm_themselves_do_not_affect_the_others(trials: Any) -> None:
    """The last one runs after all of them."""
    assert trials["removes_its_directory"].status == "TERMINATED"
    assert [result["loss"] for result in reported(trials["is_sound"])] == [1.0]


@pytest.mark.contract
def test_a_trial_that_a_scheduler_stops_runs_no_further_step(tune_run: Any, tmp_path: Path) -> None:
    log = tmp_path / "steps"
    log.mkdir()

    def train(config: dict[str, Any]) -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        for step in range(1, 9):
            hvd.allreduce(torch.zeros(1), name="step")  # no rank is a step behind when the trial is stopped
            (log / f"{config['quality']}-{hvd.rank()}-{step}").touch()
            report(score=config["quality"])

    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"quality": tune.grid_search([4, 3, 2, 1])},
        metric="score",
        mode="max",
        scheduler=AsyncHyperBandScheduler(max_t=8, grace_period=2, reduction_factor=2),
        max_concurrent_trials=1,
    )
    stopped = 0
    for trial in analysis.trials:
        reports = len(reported(trial))
        stopped += reports < 8
        for rank in (0, 1):
            assert len(list(log.glob(f"{trial.config['quality']}-{rank}-*"))) == reports
    assert stopped == 3


@pytest.mark.slow
def test_resources_are_what_the_ranks_hold_and_nothing_for_the_coordinator(tune_run: Any) -> None:
    def train(config: dict[str, Any]) -> None:
        import ray

        report(free=ray.available_resources().get("CPU", 0.0))

    trainable = DistributedTrainableCreator(train, num_slots=1, num_cpus_per_slot=3)
    (trial,) = tune_run(trainable).trials
    assert trial.last_result["free"] == 1.0


def test_a_trial_that_can_never_fit_and_a_function_without_the_factory_are_errors(tune_run: Any) -> None:
    trainable = DistributedTrainableCreator(lambda config: None, num_slots=5)
    with pytest.raises(ResourcesUnavailable, match=r"5 CPU, which this cluster can never provide.*4 CPU"):
        tune_run(trainable)

    def train(config: dict[str, Any]) -> None:
        report(loss=1.0)

    (trial,) = tune_run(train, raise_on_failed_trial=False).trials
    assert "Give Tune DistributedTrainableCreator(train, num_slots=...) instead of train" in error_of(trial)
