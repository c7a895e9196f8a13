"""Several metrics at once, and limits that a result must meet."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance import Loop
from ray import tune

from horovod_tune.scoring import hypervolume
from horovod_tune.search import BayesOptSearch
from horovod_tune.search.gp.acquisition import PosteriorDraws
from horovod_tune.search.gp.feasibility import joint
from horovod_tune.search.gp.fitted_model import FittedModel, ModelOptions
from horovod_tune.search.gp.hypervolume import HypervolumeGain

pytestmark = pytest.mark.long

SQUARE = {"x": tune.uniform(0, 1), "y": tune.uniform(0, 1)}


def run(search: BayesOptSearch, outcome: Callable[[Any], Any], trials: int, in_flight: int = 1) -> list[Any]:
    """Return what each trial reported."""
    return [outcome(config) for config in Loop(search, None, in_flight).run(trials, outcome)]


def random_points(trials: int, seed: int) -> list[dict[str, float]]:
    drawn = np.random.default_rng(seed).random((trials, 2))
    return [{"x": float(x), "y": float(y)} for x, y in drawn]


def narrow(config: dict[str, float]) -> dict[str, float]:
    """Best at (1, 1); latency keeps a curved strip that ends before it (its best accuracy is 0.795)."""
    x, y = config["x"], config["y"]
    return {"accuracy": 0.6 * x + 0.4 * y, "latency_ms": 5 * np.exp(2.2 * x * x + y)}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "in_flight"), [(1, 1), (2, 4)])
def test_the_best_within_a_limit_is_found(seed: int, in_flight: int) -> None:
    limits = ["latency_ms <= 30"]
    search = BayesOptSearch(SQUARE, "accuracy", "max", random_state=seed, limits=limits)
    told = run(search, narrow, 30, in_flight)
    grid = [narrow({"x": x, "y": y}) for x, y in itertools.product(np.linspace(0, 1, 201), repeat=2)]
    best = max(r["accuracy"] for r in grid if r["latency_ms"] <= 30)
    kept = [result["accuracy"] for result in told if result["latency_ms"] <= 30]
    by_chance = [narrow(point) for point in random_points(30, seed)]
    assert best - max(kept) < 0.01
    assert max(kept) > max(r["accuracy"] for r in by_chance if r["latency_ms"] <= 30)
    # It learns where the edge is, and does not run into it forever.
    assert len(kept) >= 12


def test_without_a_result_that_meets_the_limit_one_is_looked_for() -> None:
    # One point in a thousand meets it, and the metric draws the other way.
    def outcome(config: dict[str, float]) -> dict[str, float]:
        away = np.hypot(config["x"] - 0.07, config["y"] - 0.93)
        return {"loss": -away, "memory": 1 + 10 * away}

    search = BayesOptSearch(SQUARE, "loss", "min", limits=["memory < 1.18"])
    assert any(result["memory"] < 1.18 for result in run(search, outcome, 25))


def trade_off(config: dict[str, float]) -> dict[str, float]:
    """ZDT2 in two dimensions: a front that is not convex, so that no weighted sum finds its middle."""
    g = 1 + 9 * config["y"]
    return {"first": config["x"], "second": g * (1 - (config["x"] / g) ** 2)}


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [1, 4])
def test_the_front_of_two_metrics_is_found(in_flight: int) -> None:
    def volume(results: list[dict[str, float]]) -> float:
        return hypervolume(np.asarray([[r["first"], r["second"]] for r in results]), [1.1, 1.1], ["min"] * 2)

    search = BayesOptSearch(SQUARE, ["first", "second"], ["min", "min"], random_state=3)
    found = volume(run(search, trade_off, 30, in_flight))
    whole = volume([trade_off({"x": x, "y": 0.0}) for x in np.linspace(0, 1, 201)])
    by_chance = volume([trade_off(point) for point in random_points(300, 3)])
    assert found > 0.9 * whole > by_chance


def test_a_front_within_a_limit() -> None:
    def outcome(config: dict[str, float]) -> dict[str, float]:
        return {**trade_off(config), "memory": 10 * config["x"]}

    search = BayesOptSearch(SQUARE, ["first", "second"], ["min", "min"], limits=["memory >= 4"])
    late = run(search, outcome, 24, 2)[12:]
    assert sum(result["memory"] >= 4 for result in late) >= 8


@pytest.mark.slow
def test_a_limit_on_the_metric_itself_and_three_metrics() -> None:
    def outcome(config: dict[str, float]) -> dict[str, float]:
        return {**trade_off(config), "third": abs(config["x"] - config["y"])}

    search = BayesOptSearch(
        SQUARE, ["first", "second", "third"], ["min", "max", "min"], limits=["first <= 0.5"]
    )
    assert sum(result["first"] <= 0.5 for result in run(search, outcome, 16)[8:]) >= 5


@pytest.mark.parametrize(
    "kind", [{"metric": ["a", "b"], "mode": ["min"] * 2}, {"metric": "a", "mode": "min", "limits": ["b < 3"]}]
)
def test_an_evaluated_point_has_no_values_of_other_metrics(kind: dict[str, Any]) -> None:
    search = BayesOptSearch(SQUARE, **kind)
    with pytest.raises(ValueError, match=r"add_evaluated_point takes one value.* got metric="):
        search.add_evaluated_point({"x": 0.5, "y": 0.5}, 1.0)


def test_learning_curves_within_a_limit() -> None:
    search = BayesOptSearch(SQUARE, "accuracy", "max", limits=["latency_ms <= 30"], max_t=4)

    def reports(config: dict[str, float]) -> tuple[dict[str, float], ...]:
        result = narrow(config)
        ends = [result["accuracy"] * (1 - 0.5**epoch) for epoch in range(1, 5)]
        return tuple(result | {"accuracy": end, "training_iteration": k + 1} for k, end in enumerate(ends))

    late = run(search, reports, 20)[8:]
    assert search._optimizer.learns_from_curves
    assert sum(told[-1]["latency_ms"] <= 30 for told in late) >= 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_further_metric_that_is_no_number(value: float | None, caplog: pytest.LogCaptureFixture) -> None:
    def outcome(config: dict[str, float]) -> dict[str, Any]:
        bad = config["x"] < 0.5
        return {**narrow(config), **({"latency_ms": value} if bad else {})}

    search = BayesOptSearch(SQUARE, ["accuracy", "latency_ms"], ["max", "min"])
    run(search, outcome, 12)
    endings = {trial.ending.value for trial in search._history.trials.values()}
    assert endings == ({"scored", "unknown"} if value is None else {"scored", "failed"})
    if value is None:
        assert "latency_ms" in caplog.text


def test_a_limit_that_no_trial_reports_is_named(caplog: pytest.LogCaptureFixture) -> None:
    search = BayesOptSearch(SQUARE, "accuracy", "max", limits=["power_w <= 3"])
    run(search, narrow, 8)
    assert caplog.text.count("'power_w'") == 1


@pytest.mark.filterwarnings("error")
def test_a_limit_that_all_trials_break_alike_is_no_trouble() -> None:
    search = BayesOptSearch(SQUARE, "accuracy", "max", limits=["latency_ms <= 20"])
    run(search, lambda config: {**narrow(config), "latency_ms": 100.0}, 12)


def test_the_largest_float_is_a_disaster_for_a_front_too() -> None:
    def outcome(config: dict[str, float]) -> dict[str, Any]:
        return narrow(config) | ({"latency_ms": sys.float_info.max} if config["x"] > 0.6 else {})

    search = BayesOptSearch(SQUARE, ["accuracy", "latency_ms"], ["max", "min"])
    run(search, outcome, 14)


def test_the_gain_is_the_hypervolume_improvement() -> None:
    """Against the exact hypervolume, averaged over draws of two metrics of which little is known."""
    generator = np.random.default_rng(4)
    features = generator.random((6, 2))
    values = np.stack([np.sin(6 * features[:, 0]), np.cos(5 * features[:, 1]) - features[:, 0]])
    exactly = ModelOptions(fixed_noise=1e-6)
    models = [FittedModel(features, each, np.arange(2), exactly) for each in values]
    drawn = [PosteriorDraws(model, features[:0], 2 + n) for n, model in enumerate(models)]
    gain = HypervolumeGain(drawn, np.ones(6, dtype=bool), joint([]), 2, features)
    queries = generator.random((25, 2))
    known = np.stack([one.values.mean(axis=1) for one in drawn], axis=1)
    corner = gain._reference[:, 0, 0, 0]
    before = hypervolume(known, corner, ["max", "max"])
    predicted = [one.process.predict(queries) for one in drawn]
    means = np.stack([mean.mean(axis=1) for mean, _ in predicted], axis=1)
    stds = np.stack([std for _, std in predicted], axis=1)
    exact = np.zeros(len(queries))
    for draw in generator.standard_normal((150, 2)):
        tried = means + stds * draw
        exact += [hypervolume(np.vstack([known, one]), corner, ["max", "max"]) - before for one in tried]
    estimate = np.exp(gain(queries))
    assert np.corrcoef(estimate, exact)[0, 1] > 0.9
    assert exact[int(np.argmax(estimate))] > 0.8 * exact.max()
