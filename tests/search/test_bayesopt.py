"""What is promised for `BayesOptSearch` beyond the conformance suite."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from bayes_opt.acquisition import (
    ConstantLiar,
    ExpectedImprovement,
    GPHedge,
    ProbabilityOfImprovement,
    UpperConfidenceBound,
)
from conformance import METRIC, Loop, loss, mixed_space, searcher
from ray import tune
from threadpoolctl import threadpool_info, threadpool_limits

from horovod_tune.search import BayesOptSearch, LogExpectedImprovement, SpaceError
from horovod_tune.search.gp.acquisition import decayed
from horovod_tune.search.proposal import in_another_option
from horovod_tune.search.space.search_space import SearchSpace


def add_random_points(search: BayesOptSearch, count: int) -> list[float]:
    """Give a new search ``count`` results at random points of the mixed space; returns their losses."""
    search.set_search_properties(METRIC, "min", mixed_space())
    generator = np.random.default_rng(0)
    losses = []
    for _ in range(count):
        config = {
            "lr": 10 ** generator.uniform(-5, -1),
            "momentum": generator.uniform(0, 0.99),
            "layers": int(generator.integers(1, 6)),
            "model": {"activation": ["relu", "tanh"][generator.integers(2)]},
        }
        losses.append(loss(config))
        search.add_evaluated_point(config, losses[-1])
    return losses


@pytest.mark.long
def test_it_finds_the_optimum_of_a_smooth_function() -> None:
    space = {"x": tune.uniform(-5, 10), "y": tune.uniform(0, 15)}

    def branin(config: dict[str, Any]) -> float:
        x, y = config["x"], config["y"]
        bowl = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6) ** 2
        return bowl + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10

    regrets = [min(map(branin, Loop(searcher(seed), space).run(30, branin))) - 0.397887 for seed in range(3)]
    assert np.median(regrets) < 0.05


@pytest.mark.long
def test_maximising_is_minimising_the_negative() -> None:
    smallest = Loop(searcher(), mixed_space()).run(12)
    largest = Loop(BayesOptSearch(metric=METRIC, mode="max", random_state=1), mixed_space())
    assert largest.run(12, lambda config: -loss(config)) == smallest


@pytest.mark.long
def test_no_point_is_suggested_twice_in_a_small_space_until_all_have_been(caplog: Any) -> None:
    space = {"a": tune.randint(0, 5), "b": tune.choice(["x", "y", "z"])}
    with caplog.at_level(logging.WARNING, logger="horovod_tune.search"):
        loop = Loop(searcher(), space)
        loop.run(15, lambda config: float(config["a"]))
        assert len({str(config) for config in loop.configs}) == 15 and not caplog.records
        loop._started = 15
        loop.run(22, lambda config: float(config["a"]))
    assert len(loop.configs) == 22
    assert len({str(config) for config in loop.configs[15:]}) == 7, "the second round repeats none either"
    (record,) = caplog.records
    assert "all points of the search space have been suggested (15)" in record.getMessage()


def optimizers_tried(**arguments: Any) -> list[str]:
    """Return the optimizers of ten suggestions after the start, in a search that knows that sgd is best."""
    space = {"optimizer": tune.choice(["sgd", "adam", "lion"]), "lr": tune.loguniform(1e-5, 1.0)}
    search = searcher(**arguments)
    search.set_search_properties(METRIC, "min", space)
    for place, lr in enumerate(np.geomspace(1e-5, 1.0, 9)):
        for optimizer in ("sgd", "adam", "lion"):
            value = 0.1 * abs(place - 4) + (optimizer != "sgd")
            search.add_evaluated_point({"optimizer": optimizer, "lr": float(lr)}, value)
    return [search.suggest(f"t{number}")["optimizer"] for number in range(10)]


def test_every_second_suggestion_is_in_another_option_than_the_best_point() -> None:
    """Or the search ends with variants of one option, while another was tried at three rates only."""
    tried = optimizers_tried()
    assert "sgd" not in tried[::2] and set(tried[1::2]) == {"sgd"}
    # A user's acquisition decides by itself.
    assert set(optimizers_tried(acquisition_function=ExpectedImprovement(xi=0.0))) == {"sgd"}


def test_the_categories_of_the_best_point_take_turns() -> None:
    inner = {"name": "sgd", "nesterov": tune.choice([True, False])}
    space = SearchSpace({"optimizer": tune.choice([inner, "adam"]), "norm": tune.choice(["batch", "layer"])})
    points = np.asarray(space.every_point())
    sgd = space.point({"optimizer": {"name": "sgd", "nesterov": True}, "norm": "layer"})
    adam = space.point({"optimizer": "adam", "norm": "batch"})
    optimizer, nesterov, norm = (
        space.names().index(n) for n in ("optimizer", "optimizer[0]/nesterov", "norm")
    )
    for best, categories in ((sgd, [optimizer, nesterov, norm]), (adam, [optimizer, norm])):
        for turn, category in enumerate(sorted(categories)):
            worth = in_another_option(lambda f: np.zeros(len(f)), space, np.asarray(best), turn)
            same = space.active(points)[:, category] & (points[:, category] == best[category])
            assert np.array_equal(worth(space.features(points)) < 0, same)
    numbers = SearchSpace({"x": tune.uniform(0, 1)})
    assert in_another_option(np.sum, numbers, np.zeros(1), 0) is np.sum


def test_sixteen_in_flight_are_spread_out() -> None:
    loop = Loop(searcher(), {"x": tune.uniform(0, 1), "y": tune.uniform(0, 1)}, in_flight=16)
    loop.run(12, lambda config: (config["x"] - 0.3) ** 2 + (config["y"] - 0.6) ** 2)
    points = np.array([list(config.values()) for config in [loop.start() for _ in range(16)] if config])
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)[np.triu_indices(16, 1)]
    assert len(points) == 16 and distances.min() > 1e-3


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), np.float32("nan"), 10**400, [10**400]])
def test_what_is_no_finite_float_counts_as_a_failure(bad: Any) -> None:
    search = searcher()
    configs = Loop(search, mixed_space()).run(10, lambda c: bad if c["momentum"] > 0.5 else loss(c))
    failed = sum(config["momentum"] > 0.5 for config in configs)
    assert 0 < failed < 10
    assert sum(trial.ending == "failed" for trial in search._history.trials.values()) == failed


@pytest.mark.slow
def test_a_region_that_fails_is_avoided() -> None:
    """The function gets better towards a wall behind which everything fails."""
    space = {"x": tune.uniform(0, 1), "y": tune.uniform(0, 1)}

    def wall(config: dict[str, Any]) -> float | Exception:
        return RuntimeError("oom") if config["x"] > 0.6 else 1.0 - config["x"] + (config["y"] - 0.5) ** 2

    late_failures, deep_failures, nearest = [], [], []
    for seed in range(6):
        configs = Loop(searcher(seed), space).run(30, wall)
        late_failures.append(sum(config["x"] > 0.6 for config in configs[15:]))
        deep_failures.append(sum(config["x"] > 0.7 for config in configs[15:]))
        nearest.append(max(config["x"] for config in configs if config["x"] <= 0.6))
    # A search that forgets its failures spends all of its trials at x = 1.
    assert np.median(late_failures) <= 11 and np.median(deep_failures) <= 4 and np.median(nearest) > 0.58


def centered(config: dict[str, Any]) -> bool:
    """Return True if it is the middle of `mixed_space`, whose layers are 1 to 5."""
    numbers = (math.log10(config["lr"]), config["momentum"], config["layers"])
    return numbers == pytest.approx((-3.0, 0.495, 3))


@pytest.mark.long
def test_the_last_point_before_the_model_is_the_middle_of_all_ranges() -> None:
    configs = Loop(searcher(), mixed_space()).run(12)
    assert [centered(config) for config in configs[:5]] == [False] * 4 + [True]
    configs = Loop(searcher(random_search_steps=8), mixed_space()).run(8)
    assert [centered(config) for config in configs] == [False] * 7 + [True]


def test_metrics_may_be_any_kind_of_number() -> None:
    search = searcher()
    tensor = partial(torch.tensor, requires_grad=True)
    kinds = [np.float32, np.array, lambda v: np.array([v]), int, float, np.int64, tensor]
    outcomes = iter(kinds * 5)
    Loop(search, mixed_space()).run(12, lambda config: next(outcomes)(2.0))
    assert {trial.value for trial in search._history.trials.values()} == {2.0}


@pytest.mark.parametrize(
    ("value", "message"), [(None, "it reported ['done', "), ("good", f"{METRIC}='good' and also")]
)
def test_a_missing_metric_is_logged_once_with_the_others(value: Any, message: str, caplog: Any) -> None:
    assert len(Loop(searcher(), mixed_space()).run(20, lambda config: value)) == 20
    [record] = caplog.records
    assert message in record.getMessage()


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        # As Tune does for a paused trial that is stopped.
        ([({METRIC: 0.9}, "report"), ({METRIC: 0.4}, "report"), (None, "end")], ("scored", 0.4)),
        ([(None, "end")], ("unknown", None)),
        ([(None, "error"), ({METRIC: 0.3}, "end")], ("scored", 0.3)),
        ([({METRIC: 0.5}, "report"), ({"lr": 0.1}, "report"), ({"lr": 0.1}, "end")], ("scored", 0.5)),
    ],
    ids=["stopped while paused", "removed before it began", "failed and then succeeded", "ended without it"],
)
def test_how_a_trial_counts(endings: list[tuple[Any, str]], expected: tuple[str, float | None]) -> None:
    search = searcher()
    search.set_search_properties(METRIC, "min", mixed_space())
    search.suggest("t")
    for result, event in endings:
        if event == "report":
            search.on_trial_result("t", result)
            search.on_pause("t")
        else:
            search.on_trial_complete("t", result, error=event == "error")
    trial = search._history.trials["t"]
    assert (trial.ending.value, trial.value) == expected


def test_a_trial_of_another_name_is_learned_from_by_its_configuration() -> None:
    search = searcher()
    search.set_search_properties(METRIC, "min", mixed_space())
    config = {"lr": 1e-3, "momentum": 0.5, "layers": 2, "model": {"activation": "relu", "constant": 7}}
    search.on_trial_complete("restarted", {METRIC: 0.3, "config": config})
    search.on_trial_complete("foreign", {METRIC: 0.3, "config": {"other": 1}})
    assert [trial.trial_id for trial in search._history.trials.values()] == ["restarted"]


def test_given_points_come_first_and_open_parameters_are_filled_in() -> None:
    points = [{"lr": 1e-2, "momentum": 0.9, "layers": 3, "model": {"activation": "tanh"}}, {"lr": 1e-4}]
    loop = Loop(searcher(points_to_evaluate=points), mixed_space())
    first, second = loop.start(), loop.start()
    assert first == points[0] and second is not None
    assert second["lr"] == 1e-4 and set(second) == {"lr", "momentum", "layers", "model"}
    space = {"a": tune.randint(0, 3), "b": tune.randint(0, 8)}
    loop = Loop(searcher(points_to_evaluate=[{"a": 1}] * 8), space, in_flight=8)
    assert {loop.start()["b"] for _ in range(8)} == set(range(8)), "no point is repeated"  # type: ignore[index]


@pytest.mark.parametrize(
    ("points", "rewards", "message"),
    [
        ([{"lr": 1.0}], None, r"points_to_evaluate\[0\]: 'lr' must be in"),
        ([{}, {"rl": 1e-3}], None, r"points_to_evaluate\[1\]: 'rl' is not in the search space"),
        ([{"only": "sgd"}], None, r"'only' must be one of \['adam'\], got 'sgd'"),
        ([{"model": {"constant": 8}}], None, "'model/constant' is the constant 7, got 8"),
        *(
            ([{"lr": 1e-3}], each, "evaluated_rewards must be a list of numbers")
            for each in ({5: 1}, {6.5}, 3)
        ),
        *(
            (each, None, "points_to_evaluate must be a list of dictionaries")
            for each in (5, {}, pd.DataFrame())
        ),
        ([{"lr": 1e-3}], [0.1, 0.2], "evaluated_rewards must have one value for each of the 1"),
        ([{"lr": 1e-3}], [0.1], "must give every parameter"),
        ([7], None, r"points_to_evaluate\[0\] must be a dictionary"),
        ([{"lr": 1e-3}], 0.1, "evaluated_rewards must be a list of numbers, got 0.1"),
        ([{"lr": 1e-3}], ["0.1"], r"evaluated_rewards\[0\] must be a number, .* got '0.1'"),
    ],
)
def test_given_points_that_do_not_fit_are_named(points: Any, rewards: Any, message: str) -> None:
    search = searcher(points_to_evaluate=points, evaluated_rewards=rewards)
    with pytest.raises(SpaceError, match=message):
        search.set_search_properties(METRIC, "min", mixed_space() | {"only": tune.choice(["adam"])})


def test_points_with_known_rewards_are_learned_and_not_run() -> None:
    points = [{"x": x} for x in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.1)]
    rewards = [*((point["x"] - 0.5) ** 2 for point in points[:-1]), None]
    loop = Loop(searcher(points_to_evaluate=points, evaluated_rewards=rewards), {"x": tune.uniform(0, 1)})
    assert loop.start() == points[-1], "the one without a reward"
    first = loop.start()
    assert first is not None and first not in points and abs(first["x"] - 0.5) < 0.1


def test_a_reward_may_be_of_an_option_without_parameters() -> None:
    options = [{"name": "sgd", "momentum": tune.uniform(0, 1)}, {"name": "adam"}]
    space = {"x": tune.uniform(0, 1), "optimizer": tune.choice(options)}
    points = [{"x": 0.5, "optimizer": {"name": "adam"}}]
    search = searcher(points_to_evaluate=points, evaluated_rewards=[1.0])
    search.set_search_properties(METRIC, "min", space)
    assert [trial.value for trial in search._history.trials.values()] == [1.0]
    twice = searcher(points_to_evaluate=points * 2)
    with pytest.raises(SpaceError, match=r"points_to_evaluate\[1\] repeats points_to_evaluate\[0\]"):
        twice.set_search_properties(METRIC, "min", space)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        *(({"x": (0, 1.0), "name": each}, r"'name' must be \(low, high\)") for each in ({1, 2}, "adam", 3)),
        ({"x": (1, 0)}, r"'x' must have finite bounds in order, got \(1, 0\)"),
        ({"x": (0.5, 3.7, int)}, r"'x' must have whole numbers as bounds, got \(0.5, 3.7,"),
        *(({"x": (0, math.inf, *kind)}, "'x' must have finite bounds in order") for kind in ([], [int])),
        *(
            ({"x": bounds}, r"'x' must be \(low, high, int\) or")
            for bounds in ((0, 3, "int"), (0, 9, int, 2), (0, 1, bool))
        ),
        ({"x": (0.0, 1.0), "x/y": (0.0, 1.0)}, "'x/y' gives 'x' a second time"),
        ({"x/y": (0.0, 1.0), "x": (0.0, 1.0)}, "'x' gives 'x' a second time"),
        (
            {"net/width": (8, 64, int), "net": {"width": (1, 2, int)}},
            "'net' gives 'net/width' a second time",
        ),
        *(([{"name": "x", "type": "range"}], "space must be a dictionary .* got list"), ("x", "got str")),
        ({"x": tune.uniform(-1.7e308, 1.7e308)}, "'x' must have bounds whose distance is a float"),
    ],
)
def test_a_space_that_cannot_be_used_is_named(space: Any, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        BayesOptSearch(space, metric=METRIC, mode="min")


@pytest.mark.long
def test_a_range_of_three_floats_is_searched_to_the_end() -> None:
    loop = Loop(searcher(), {"x": tune.uniform(1, 1 + 4e-16)})
    assert len(loop.run(12, lambda config: config["x"])) == 12


@pytest.mark.long
def test_a_choice_of_very_many_is_read_at_once() -> None:
    # From Ray's tests; comparing each with each would take minutes.
    space = {"seed": tune.choice(list(range(100_000))), "name": tune.choice(["a", 1, True, 1.0, None])}
    config = BayesOptSearch(space, metric=METRIC, mode="min").suggest("t")
    assert config is not None and config["seed"] in range(100_000)


def test_a_second_space_is_refused_and_the_same_one_taken() -> None:
    search = BayesOptSearch(mixed_space(), mode="min")
    assert not search.set_search_properties(METRIC, None, {"x": tune.uniform(0, 1)})
    assert search.set_search_properties(METRIC, None, mixed_space())
    assert search.set_search_properties(None, None, {"constant": 3})


def test_without_space_metric_or_mode_the_error_names_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="no search space: pass param_space"):
        BayesOptSearch(metric=METRIC, mode="min").suggest("t")
    with pytest.raises(RuntimeError, match="metric=None, mode=None"):
        BayesOptSearch({"x": (0, 1)}).suggest("t")


TWO, ONE = {"metric": ["a", "b"], "mode": ["min", "max"]}, {"metric": "a", "mode": "min"}
UCB = UpperConfidenceBound()


@pytest.mark.parametrize("xi", [math.nan, math.inf, -1])
def test_the_acquisition_function_checks_its_number(xi: float) -> None:
    with pytest.raises(ValueError, match=f"xi must be .* got {xi}"):
        LogExpectedImprovement(xi)


def test_numbers_and_strings_of_numpy_are_numbers_and_strings() -> None:
    def points(*, kappa: Any, alpha: Any, starts: Any, delay: Any, text: Any, steps: Any) -> list[Any]:
        search = BayesOptSearch(
            {"x": (0.0, 1.0)},
            metric=text("loss"),
            mode=text("min"),
            utility_kwargs={"kind": text("ucb"), "kappa": kappa, "kappa_decay_delay": delay},
            gp_params={"alpha": alpha, "n_restarts_optimizer": starts},
            random_search_steps=steps,
        )
        return Loop(search, None).run(8, lambda config: config["x"])

    plain = points(kappa=2.0, alpha=0.5, starts=1, delay=1, text=str, steps=4)
    one, half, two, four = np.int64(1), np.float32(0.5), np.float32(2), np.int64(4)
    assert points(kappa=two, alpha=half, starts=one, delay=one, text=np.str_, steps=four) == plain


@pytest.mark.parametrize(
    ("parameters", "value", "message"),
    [
        *(
            ({"x": 0.5}, value, "value must be a number, got")
            for value in ("0.3", None, [1, 2], {"a": 1}, True)
        ),
        ({"x": 0.5, "xx": 3}, 1.0, "'xx' is not in the search space"),
        ([0.5], 1.0, r"parameters must be a dictionary, got \[0.5\]"),
    ],
)
def test_an_evaluated_point_that_is_none_is_refused(parameters: Any, value: Any, message: str) -> None:
    search = searcher(space={"x": (0.0, 1.0)})
    with pytest.raises(ValueError, match=message):
        search.add_evaluated_point(parameters, value)
    search.add_evaluated_point({"x": 0.5}, None, error=True)  # type: ignore[arg-type]
    assert [trial.ending for trial in search._history.trials.values()] == ["failed"]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"mode": "best"}, ValueError, "mode must be one of max, min, got 'best'"),
        ({"metric": "", "mode": "min"}, ValueError, "metric must be the name of a reported value, got ''"),
        *(
            ({"metric": metric, "mode": ["min", "max"]}, ValueError, "metric must be a name, or a list")
            for metric in ({"a", "b"}, {"a": "max", "b": "min"}, ["a", ""], ["a", "a"], [["a"], ["b"]], 3)
        ),
        (TWO | {"mode": {"min", "max"}}, ValueError, "for each of the metrics"),
        (TWO | {"mode": [["min"], ["max"]]}, ValueError, r"mode\[0\] must be one of max, min, got \['min'\]"),
        ({"metric": ["a"], "mode": ["min"]}, ValueError, "at least two different names"),
        (TWO | {"mode": "min"}, ValueError, "for each of the metrics"),
        (TWO | {"mode": ["min", "least"]}, ValueError, "least"),
        (TWO | {"utility_kwargs": {"kind": "ei"}}, ValueError, "one metric"),
        (TWO | {"analysis": pd.DataFrame()}, ValueError, "analysis is for one metric"),
        (ONE | {"limits": ["b ~ 3"]}, ValueError, 'written like "latency_ms <= 20"'),
        (ONE | {"limits": ["b <= inf"]}, ValueError, "a finite bound, got 'b <= inf'"),
        (ONE | {"limits": ["b =< 3"]}, ValueError, "got 'b =< 3'"),
        (ONE | {"limits": "b < 3"}, TypeError, r"limits must be a list, as in limits=\['b < 3'\]"),
        *((ONE | {"limits": each}, TypeError, "limits must be a list such as") for each in (3, None, [3])),
        (
            ONE | {"limits": ["b < 3"], "points_to_evaluate": [{"x": 0.1}], "evaluated_rewards": [1.0]},
            ValueError,
            "one value per point",
        ),
        ({"random_state": "x"}, ValueError, "random_state must be .* got 'x'"),
        ({"random_state": -1}, ValueError, "random_state must be .* got -1"),
        (
            {"random_search_steps": -1},
            ValueError,
            "random_search_steps must be an integer of at least 0, got -1",
        ),
        ({"patience": 9}, TypeError, "patience is gone"),
        ({"nonsense": 1}, TypeError, "no argument 'nonsense'"),
        ({"gp_params": {"alpha": 0}}, ValueError, "'alpha'.* must be more than 0, got 0"),
        ({"gp_params": []}, ValueError, r"gp_params must be a dictionary, got \[\]"),
        ({"gp_params": {"kernel": None}}, ValueError, "accepts alpha and n_restarts_optimizer, got 'kernel'"),
        ({"gp_params": {"n_restarts_optimizer": 9}}, ValueError, "must be 0, 1, 2 or 3, got 9"),
        ({"gp_params": {"n_restarts_optimizer": True}}, ValueError, "must be 0, 1, 2 or 3, got True"),
        ({"max_t": float("inf")}, ValueError, "max_t must be a finite number, got inf"),
        ({"max_t": 0}, ValueError, "max_t must be more than 0, got 0"),
        ({"time_attr": ""}, ValueError, "time_attr must be the name of a reported value, got ''"),
        ({"analysis": 3}, TypeError, "analysis must be .* got int"),
        ({"analysis": "/nowhere/at/all"}, FileNotFoundError, "no folder at '/nowhere/at/all'"),
        ({"acquisition_function": GPHedge([UCB])}, TypeError, "cannot be a GPHedge; give one"),
        (
            {"acquisition_function": ConstantLiar(UCB)},
            TypeError,
            r"cannot be a ConstantLiar.*Pass only its base_acquisition",
        ),
        ({"acquisition_function": "ucb"}, TypeError, "acquisition_function must be one of.* got 'ucb'"),
        ({"utility_kwargs": {"kind": "best"}}, ValueError, "'kind'.* got 'best'"),
        ({"utility_kwargs": "ucb"}, ValueError, "utility_kwargs must be a dictionary, got 'ucb'"),
        *(
            ({"utility_kwargs": {key: bad}}, ValueError, rf"utility_kwargs\['{key}'\] must be .* got {bad}")
            for key, bad in {"kappa": -1, "xi": math.inf, "kappa_decay": 2, "kappa_decay_delay": -1}.items()
        ),
        ({"acquisition_function": UCB, "utility_kwargs": {"kind": "ei"}}, ValueError, "not both"),
    ],
)
def test_bad_arguments_are_named(kwargs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BayesOptSearch(**kwargs)


@pytest.mark.long
@pytest.mark.parametrize(
    "acquisition",
    [
        UpperConfidenceBound(kappa=1.5, exploration_decay=0.95),
        ExpectedImprovement(xi=0.01),
        ProbabilityOfImprovement(xi=0.01),
    ],
)
def test_bayesian_optimizations_acquisition_functions_can_be_used(acquisition: Any) -> None:
    search = searcher(acquisition_function=acquisition)
    outcomes = [loss(c) for c in Loop(search, mixed_space()).run(20)]
    assert min(outcomes[10:]) < min(outcomes[:6])


def test_the_xi_of_log_expected_improvement_is_in_the_objectives_unit() -> None:
    suggested = []
    for acquisition in (ExpectedImprovement, LogExpectedImprovement):
        search = BayesOptSearch({"x": (0, 1)}, METRIC, "max", acquisition_function=acquisition(xi=20))
        for x in np.linspace(0, 1, 9):
            search.add_evaluated_point({"x": x}, 1000 * math.sin(5 * x))
        suggested.append(search.suggest("t")["x"])
    assert suggested[0] == pytest.approx(suggested[1], abs=1e-3)


def test_exploration_decays_over_the_suggestions_and_the_users_object_stays() -> None:
    mine = UpperConfidenceBound(kappa=2.0, exploration_decay=0.5, exploration_decay_delay=2)
    assert [decayed(mine, n).kappa for n in range(5)] == [2.0, 2.0, 1.0, 0.5, 0.25]  # type: ignore[attr-defined]
    assert mine.kappa == 2.0


class CountsThreads(UpperConfidenceBound):
    """Records how many threads BLAS may use when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __deepcopy__(self, memo: Any) -> CountsThreads:
        return self

    def base_acq(self, mean: Any, std: Any) -> Any:
        self.seen = self.seen or blas_threads()
        return super().base_acq(mean, std)


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.long
def test_linear_algebra_has_one_thread_and_afterwards_as_many_as_before() -> None:
    """Threads that wait for one another on busy cores make a suggestion of 40 ms take seconds."""
    suggested = []
    for threads in (3, 1):
        acquisition = CountsThreads()
        with threadpool_limits(threads, user_api="blas"):
            suggested.append(Loop(searcher(acquisition_function=acquisition), mixed_space()).run(12))
            assert (acquisition.seen, blas_threads()) == ({1}, {threads})
    assert suggested[0] == suggested[1]


