"""What lowers the worth of a point whatever its objective may be."""

from __future__ import annotations

import numpy as np
import pytest
from ray import tune

from horovod_tune.search import BayesOptSearch
from horovod_tune.search.gp.chances import Inside
from horovod_tune.search.space.search_space import SearchSpace


def test_the_slope_of_the_belief_that_the_best_is_inside_is_that_of_finite_differences() -> None:
    belief = Inside(np.array([0, 2]), results=4)
    generator = np.random.default_rng(0)
    for _ in range(50):
        query = generator.random(4)
        value, slope = belief.with_slope(query)
        assert value == pytest.approx(belief.log_probability(query[None])[0])
        for axis in range(4):
            step = np.eye(4)[axis] * 1e-6
            ahead, behind = (belief.log_probability((query + side * step)[None])[0] for side in (1, -1))
            assert slope[axis] == pytest.approx((ahead - behind) / 2e-6, abs=1e-4)


def test_it_is_about_ends_alone_and_fades() -> None:
    points = np.array([[0.5, 0.0], [0.25, 1.0], [0.1, 0.5], [0.0, 0.5], [1.0, 0.5]])
    few, many = (Inside(np.array([0]), results).log_probability(points) for results in (5, 500))
    assert list(few[:2]) == [0.0, 0.0] and few[2] > few[3] == few[4] == -1.0
    assert np.all(np.abs(many) <= 0.01)


def test_categories_and_short_choices_have_no_ends() -> None:
    space = SearchSpace(
        {
            "act": tune.choice(["relu", "tanh", "gelu"]),
            "lr": tune.loguniform(1e-5, 1.0),
            "layers": tune.randint(1, 5),
            "width": tune.lograndint(8, 1025),
        }
    )
    assert list(space.columns_of_ranges) == [3, 5]


def test_the_best_is_found_in_a_corner_too() -> None:
    search = BayesOptSearch({f"x{i}": (0.0, 1.0) for i in range(4)}, metric="loss", mode="min")
    best = np.inf
    for number in range(25):
        config = search.suggest(f"t{number}")
        loss = sum(x * (1 + x) for x in config.values())
        best = min(best, loss)
        search.on_trial_complete(f"t{number}", {"loss": loss})
    assert best < 1e-6
