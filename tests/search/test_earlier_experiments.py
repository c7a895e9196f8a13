"""`analysis=` and `points_to_evaluate=` from what was read of an earlier experiment: values, types, names."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_experiments import changed, reporting
from ray import tune
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
from ray.tune.utils.util import SafeFallbackEncoder

from horovod_tune.analysis.export import write_csv
from horovod_tune.search import BayesOptSearch, SpaceError
from horovod_tune.search.space.parameters import as_written


def starting_from(source: Any, space: dict[str, Any], metric: str = "loss") -> BayesOptSearch:
    search = BayesOptSearch(metric=metric, mode="min", analysis=source)
    search.set_search_properties(metric, "min", space)
    search.suggest("t")
    return search


def test_an_experiment_is_learned_from_if_only_some_reports_have_the_metric() -> None:
    reports = [[{"loss": 0.1 * i, "aux": 1}, {"aux": 2}] for i in range(8)]
    analysis = reporting(*reports, metric="loss", mode="min")
    for source in (analysis, analysis.dataframe()):
        earlier = starting_from(source, {"lr": tune.loguniform(1e-4, 1)})._history.earlier
        assert [trial.value for trial in earlier] == pytest.approx([0.1 * i for i in range(8)])
        assert [list(trial.curve) for trial in earlier] == [[2.0]] * 8


def test_a_trial_whose_configuration_changed_counts_with_the_one_of_its_last_report() -> None:
    """As under PopulationBasedTraining, which may change it after the last report too."""
    rows = [{"loss": 1.0, "config": {"lr": 0.1}}, {"loss": 0.5, "config": {"lr": 0.2}}]
    analysis = reporting(rows, metric="loss", mode="min")
    (trial,) = analysis.trials
    analysis = changed(analysis, trials=(replace(trial, config={"lr": 0.4}),))
    assert analysis.dataframe()["config/lr"].tolist() == [0.2]
    search = starting_from(analysis, {"lr": tune.choice([0.1, 0.2, 0.4])})
    assert [search._space.columns[0].to_value(t.point[0]) for t in search._history.earlier] == [0.2]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["iteration", "iterations", "status", "reported_status"])
def test_a_frame_is_learned_from_if_the_metric_is_named_like_one_of_its_columns(name: str) -> None:
    analysis = reporting(*[[{name: float(i)}] for i in range(4)], metric=name, mode="min")
    search = starting_from(analysis.dataframe(), {"lr": tune.loguniform(1e-4, 1)}, name)
    assert [trial.value for trial in search._history.earlier] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("extra", "value"),
    [
        (tune.uniform(0, 1), 0.9),
        (tune.randint(1, 9), 3),
        (tune.choice([True, False]), True),
        (tune.choice(["a", "b"]), "a"),
        (tune.choice([(1, 2), (3,)]), [1, 2]),
        (None, None),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_a_value_that_is_missing_since_its_option_was_not_chosen_is_no_mistake(
    extra: Any, value: Any, stored: bool, tmp_path: Path
) -> None:
    options = [{"name": "sgd", "extra": extra}, {"name": "adam", "beta": tune.uniform(0, 1)}]
    space = {"opt": tune.choice(options)}
    chosen = [{"name": "sgd", "extra": value}, {"name": "adam", "beta": 0.5}] * 3
    analysis = reporting(*[[{"loss": 1.0}]] * 6, metric="loss", mode="min")
    trials = [replace(t, config={"opt": o}) for t, o in zip(analysis.trials, chosen, strict=True)]
    frame = changed(analysis, trials=tuple(trials)).dataframe()
    if stored:
        write_csv(frame, tmp_path / "trials.csv")
        frame = pd.read_csv(tmp_path / "trials.csv")
    assert [trial.point[0] for trial in starting_from(frame, space)._history.earlier] == [0.0, 1.0] * 3


def test_results_that_are_left_out_are_a_warning(caplog: Any) -> None:
    frame = pd.DataFrame([{"config/lr": 0.1, "loss": 1.0}, {"config/lr": 2.0, "loss": 1.0}])
    starting_from(frame, {"lr": tune.uniform(0, 1)})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "1 of 2 earlier results are used; left out: 1 ('lr' must be in [0.0, 1.0])" in caplog.text


def relu() -> None:
    pass


JSON_CHANGES = {
    "tuple": (28, 28),
    "path": Path("/data"),
    "function": relu,
    "numbers as keys": {0: 1.0, True: [(1, 2)], None: "x"},
    "date": datetime.date(2026, 11, 28),
    "NaN": math.nan,
    "NumPy's NaN": np.float32("nan"),
    "array": np.array([1.0, 2.0]),
    "number of NumPy": np.float64(0.5),
    "dictionary with NaN": {"a": {"b": [math.nan, Path("/x")]}},
}


def written(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as `analyze` reads it in another process from the file that Tune wrote."""
    text = json.dumps(config, cls=SafeFallbackEncoder)
    return dict(json.loads(text.replace(" at 0x7", " at 0x6")))