def test_no_random_state_means_another_search_each_time() -> None:
    first, second = (Loop(searcher(None), mixed_space()).start() for _ in range(2))  # type: ignore[arg-type]
    assert first != second


@pytest.mark.parametrize("acquisition", [None, UpperConfidenceBound(), LogExpectedImprovement(0.1)])
def test_a_search_warps_only_by_default(acquisition: Any) -> None:
    """A number on the objective's scale keeps the results on it."""
    search = searcher(acquisition_function=acquisition)
    search.set_search_properties(METRIC, "min", {"x": tune.uniform(0, 1), "y": tune.uniform(0, 1)})
    for x, y in np.random.default_rng(0).random((40, 2)):
        value = math.exp(10 * ((x - 0.3) ** 2 + (y - 0.6) ** 2))
        search.add_evaluated_point({"x": x, "y": y}, value)
    search.suggest("trial")
    assert (search._optimizer.fit_states[METRIC].scale == 0) == (acquisition is not None)


def test_a_fixed_noise_is_used() -> None:
    """With so much of it nothing is learned: the middle of its range is as good as any other value."""
    for noise, learns in ((None, True), (1e3, False)):
        search = searcher(gp_params={"alpha": noise, "n_restarts_optimizer": 0} if noise else None)
        losses = add_random_points(search, 30)
        assert (loss(search.suggest("t")) < min(losses)) is learns


@pytest.mark.long
def test_a_thousand_results_are_no_trouble() -> None:
    search = searcher()
    add_random_points(search, 1200)
    suggestion = search.suggest("t")
    assert loss(suggestion) < 0.2
