"""What Ray's tests claim of its `BayesOptSearch`, tried on ours.

Claims that other tests cover already are not repeated here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from horovod_tune.search import BayesOptSearch

# Each kind of domain, with what its values must be.
DOMAINS: dict[str, tuple[Any, Any]] = {
    "uniform": (tune.uniform(-5.0, -1.0), lambda v: -5.0 <= v < -1.0),
    "quniform": (tune.quniform(3.2, 5.4, 0.2), lambda v: 3.2 <= v <= 5.4 and is_multiple(v, 0.2)),
    "loguniform": (tune.loguniform(1e-4, 1e-2), lambda v: 1e-4 <= v < 1e-2),
    "qloguniform": (tune.qloguniform(1e-4, 1e-1, 5e-5), lambda v: 1e-4 <= v <= 1e-1 and is_multiple(v, 5e-5)),
    "choice": (tune.choice([2, "two", None]), lambda v: v in (2, "two", None)),
    "randint": (tune.randint(-9, 15), lambda v: type(v) is int and -9 <= v < 15),
    "qrandint": (tune.qrandint(-21, 12, 3), lambda v: type(v) is int and -21 <= v <= 12 and v % 3 == 0),
    "lograndint": (tune.lograndint(1, 10), lambda v: type(v) is int and 1 <= v < 10),
    "qlograndint": (tune.qlograndint(2, 10, 2), lambda v: type(v) is int and 2 <= v <= 10 and v % 2 == 0),
    "randn": (tune.randn(10.0, 2.0), lambda v: math.isfinite(v)),
    "function": (tune.sample_from(lambda config: config["randint"] + 0.5), lambda v: v % 1 == 0.5),
}


def is_multiple(value: float, step: float) -> bool:
    return math.isclose(value, round(value / step) * step, rel_tol=1e-9)


def test_every_kind_of_domain_stays_within_its_bounds_for_hundreds_of_samples() -> None:
    """Ray's own leaves all but `uniform` and `loguniform` out."""
    space = {name: domain for name, (domain, _) in DOMAINS.items()}
    search = BayesOptSearch(space, metric="m", mode="max", random_search_steps=300)
    seen: dict[str, set[Any]] = {name: set() for name in space}
    for number in range(300):
        config = search.suggest(str(number))
        for name, (_, holds) in DOMAINS.items():
            assert holds(config[name]), (name, config[name])
            seen[name].add(config[name])
    assert seen["choice"] == {2, "two", None} and seen["randint"] == set(range(-9, 15))
    assert seen["qlograndint"] == {2, 4, 6, 8, 10}


def test_a_converted_space_and_bounds_written_by_hand_are_the_same_search() -> None:
    converted = BayesOptSearch.convert_search_space({"b": {"z": tune.uniform(0.0, 2.0)}, "y": 4})
    ours = BayesOptSearch(converted, metric="m", mode="max")
    by_hand = BayesOptSearch({"b/z": (0.0, 2.0)}, metric="m", mode="max")
    for number in "012":
        config = ours.suggest(number)
        assert config == by_hand.suggest(number) and set(config) == {"b"}
        for search in (ours, by_hand):
            search.on_trial_complete(number, {"m": config["b"]["z"]})


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
    for number in "01":
        config = search.suggest(number)
        assert set(config) == keys
        search.on_trial_complete(number, {"m": 1.0})
    nested = config.get("a", {})
    assert all(4.0 <= value <= 8.0 for name, value in {**config, **nested}.items() if "/" in name)


def test_a_trial_that_had_not_ended_when_the_search_was_saved_is_still_in_flight(tmp_path: Path) -> None:
    space = {"a": tune.uniform(0.0, 5.0)}
    search = BayesOptSearch(space, metric="m", mode="max")
    suggested = {number: search.suggest(number) for number in ("1", "2", "never ends")}
    search.on_trial_complete("1", {"m": 1.0})
    search.save(str(tmp_path / "search"))

    restored = BayesOptSearch()
    restored.restore(str(tmp_path / "search"))
    restored.on_trial_result("2", {"m": 1.0, "training_iteration": 1})
    restored.on_trial_complete("2", {"m": 1.0})
    assert restored.suggest("3") not in suggested.values()
    restored.on_trial_complete("3", {"m": 1.0})
    endings = {name: trial.ending for name, trial in restored._history.trials.items()}
    assert endings.pop("never ends") == "running"
    assert set(endings) == {"1", "2", "3"} and "running" not in endings.values()


def test_reports_after_the_end_of_a_trial_are_no_error() -> None:
    search = BayesOptSearch({"a": tune.uniform(0.0, 1.0)}, metric="m", mode="max")
    search.suggest("1")
    for step in (1, 3):
        search.on_trial_result("1", {"m": 1.0, "training_iteration": step})
        search.on_trial_complete("1", {"m": 1.0, "training_iteration": step + 1})
    assert search.suggest("2")
