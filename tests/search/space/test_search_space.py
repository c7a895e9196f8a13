"""Tune's domains and bayesian-optimization's bounds, to the model's space and back."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from bayes_opt.parameter import CategoricalParameter, FloatParameter, IntParameter
from ray import tune

from horovod_tune.search import SpaceError
from horovod_tune.search.space.domains import from_mixed
from horovod_tune.search.space.search_space import SearchSpace

EDGES = [0.0, np.nextafter(1.0, 0.0), 0.5, 1e-17, 1 / 3]


def values_of(domain: Any, quantiles: Any) -> list[Any]:
    space = SearchSpace({"p": domain})
    points = space.from_quantiles(np.asarray(quantiles)[:, None])
    return [space.config(space.canonical(point), seed=0)["p"] for point in points]


@pytest.mark.parametrize(
    ("domain", "low", "high", "kind"),
    [
        (tune.uniform(-0.3, 0.1), -0.3, 0.1, float),
        (tune.uniform(1e-7, 0.3), 1e-7, 0.3, float),
        (tune.quniform(0.0, 0.3, 0.1), 0.0, 0.3, float),
        (tune.loguniform(1e-5, 1e-1), 1e-5, 1e-1, float),
        (tune.loguniform(3e-7, 0.7), 3e-7, 0.7, float),
        (tune.qloguniform(1e-4, 1e-1, 1e-4), 1e-4, 1e-1, float),
        (tune.randint(-3, 9), -3, 8, int),
        (tune.qrandint(8, 64, 8), 8, 64, int),
        (tune.lograndint(1, 1000), 1, 999, int),
        (tune.qlograndint(16, 1024, 16), 16, 1024, int),
    ],
)
def test_values_are_in_the_domain_to_the_last_bit(domain: Any, low: Any, high: Any, kind: type) -> None:
    values = values_of(domain, EDGES + list(np.linspace(0, 1, 500, endpoint=False)))
    assert all(domain.is_valid(value) and low <= value <= high for value in values)
    assert {type(value) for value in values} == {kind}
    assert min(values) <= low + 0.01 * (high - low) and max(values) >= high - 0.01 * (high - low)


def test_a_range_over_powers_of_ten_is_drawn_half_uniformly_and_half_from_its_powers() -> None:
    values = np.asarray(values_of(tune.uniform(1e-6, 1.0), np.linspace(0, 1, 2000, endpoint=False)))
    for low, high in [(1e-6, 1e-4), (1e-4, 1e-2), (1e-2, 0.1), (0.1, 0.5), (0.5, 1.0)]:
        share = np.mean((low <= values) & (values < high))
        assert share == pytest.approx(
            0.5 * (high - low) + 0.5 * math.log(high / low) / math.log(1e6), abs=0.005
        )


@pytest.mark.parametrize(
    ("low", "high", "middle"),
    [
        (1e-3, 1.0, math.sqrt(1e-3)),
        *((digit * 1e-4, digit / 10, digit * math.sqrt(1e-5)) for digit in range(1, 10)),
        (1e-8, 1.0, 1e-4),
        (1e-3, 0.999, 0.5),  # less than a thousand times as much
        (1e-9, 1.0, 0.5),  # the lower end stands for 0
        (5e-324, 1e300, 5e299),
        (0.0, 1.0, 0.5),
        (-1.0, 1000.0, 499.5),
        (-1.0, -1e-5, -0.5),
    ],
)
def test_which_uniform_ranges_are_over_powers_of_ten(low: float, high: float, middle: float) -> None:
    space = SearchSpace({"p": tune.uniform(low, high)})
    assert space.config((0.5,), seed=0)["p"] == pytest.approx(middle, rel=1e-4)
    assert SearchSpace(from_mixed({"p": (low, high)})).describe() == space.describe()


@pytest.mark.parametrize(
    "domain",
    [tune.uniform(0.1, 0.7), tune.uniform(1e-5, 0.1), tune.loguniform(1e-5, 0.1), tune.quniform(0, 2, 0.1)],
)
def test_a_value_read_back_is_the_same_point(domain: Any) -> None:
    space = SearchSpace({"p": domain})
    for quantile in np.linspace(0, 1, 101, endpoint=False):
        point = space.canonical(space.from_quantiles(np.array([[quantile]]))[0])
        value = space.config(point, seed=0)["p"]
        again = space.config(space.point({"p": value}), seed=0)["p"]
        assert again == pytest.approx(value, rel=1e-12)


def test_integers_of_a_small_range_are_drawn_evenly() -> None:
    values = values_of(tune.randint(0, 4), (np.arange(400) + 0.5) / 400)
    assert [values.count(value) for value in range(4)] == [100, 100, 100, 100]


def test_choices_may_be_anything() -> None:
    choices = [None, {"name": "sgd", "nesterov": True}, [1, 2], (3, 4), "text", 1, True, 1.0, math.sin]
    space = SearchSpace({"p": tune.choice(choices)})
    seen = [space.config(space.point({"p": choice}), seed=0)["p"] for choice in choices]
    assert seen == choices and [type(value) for value in seen] == [type(choice) for choice in choices]


def test_two_different_categories_are_at_distance_one() -> None:
    space = SearchSpace({"p": tune.choice(["a", "b", "c"]), "x": tune.uniform(0, 1)})
    a, b, c = space.features(np.array([[0, 0.2], [1, 0.2], [2, 0.2]]))
    assert np.linalg.norm(a - b) == pytest.approx(1.0) == np.linalg.norm(b - c)


def test_nested_spaces_keep_their_shape_and_leave_constants_to_tune() -> None:
    spec = {
        "model": {"depth": tune.randint(1, 4), "name": "resnet"},
        "epochs": 3,
        "sizes": [tune.choice([8]), 5],
    }
    space = SearchSpace(spec)
    config = space.config(space.point({"model": {"depth": 2}}), seed=0)
    assert config == {"model": {"depth": 2}, "sizes": [8, 5]}
    whole = SearchSpace(spec, include_constants=True)
    assert whole.config((0.5,), seed=0) == {
        "model": {"depth": 2, "name": "resnet"},
        "epochs": 3,
        "sizes": [8, 5],
    }


def test_randn_and_sample_from_are_drawn_outside_the_model() -> None:
    spec = {
        "width": tune.randint(1, 9),
        "noise": tune.randn(5.0, 0.1),
        "double": tune.sample_from(lambda config: config["width"] * 2),
        "old_style": tune.sample_from(lambda spec: spec.config.width + 1),
        "chained": tune.sample_from(lambda config: config["double"] + 1),
        "random": tune.sample_from(lambda _: np.random.uniform(100) ** 2),
    }
    space = SearchSpace(spec)
    assert space.dimension == 1
    config = space.config(space.point({"width": 4}), seed=3)
    assert (config["double"], config["old_style"], config["chained"]) == (8, 5, 9)
    assert 4.0 < config["noise"] < 6.0
    assert config == space.config(space.point({"width": 4}), seed=3)
    assert config["random"] != space.config(space.point({"width": 4}), seed=4)["random"]


def test_sampling_does_not_change_the_users_random_state() -> None:
    space = SearchSpace({"r": tune.sample_from(lambda _: np.random.rand() + random.random())})
    np.random.seed(0)
    random.seed(0)
    expected = np.random.rand(), random.random()
    np.random.seed(0)
    random.seed(0)
    space.config((), seed=1)
    assert (np.random.rand(), random.random()) == expected


def test_functions_that_wait_for_each_other_are_an_error() -> None:
    space = SearchSpace({"a": tune.sample_from(lambda c: c["b"]), "b": tune.sample_from(lambda c: c["a"])})
    with pytest.raises(SpaceError, match="'a' cannot be sampled"):
        space.config((), seed=0)


def test_grid_search_is_refused_with_the_cure() -> None:
    with pytest.raises(SpaceError, match=r"tune.grid_search at 'model/lr'.*tune.choice"):
        SearchSpace({"model": {"lr": tune.grid_search([1, 2])}})


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        (tune.choice([]), "'p' must be a choice of at least one value"),
        (tune.randint(3, 3), "'p' has no value"),
        (tune.qrandint(9, 15, 8), "'p' has no value"),
        (tune.randint("1", 9), "'p' must have numbers as bounds, got '1' and 9"),
    ],
)
def test_a_domain_without_values_is_an_error(domain: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        SearchSpace({"p": domain})


def test_parameters_with_one_value_are_not_modelled() -> None:
    space = SearchSpace({"a": tune.randint(3, 4), "b": tune.choice(["only"]), "c": tune.uniform(0, 1)})
    assert space.dimension == 1
    assert space.config((0.0,), seed=0) == {"a": 3, "b": "only", "c": 0.0}


def test_bayesian_optimizations_own_bounds_are_understood() -> None:
    spec = from_mixed(
        {
            "x": (0, 1),
            "y": (-1.5, 2.5, float),
            "n": (1, 5.0, np.int64),
            "c": ("a", "b", "c"),
            "deep/lr": (1e-3, 1e-1, np.float32),
            "deep/er": {"constant": ("a",)},
            "deep": {"er": {"width": (np.int64(1), 2)}},
            "f": FloatParameter("f", (0.0, 2.0)),
            "i": IntParameter("i", (0, 3)),
            "k": CategoricalParameter("k", [True, None]),
        }
    )
    space = SearchSpace(spec)
    assert space.dimension == 9
    last = space.config(tuple([1.0] * 9), seed=0)
    assert last == {
        "x": 1.0, "y": 2.5, "n": 5, "c": "b", "f": 2.0, "i": 3, "k": None,
        "deep": {"lr": 0.1, "er": {"constant": "a", "width": 2.0}},
    }  # fmt: skip


def test_a_configuration_outside_the_space_is_named() -> None:
    space = SearchSpace(
        {"lr": tune.loguniform(1e-4, 1e-1), "n": tune.qrandint(8, 64, 8), "c": tune.choice([1, 2])}
    )
    good = {"lr": 1e-3, "n": 16, "c": 1}
    for bad, message in [
        ({"lr": 1.0}, r"'lr' must be in \[0.0001, 0.1\], got 1.0"),
        ({"lr": "big"}, "'lr' must be a number, got 'big'"),
        ({"n": 72}, r"'n' must be in \[8, 64\], got 72"),
        ({"n": 12}, "'n' must be a multiple of 8, got 12"),
        ({"c": 3}, r"'c' must be one of \[1, 2\], got 3"),
    ]:
        with pytest.raises(SpaceError, match=message):
            space.point(good | bad)
    with pytest.raises(SpaceError, match="'n' is missing"):
        space.point({"lr": 1e-3, "c": 1})
