"""What scripts do with Ray's own BayesOptSearch, and what its tests claim of it."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conformance import Loop
from ray import tune
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
from ray.tune.search import ConcurrencyLimiter

from horovod_tune.creator import DistributedTrainableCreator
from horovod_tune.run_settings import prepare
from horovod_tune.search import BayesOptSearch


def test_a_limiter_is_restored_from_an_experiments_folder(tmp_path: Path) -> None:
    def limited() -> ConcurrencyLimiter:
        return ConcurrencyLimiter(BayesOptSearch({"x": tune.uniform(0, 1)}, metric="m", mode="min"), 1)

    first = limited()
    first.suggest("a")
    first.searcher.save_to_dir(str(tmp_path), "session")
    for restored in (limited(), limited().searcher):
        restored.restore_from_dir(str(tmp_path))
    assert isinstance(restored, BayesOptSearch) and list(restored._history.trials) == ["a"]


def test_a_result_before_the_space_is_known_again_is_kept(tmp_path: Path) -> None:
    space = {"f": tune.choice([len, sum]), "x": tune.uniform(0, 1)}  # functions are not in JSON
    search = BayesOptSearch(space, metric="m", mode="min")
    search.suggest("1")
    search.save(str(tmp_path / "s"))
    fresh = BayesOptSearch()
    fresh.restore(str(tmp_path / "s"))
    fresh.on_trial_complete("1", {"m": 3.0})
    fresh.save(str(tmp_path / "s"))
    fresh = BayesOptSearch()
    fresh.restore(str(tmp_path / "s"))
    with pytest.raises(RuntimeError, match="no search space"):
        fresh.suggest("2")
    assert fresh.set_search_properties("m", "min", space)
    assert fresh._history.trials["1"].value == 3.0


def test_repeated_values_of_a_choice_are_one_value_that_is_drawn_more_often() -> None:
    search = BayesOptSearch({"x": tune.choice(["a", "a", "b"])}, metric="m", mode="min")
    seen = [config["x"] for config in Loop(search, None, 1).run(6, lambda config: {"m": 1.0})]
    assert sorted(seen[:2]) == ["a", "b"] and len(seen) == 6


def test_domains_and_tuples_of_bounds_may_be_mixed() -> None:
    space = {"a": tune.uniform(5, 6), "b": (8.0, 9.0), "n": (1, 3, int), "betas": [0.9, 0.999], "c": 3}
    space["model"] = {"y": (2, 3.0)}
    config = BayesOptSearch(space, metric="m", mode="max").suggest("0")
    assert 8.0 < config["b"] < 9.0 and config["n"] in (1, 2, 3) and 2 <= config["model"]["y"] <= 3
    assert (config["betas"], config["c"]) == ([0.9, 0.999], 3)


@pytest.mark.parametrize("first", [-(2**62), 2**53, 2**62 - 3])
def test_neighbouring_integers_are_distinguished_however_large(first: int) -> None:
    domains = {"one": tune.randint(first, first + 1), "three": tune.randint(first, first + 3)}
    search = BayesOptSearch(domains, metric="m", mode="max")
    configs = Loop(search, None, 1).run(6, lambda config: {"m": float(config["three"] - first)})
    assert {config["one"] for config in configs} == {first}
    assert {config["three"] for config in configs} == {first, first + 1, first + 2}


def test_arguments_of_rays_class_at_their_defaults_are_passed_over_with_a_warning(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="horovod_tune.search"):
        BayesOptSearch(verbose=0, patience=5, skip_duplicate=True, repeat_float_precision=5)
    assert len(caplog.records) == 4 and "skip_duplicate is ignored" in caplog.text


def test_given_and_evaluated_points_may_have_flat_keys() -> None:
    space = {"model": {"lr": tune.uniform(0, 1), "depth": tune.randint(1, 9)}, "a/b": tune.uniform(0, 1)}
    given = [{"model/lr": 0.5, "model/depth": 3, "a/b": 0.1}]
    search = BayesOptSearch(metric="m", mode="min", points_to_evaluate=given)
    assert search.set_search_properties("m", "min", space)
    assert search.suggest("1") == {"model": {"lr": 0.5, "depth": 3}, "a/b": 0.1}
    for model in ({"model/lr": 0.5, "model/depth": 1}, {"model": {"lr": 0.5, "depth": 1}}):
        search.add_evaluated_point({**model, "a/b": 0.25}, 1.0)
    assert [trial.point for trial in search._history.trials.values()][1:] == [(0.5, 0.0, 0.25)] * 2
    with pytest.raises(ValueError, match="'model/depth' is missing"):
        search.add_evaluated_point({"model/lr": 0.5, "a/b": 0.25}, 1.0)


@pytest.mark.parametrize(
    ("space", "keys"),
    [
        ({"a/b": tune.uniform(4.0, 8.0)}, {"a/b"}),
        ({"a": {"b/c": tune.uniform(4.0, 8.0)}}, {"a"}),
        ({"a/b": tune.uniform(4.0, 8.0), "a": {"b": tune.uniform(0.0, 1.0)}}, {"a/b", "a"}),
    ],
)
def test_a_key_with_a_slash_is_a_key_as_any_other(space: dict[str, Any], keys: set[str]) -> None:
    """Ray's refuses it, since it joins nested keys with a slash."""
    search = BayesOptSearch()
    assert search.set_search_properties("m", "max", space)
    for config in Loop(search, None, 1).run(2, lambda config: {"m": 1.0}):
        assert set(config) == keys
        values = {**config, **config.get("a", {})}
        assert all(4.0 <= value <= 8.0 for name, value in values.items() if "/" in name)


