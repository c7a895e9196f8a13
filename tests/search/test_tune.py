"""Whole searches of `BayesOptSearch`, run by Tune."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import conformance
import numpy as np
import pytest
from conformance import METRIC, Loop, loss, mixed_space
from ray import cloudpickle, tune
from ray.tune.search import ConcurrencyLimiter

from horovod_tune.analysis import analyze
from horovod_tune.search import BayesOptSearch

pytestmark = pytest.mark.processes

# The trials run in other processes, which cannot import tests.
cloudpickle.register_pickle_by_value(conformance)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(config: dict[str, Any]) -> None:
    if config["lr"] > 0.03:
        raise RuntimeError("diverged")
    for step in range(1, 4):
        tune.report({METRIC: loss(config) + 1.0 / step})


CHOICES = [{"kind": "a", "size": 1}, None, [1, 2], "text"]


def fit(storage: Path, search: Any, samples: int, name: str = "experiment", **config: Any) -> tune.ResultGrid:
    return tune.Tuner(
        train,
        param_space=mixed_space()
        | {"any": tune.choice(CHOICES), "twice": tune.sample_from(lambda c: 2 * c["layers"])},
        tune_config=tune.TuneConfig(
            metric=METRIC, mode="min", search_alg=search, num_samples=samples, reuse_actors=True, **config
        ),
        run_config=tune.RunConfig(name=name, storage_path=str(storage), verbose=0),
    ).fit()


@pytest.fixture(scope="module")
def experiment(ray_session: Any, tmp_path_factory: Any) -> tune.ResultGrid:
    """A search of 10 trials, some of which fail and some of which ASHA stops."""
    storage = tmp_path_factory.mktemp("bayesopt")
    search = ConcurrencyLimiter(BayesOptSearch(), max_concurrent=4)
    return fit(storage, search, 10, scheduler=tune.schedulers.ASHAScheduler(grace_period=1, max_t=3))


def test_tune_runs_every_sample_and_the_search_records_each(experiment: tune.ResultGrid) -> None:
    assert len(experiment) == 10
    state = json.loads(next(Path(experiment.experiment_path).glob("searcher-state-*.pkl")).read_text())
    # A list: two trials may be at the same bound.
    recorded = [result.config["lr"] for result in experiment]  # type: ignore[attr-defined]
    low, high = math.log(1e-5), math.log(1e-1)
    suggested = [math.exp(low + trial["point"][0] * (high - low)) for trial in state["trials"]]
    assert sorted(recorded) == pytest.approx(sorted(suggested), rel=1e-12)
    for result in experiment:  # type: ignore[attr-defined]
        assert result.config["any"] in CHOICES and result.config["twice"] == 2 * result.config["layers"]
    # Failed trials are known as such, and those that were stopped early count.
    endings = [trial["ending"] for trial in state["trials"]]
    assert endings.count("failed") == len(experiment.errors) and "running" not in endings
    values = sorted(trial["value"] for trial in state["trials"] if trial["value"] is not None)
    last = sorted(r.metrics[METRIC] for r in experiment if not r.error)  # type: ignore[attr-defined]
    assert values == pytest.approx(last)


@pytest.mark.parametrize("kind", ["directory", "uri", "analyze", "analysis", "grid", "frame"])
def test_an_experiment_of_tune_is_a_start(experiment: tune.ResultGrid, kind: str) -> None:
    source: Any = {
        "directory": lambda: experiment.experiment_path,
        "uri": lambda: f"file://{experiment.experiment_path}",
        "analyze": lambda: analyze(experiment),
        "analysis": lambda: tune.ExperimentAnalysis(experiment.experiment_path),
        "grid": lambda: experiment,
        "frame": experiment.get_dataframe,
    }[kind]()
    search = BayesOptSearch(metric=METRIC, mode="min", analysis=source)
    space = mixed_space() | {"any": tune.choice(CHOICES)} if kind != "frame" else mixed_space()
    assert search.set_search_properties(METRIC, "min", space)
    search.suggest("first")
    assert len(search._history.earlier) == 10 - len(experiment.errors)


class DriverDies(tune.Callback):
    """Raises in the driver when the given number of trials have ended; once only."""

    def __init__(self, trials: int, folder: Path) -> None:
        self._trials, self._folder, self._steps = trials, folder, 0

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        # One step later than they ended, so that it has been saved that they did.
        self._steps += sum(trial.status == "TERMINATED" for trial in trials) >= self._trials
        if self._steps >= 2 and not (self._folder / "died").exists():
            (self._folder / "died").touch()
            raise RuntimeError("the driver dies")


def plain_train(config: dict[str, Any]) -> None:
    tune.report({METRIC: loss(config)})


@pytest.mark.slow
def test_tuner_restore_continues_the_model(ray_session: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A search whose driver died at the 3rd trial continues as the one whose driver did not."""
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")
    # The model takes over at the 3rd suggestion.
    settings: dict[str, Any] = {"metric": METRIC, "mode": "min", "random_state": 3, "random_search_steps": 2}
    tuner = tune.Tuner(
        plain_train,
        param_space=mixed_space(),
        tune_config=tune.TuneConfig(
            search_alg=ConcurrencyLimiter(BayesOptSearch(**settings), max_concurrent=1),
            num_samples=4,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="broken", storage_path=str(tmp_path), verbose=0, callbacks=[DriverDies(3, tmp_path)]
        ),
    )
    with pytest.raises(Exception, match="the driver dies"):
        tuner.fit()
    restored = tune.Tuner.restore(str(tmp_path / "broken"), plain_train, param_space=mixed_space()).fit()
    uninterrupted = Loop(BayesOptSearch(**settings), mixed_space(), in_flight=1).run(4)
    assert sorted(restored[i].config["lr"] for i in range(len(restored))) == sorted(
        config["lr"] for config in uninterrupted
    )


@pytest.mark.slow
def test_what_sample_from_draws_outside_the_search_follows_its_seed(ray_session: Any, tmp_path: Path) -> None:
    """Tune calls such functions itself, also for the trials of a search that it restores."""

    def width(config: dict[str, Any]) -> float:
        return float(np.random.uniform() + random.random())

    def drawn(results: tune.ResultGrid) -> list[float]:
        return sorted(results[i].config["width"] for i in range(len(results)))  # type: ignore[index]

    def search(name: str, seed: int) -> list[float]:
        tuner = tune.Tuner(
            plain_train,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=METRIC, mode="min", num_samples=3, search_alg=BayesOptSearch(random_state=seed)
            ),
            run_config=tune.RunConfig(name=name, storage_path=str(tmp_path), verbose=0),
        )
        return drawn(tuner.fit())

    space = mixed_space() | {"width": tune.sample_from(width)}
    first = search("first", 7)
    assert len(set(first)) == 3
    assert search("again", 7) == first
    assert not set(search("other", 8)) & set(first)
    restored = tune.Tuner.restore(str(tmp_path / "first"), plain_train, param_space=space)
    assert drawn(restored.fit()) == first
