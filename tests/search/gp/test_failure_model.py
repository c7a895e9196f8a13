"""What failures depend on is learned from few of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from horovod_tune.search.gp.failure_model import FailureModel

Region = Callable[[NDArray[np.float64]], NDArray[np.bool_]]
# Regions that nobody chose the model on, and the number of parameters, most of which do not matter.
REGIONS: dict[str, tuple[int, Region]] = {
    "above a value": (6, lambda x: x[:, 2] > 0.7),
    "a band": (3, lambda x: np.abs(x[:, 1] - 0.5) < 0.15),
    "a corner": (5, lambda x: (x[:, 0] > 0.5) & (x[:, 3] > 0.5)),
}


def told_apart(region: Region, dimension: int, number: int, seed: int) -> float:
    """Return the share of pairs of a failing and a sound point in which the sound one is thought safer."""
    generator = np.random.default_rng(seed)
    tried, others = generator.random((number, dimension)), generator.random((400, dimension))
    failed = region(tried)
    safety = FailureModel(tried[~failed], tried[failed], np.arange(dimension))
    chances, fails = safety.log_probability(others), region(others)
    return float(np.mean(chances[~fails][:, None] > chances[fails][None, :]))


@pytest.mark.parametrize("name", REGIONS)
def test_what_failures_depend_on_is_learned_from_forty_trials(name: str) -> None:
    dimension, region = REGIONS[name]
    assert np.mean([told_apart(region, dimension, 40, seed) for seed in range(8)]) > 0.98


@pytest.mark.parametrize("scored", [0, 1])
@pytest.mark.parametrize("dimension", [1, 3])
def test_one_failure_is_enough_for_a_model(scored: int, dimension: int) -> None:
    safety = FailureModel(
        np.full((scored, dimension), 0.2), np.full((1, dimension), 0.8), np.arange(dimension)
    )
    near, far = safety.log_probability(np.asarray([[0.8] * dimension, [0.2] * dimension]))
    assert near <= far <= 0


def test_thousands_of_trials_are_modelled_and_the_slope_is_that_of_the_probability() -> None:
    generator = np.random.default_rng(0)
    tried = generator.random((1500, 3))
    failed = tried[:, 0] > 0.6
    safety = FailureModel(tried[~failed], tried[failed], np.arange(3))
    query = np.asarray([0.58, 0.4, 0.5])
    value, slope = safety.with_slope(query)
    assert value == pytest.approx(float(safety.log_probability(query[None, :])[0]))
    for i in range(3):
        step = np.zeros(3)
        step[i] = 1e-5
        low, high = safety.log_probability(np.stack([query - step, query + step]))
        assert slope[i] == pytest.approx((high - low) / 2e-5, rel=1e-3, abs=1e-6)