def test_reports_after_the_end_of_a_trial_are_no_error() -> None:
    search = BayesOptSearch({"a": tune.uniform(0.0, 1.0)}, metric="m", mode="max")
    search.suggest("1")
    for step in (1, 3):
        search.on_trial_result("1", {"m": 1.0, "training_iteration": step})
        search.on_trial_complete("1", {"m": 1.0, "training_iteration": step + 1})
    assert search.suggest("2")


def prepared(search: Any, **arguments: Any) -> dict[str, Any]:
    """Return the space that Tune passes to a search of distributed trials."""
    with prepare(
        DistributedTrainableCreator(print), {"search_alg": search, "verbose": 0, **arguments}
    ) as changed:
        return inject_placeholders(copy.deepcopy(changed["config"] or {}), create_resolvers_map())


def test_metric_mode_and_stop_criterion_of_a_tuner_without_a_space_are_taken() -> None:
    search = BayesOptSearch({"x": (0, 1)})
    limiter = ConcurrencyLimiter(search, max_concurrent=2)
    prepared(limiter, metric="m", mode="max", stop={"training_iteration": 9})
    assert limiter.suggest("1") and (search._metric, search._mode) == ("m", "max")
    assert search._optimizer.horizon == 9


def test_functions_and_tuples_of_them_are_read_where_tune_has_placeholders() -> None:
    options = [{"layer": len}, {"layer": sum, "width": tune.uniform(0, 1)}]
    space = {
        "f": tune.choice([len, sum, (len, 1), None]),
        "options": tune.choice(options),
        "seed": tune.sample_from(lambda config: 1),
        "data": np.arange(3),
        "twice": [tune.choice([min, max])],
    }
    config = {"f": sum, "options": {"layer": sum, "width": 0.5}, "data": np.arange(3), "twice": [max]}
    other = {"f": (len, 1), "options": {"layer": len}, "seed": 7, "twice": [min]}
    frame = pd.DataFrame({"config/f": [len, None], "config/options": [options[0]] * 2, "m": [1.0, 2.0]})
    search = BayesOptSearch(
        points_to_evaluate=[config, other], analysis=frame.assign(**{"config/twice": [[min]] * 2})
    )
    injected = prepared(search, config=space, metric="m", mode="min")
    assert search.set_search_properties("m", "min", injected)
    first = search.suggest("1")
    assert first["f"] == injected["f"].categories[1] and first["options"]["width"] == 0.5
    assert set(search.suggest("2")) == {"f", "options", "twice"}, "Tune draws the seed"
    search.on_trial_complete("restarted", {"m": 3.0, "config": config})
    points = [trial.point for trial in search._history.trials.values()]
    assert points == [(1.0, 1.0, 0.5, 1.0), (2.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.5, 1.0)]
    assert [trial.point[0] for trial in search._history.earlier] == [0.0, 3.0]
