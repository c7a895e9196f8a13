"""Parameters inside the options of a choice: they exist only if their option is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance import METRIC, Loop
from ray import tune
from ray.tune.search.sample import Domain

from horovod_tune.search import BayesOptSearch, SpaceError
from horovod_tune.search.space.search_space import SearchSpace


def optimizers() -> dict[str, Any]:
    return {
        "opt": tune.choice(
            [
                {"name": "sgd", "lr": tune.loguniform(1e-3, 1.0), "momentum": tune.uniform(0.0, 1.0)},
                {"name": "adam", "lr": tune.loguniform(1e-5, 1e-2)},
                None,
                {"name": "staged", "decay": tune.choice([0.1, {"every": tune.randint(1, 4)}])},
                tune.uniform(5.0, 6.0),
            ]
        ),
        "width": tune.randint(1, 9),
    }


def has_domain(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, Domain) or any(map(has_domain, parts))


def random_points(space: SearchSpace, number: int = 300) -> list[tuple[float, ...]]:
    quantiles = np.random.default_rng(0).random((number, space.dimension))
    return [space.canonical(point) for point in space.from_quantiles(quantiles)]


def test_no_domain_reaches_the_training_function_and_each_option_brings_its_own_parameters() -> None:
    space = SearchSpace(optimizers())
    kinds = set()
    for point in random_points(space):
        config = space.config(point, seed=0)
        option = config["opt"]
        assert not has_domain(config) and space.point(config) == pytest.approx(point, abs=1e-12)
        if isinstance(option, dict):
            kinds.add(option["name"])
            expected = {
                "sgd": {"name", "lr", "momentum"},
                "adam": {"name", "lr"},
                "staged": {"name", "decay"},
            }
            assert set(option) == expected[option["name"]]
            if option["name"] == "adam":
                assert 1e-5 <= option["lr"] <= 1e-2
            if isinstance(option.get("decay"), dict):
                kinds.add("nested")
                assert option["decay"]["every"] in (1, 2, 3)
        else:
            kinds.add(type(option).__name__)
    assert kinds == {"sgd", "adam", "staged", "nested", "NoneType", "float"}


def test_domains_in_tuples_within_tuples_are_resolved() -> None:
    betas = (tune.choice([(0.9, (tune.uniform(0, 1), "t")), "none"]), (tune.randn(), tune.randint(1, 3)))
    space = SearchSpace({"betas": betas})
    for point in random_points(space, 50):
        config = space.config(point, seed=0)
        assert not has_domain(config) and space.point(config) == pytest.approx(point)
        assert isinstance(config["betas"], tuple) and config["betas"][1][1] in (1, 2)


def test_inactive_parameters_make_no_difference_to_the_model_and_to_which_points_are_equal() -> None:
    space = SearchSpace(optimizers())
    names = space.names()
    momentum, choice = names.index("opt[0]/momentum"), names.index("opt")
    adam = np.full((2, space.dimension), 0.0)
    adam[:, choice] = 1.0
    adam[:, momentum] = [0.1, 0.9]
    first, second = space.features(adam)
    assert np.array_equal(first, second) and space.canonical(adam[0]) == space.canonical(adam[1])
    sgd = adam.copy()
    sgd[:, choice] = 0.0
    first, second = space.features(sgd)
    assert not np.array_equal(first, second) and space.canonical(sgd[0]) != space.canonical(sgd[1])


def test_a_choice_of_one_option_with_a_domain_is_that_domain() -> None:
    space = SearchSpace({"x": tune.choice([{"m": tune.uniform(0, 1)}])})
    assert space.dimension == 1
    assert space.config((0.25,), seed=0) == {"x": {"m": 0.25}}


@pytest.mark.long
def test_every_point_of_a_finite_conditional_space_is_counted_and_listed_once() -> None:
    inner = [
        {"k": tune.choice(["a", "b", "c"]), "on": tune.choice([True, False])},
        {"k": tune.randint(0, 5)},
        7,
    ]
    others = {"n": tune.lograndint(1, 4), "q": tune.qloguniform(0.1, 0.4, 0.1), "o": tune.choice("xy")}
    space = SearchSpace({"c": tune.choice(inner), **others})
    points = space.every_point()
    assert len(points) == len(set(points)) == space.size == (3 * 2 + 5 + 1) * 3 * 4 * 2
    search = BayesOptSearch({"c": tune.choice(inner)}, metric=METRIC, mode="min", random_state=0)
    configs = Loop(search, None).run(12, lambda config: float(len(str(config))))
    assert len({str(config) for config in configs}) == 12


def test_sample_from_inside_an_option_sees_what_it_depends_on() -> None:
    option = {"width": tune.randint(1, 9), "double": tune.sample_from(lambda c: 2 * c["net"]["width"])}
    space = SearchSpace({"net": tune.choice([option, "none"])})
    for point in random_points(space, 50):
        net = space.config(point, seed=0)["net"]
        assert net == "none" or net["double"] == 2 * net["width"]


def test_a_value_that_is_no_option_is_named() -> None:
    message = r"'opt' must be one of \[\{'lr': [^<]*\], got \{'name': 'adam', 'lr': 0.5\}"
    with pytest.raises(SpaceError, match=message):
        SearchSpace(optimizers()).point({"opt": {"name": "adam", "lr": 0.5}, "width": 2})


def test_a_given_point_may_have_sampled_values_and_leave_out_parameters_of_its_option() -> None:
    sgd = {"name": "sgd", "momentum": tune.uniform(0, 1), "noise": tune.randn()}
    space = {"opt": tune.choice([{"name": "adam", "noise": tune.randn()}, sgd])}
    points = [{"opt": {"name": "sgd", "noise": 7.0, "momentum": 0.5}}, {"opt": {"name": "sgd"}}]
    search = BayesOptSearch(space, METRIC, "min", points_to_evaluate=points)
    assert search.suggest("a") == points[0]
    config = search.suggest("b")
    assert config is not None and set(config["opt"]) == set(sgd) and not has_domain(config)
    with pytest.raises(SpaceError, match="'opt' must be one of"):  # it may be either option
        SearchSpace(space).partial({"opt": {"noise": 7.0}})
    with pytest.raises(SpaceError, match="'opt/momentum' is missing"):
        SearchSpace(space).point({"opt": {"name": "sgd", "noise": 7.0}})


def loss(config: dict[str, Any]) -> float:
    option = config["opt"]
    if not isinstance(option, dict) or option["name"] == "staged":
        return 2.0
    if option["name"] == "adam":
        return 0.5 + (np.log10(option["lr"]) + 3) ** 2
    return float((np.log10(option["lr"]) + 1) ** 2 + (option["momentum"] - 0.9) ** 2)


@pytest.mark.slow
def test_the_search_finds_the_best_option_and_its_parameters() -> None:
    best = []
    for seed in range(3):
        search = BayesOptSearch(metric=METRIC, mode="min", random_state=seed)
        best.append(min(map(loss, Loop(search, optimizers()).run(35, loss))))
    assert np.median(best) < 0.05