@pytest.mark.parametrize("value", JSON_CHANGES.values(), ids=JSON_CHANGES)
@pytest.mark.parametrize("place", ["constant", "nested", "option", "beside"])
def test_a_configuration_read_from_an_experiment_is_a_point_whatever_json_changes(
    value: Any, place: str
) -> None:
    spec = {
        "constant": value,
        "nested": {"deep": {7: value, "lr": tune.uniform(0, 1)}},
        "option": tune.choice(["other", value]),
        "beside": tune.choice([{"kind": value, 1: tune.uniform(0, 1)}, {"kind": "other"}]),
    }[place]
    point = {
        "constant": value,
        "nested": {"deep": {7: value, "lr": 0.25}},
        "option": value,
        "beside": {"kind": value, 1: 0.25},
    }[place]
    space, config = {"x": tune.uniform(0, 1), "a": spec}, written({"x": 0.5, "a": point})
    search = BayesOptSearch(metric="loss", mode="min", points_to_evaluate=[config])
    search.set_search_properties("loss", "min", space)
    suggested = search.suggest("t") or {}
    assert suggested["x"] == 0.5
    if place in ("option", "beside"):
        assert as_written(suggested["a"]) == as_written(point)
    if place == "option":
        assert type(suggested["a"]) is type(value)
    search.add_evaluated_point(config, 1.0)
    assert search._history.trials["evaluated-1"].point == search._history.trials["t"].point


def test_another_constant_is_refused_with_the_cure() -> None:
    for given in ("/other", 3, {"a": 1}, ["/data"]):
        with pytest.raises(SpaceError, match=r"'d' is the constant .*leave it out to use the constant"):
            BayesOptSearch({"x": tune.uniform(0, 1), "d": Path("/data")}, points_to_evaluate=[{"d": given}])


def test_options_that_the_files_write_alike_are_named() -> None:
    choice = tune.choice([lambda: 1, lambda: 2])
    text = written({"f": choice.categories[0]})
    with pytest.raises(SpaceError, match="stands for each of"):
        BayesOptSearch({"f": choice}, "loss", "min", points_to_evaluate=[text])


def test_a_trial_counts_with_the_last_number_that_it_reported() -> None:
    """As for `analyze`: some report None instead of leaving the metric out."""
    search = BayesOptSearch({"x": tune.uniform(0, 1)}, "loss", "min")
    for trial, later in (("a", {"loss": None}), ("b", {"loss": "n/a"}), ("c", {})):
        search.suggest(trial)
        search.on_trial_result(trial, {"loss": 0.5, "training_iteration": 1})
        search.on_trial_result(trial, {**later, "training_iteration": 2})
        search.on_trial_complete(trial, {**later, "training_iteration": 2})
    assert [trial.value for trial in search._history.trials.values()] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("given", [[1], [1, 2, 3], []])
def test_a_constant_list_of_another_length_is_refused(given: list[int]) -> None:
    search = BayesOptSearch(metric="loss", mode="min", points_to_evaluate=[{"x": 0.5, "sizes": given}])
    with pytest.raises(SpaceError, match=r"'sizes' is the constant \[1, 2\]"):
        search.set_search_properties("loss", "min", {"x": tune.uniform(0, 1), "sizes": [1, 2]})


def test_an_object_that_tune_has_replaced_by_a_placeholder_is_not_compared() -> None:
    """As in a search of a trainable that is not distributed."""
    config = {"x": 0.5, "data": Path("/data"), "weights": np.array([1.0, 2.0])}
    space = inject_placeholders({**config, "x": tune.uniform(0, 1)}, create_resolvers_map())
    search = BayesOptSearch(metric="loss", mode="min", points_to_evaluate=[written(config)])
    search.set_search_properties("loss", "min", space)
    assert search.suggest("t") == {"x": 0.5}
