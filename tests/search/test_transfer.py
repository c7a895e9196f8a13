"""`BayesOptSearch(analysis=...)` on an experiment over other data: a prior of its own weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conformance import Loop
from ray import tune

from horovod_tune.search import BayesOptSearch

pytestmark = pytest.mark.long

SPACE = {"x": tune.uniform(-2, 2), "lr": tune.loguniform(1e-5, 1e-1)}
Loss = Callable[[dict[str, Any]], float]


def valley(config: dict[str, Any]) -> float:
    return (config["x"] - 0.7) ** 2 + 0.5 * (math.log10(config["lr"]) + 2.2) ** 2


def moved(config: dict[str, Any]) -> float:
    """As after a change of the data: the optimum a little elsewhere, the losses on another scale."""
    return 40.0 + 8.0 * valley({"x": config["x"] + 0.1, "lr": config["lr"] * 1.3})


def elsewhere(config: dict[str, Any]) -> float:
    return (config["x"] + 1.5) ** 2 + 0.5 * (math.log10(config["lr"]) + 4.5) ** 2


def results_of(loss: Loss, number: int = 30, seed: int = 0) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    configs = [{"x": generator.uniform(-2, 2), "lr": 10 ** generator.uniform(-5, -1)} for _ in range(number)]
    rows = [{"config/x": c["x"], "config/lr": c["lr"], "loss": loss(c)} for c in configs]
    return pd.DataFrame(rows)


def searcher(analysis: pd.DataFrame | None, seed: int = 0, **arguments: Any) -> BayesOptSearch:
    search = BayesOptSearch(metric="loss", mode="min", random_state=seed, analysis=analysis, **arguments)
    search.set_search_properties("loss", "min", SPACE)
    return search


def losses(search: BayesOptSearch, number: int, loss: Loss = valley) -> list[float]:
    return [loss(config) for config in Loop(search, None, in_flight=1).run(number, loss)]


def test_a_related_experiment_saves_trials() -> None:
    ours = [min(losses(searcher(results_of(moved, seed=s), s), 7)) for s in range(5)]
    fresh = [min(losses(searcher(None, s), 7)) for s in range(5)]
    assert np.median(ours) < 0.02 and np.median(ours) < 0.2 * np.median(fresh)


@pytest.mark.slow
@pytest.mark.parametrize("misleading", [elsewhere, lambda config: -valley(config)])
def test_a_misleading_experiment_does_no_harm_beyond_the_first_trials(misleading: Loss) -> None:
    ours = [min(losses(searcher(results_of(misleading, seed=s), s), 18)) for s in range(5)]
    fresh = [min(losses(searcher(None, s), 18)) for s in range(5)]
    assert np.median(ours) < max(2 * np.median(fresh), 1e-3)


def test_the_scale_of_the_earlier_metric_is_of_no_matter() -> None:
    frame = results_of(moved)
    stretched = frame.assign(loss=frame["loss"] * 1e4 - 3e5)
    assert losses(searcher(frame), 8) == pytest.approx(losses(searcher(stretched), 8), rel=1e-3)


def test_what_was_best_before_may_be_tried_again() -> None:
    """In a space of four points: the earlier results are not results of this search."""
    frame = pd.DataFrame([{"config/x": x, "loss": abs(x - 3)} for x in (1, 2, 3, 4)])
    search = BayesOptSearch(metric="loss", mode="min", analysis=frame)
    search.set_search_properties("loss", "min", {"x": tune.choice([1, 2, 3, 4])})
    assert search.suggest("a") == {"x": 3}


@pytest.mark.parametrize("steps", [0, 2])
def test_the_earlier_model_is_asked_after_the_given_number_of_random_points(steps: int) -> None:
    """Also while no trial has ended."""
    search = searcher(results_of(valley), random_search_steps=steps)
    found = [valley(search.suggest(str(number)) or {}) for number in range(steps + 1)]
    assert found[-1] < 0.05 < min(found[:-1], default=1.0)


@pytest.mark.parametrize(
    "values", [[1.0] * 6, [1e300, 1.0, 1e-300, 2.0, 1e17, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1e-9]]
)
def test_strange_earlier_results_are_no_hindrance(values: list[float]) -> None:
    frame = results_of(valley, len(values)).assign(loss=values)
    assert np.isfinite(losses(searcher(frame), 8)).all()


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_earlier_results_are_none(rows: int) -> None:
    with_few = searcher(results_of(valley, 5).head(rows).astype(float))
    assert losses(with_few, 3) == losses(searcher(None), 3)


def test_learning_curves_begin_from_an_earlier_experiment_that_was_stopped_early() -> None:
    frame = results_of(moved).assign(training_iteration=[3, 9, 27] * 10)
    frame["loss"] += 100.0 / frame["training_iteration"]
    search = searcher(frame, max_t=27)

    def reports(config: dict[str, Any]) -> tuple[dict[str, float], ...]:
        return tuple({"loss": valley(config) + 10.0 / t, "training_iteration": t} for t in (1, 3, 9, 27))

    assert min(map(valley, Loop(search, None, in_flight=1).run(8, reports))) < 0.05


def test_where_earlier_trials_diverged_is_avoided() -> None:
    frame = results_of(lambda config: -config["x"] if config["x"] < 1 else math.inf)
    assert 0.5 < (searcher(frame).suggest("first") or {})["x"] < 1.1


def test_limits_are_those_of_the_new_experiment() -> None:
    """The earlier results lack the limited metric."""
    search = searcher(results_of(moved), limits=["latency_ms <= 10"])

    def outcome(config: dict[str, Any]) -> dict[str, float]:
        # The optimum at 0.7 breaks it.
        return {"loss": valley(config), "latency_ms": 10.0 * math.exp(config["x"] - 0.2)}

    told = map(outcome, Loop(search, None, in_flight=1).run(12, outcome))
    assert min(each["loss"] for each in told if each["latency_ms"] <= 10) < 0.35  # 0.25 is the least
