"""Saving, restoring, and starting from an earlier experiment."""

from __future__ import annotations

import json
import logging
import math
import pickle
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from conformance import METRIC, Loop, loss, mixed_space, searcher
from ray import tune

from horovod_tune.search import BayesOptSearch, StateFileError
from horovod_tune.search.earlier_experiment import fit_into
from horovod_tune.search.space.search_space import SearchSpace

pytestmark = pytest.mark.long


def report_results(search: BayesOptSearch, number: int) -> None:
    """Report what any of the searches of `KINDS` may look for; the last trial is stopped at a fifth."""
    for trial in map(str, range(number)):
        config = search.suggest(trial) or {}
        result = {METRIC: loss(config), "accuracy": config["momentum"], "latency_ms": 1e4 * config["lr"]}
        if search._time_attr == "epoch":
            for epoch in range(1, 6 if int(trial) < number - 1 else 2):
                search.on_trial_result(trial, {**result, METRIC: result[METRIC] + 1 / epoch, "epoch": epoch})
            result |= {METRIC: result[METRIC] + 1 / epoch, "epoch": epoch}
        search.on_trial_complete(trial, result)


def table(rows: int = 20) -> pd.DataFrame:
    names = ("lr", "momentum", "layers", "model/activation")
    search = BayesOptSearch(mixed_space(), METRIC, "min", random_state=1)
    report_results(search, rows)
    assert search._space is not None
    configs = [search._space.config(trial.point, 0) for trial in search._history.trials.values()]
    flat = [{**config, "model/activation": config["model"]["activation"]} for config in configs]
    return pd.DataFrame([{METRIC: loss(c), **{f"config/{name}": c[name] for name in names}} for c in flat])


KINDS: dict[str, dict[str, Any]] = {
    "one metric": {"metric": METRIC, "mode": "min"},
    "curves": {"metric": METRIC, "mode": "min", "time_attr": "epoch"},
    "limits": {"metric": METRIC, "mode": "min", "limits": ["latency_ms <= 30"]},
    "front": {"metric": ["accuracy", "latency_ms"], "mode": ["max", "min"]},
    "earlier experiment": {"metric": METRIC, "mode": "min", "analysis": table()},
}


@pytest.mark.parametrize(("kind", "knows"), [*((kind, True) for kind in KINDS), ("one metric", False)])
def test_a_restored_search_suggests_what_the_uninterrupted_one_does(
    tmp_path: Path, kind: str, knows: bool
) -> None:
    """Also one that is made without a space, a metric and a mode."""
    search = BayesOptSearch(random_state=1, **KINDS[kind])
    search.set_search_properties(None, None, mixed_space())
    report_results(search, 8)
    search.suggest("live"), search.suggest("another")
    search.save(str(tmp_path / "s"))
    fresh = BayesOptSearch(random_state=99, **({**KINDS[kind], "analysis": None} if knows else {}))
    if knows:
        fresh.set_search_properties(None, None, mixed_space())
    fresh.restore(str(tmp_path / "s"))
    assert fresh._history == search._history
    suggested = []
    for one in (search, fresh):
        found = [one.suggest("a"), one.suggest("b")]
        for trial_id in ("another", "a", "live"):
            result = {METRIC: 0.5, "accuracy": 0.5, "latency_ms": 5.0, "epoch": 5}
            one.on_trial_complete(trial_id, result)
        suggested.append([*found, one.suggest("c")])
    assert suggested[0] == suggested[1]
    assert fresh.set_search_properties(None, None, mixed_space())


@pytest.mark.parametrize("kind", ["one metric", "front"])
def test_a_search_saved_before_its_first_suggestion_can_be_restored(tmp_path: Path, kind: str) -> None:
    BayesOptSearch(**KINDS[kind]).save(str(tmp_path / "s"))
    fresh = BayesOptSearch(**KINDS[kind], points_to_evaluate=[{"layers": 2}])
    fresh.restore(str(tmp_path / "s"))
    fresh.set_search_properties(None, None, mixed_space())
    assert fresh.suggest("t")["layers"] == 2


def test_given_points_that_are_still_to_come_survive(tmp_path: Path) -> None:
    search = searcher(points_to_evaluate=[{"layers": 1}, {"layers": 2}, {"lr": 0.012345678901234567}])
    search.set_search_properties(METRIC, "min", mixed_space())
    assert search.suggest("t0")["layers"] == 1
    search.save(str(tmp_path / "s"))
    other = searcher()
    other.set_search_properties(METRIC, "min", mixed_space())
    other.restore(str(tmp_path / "s"))
    assert other.suggest("t1")["layers"] == 2 and other.suggest("t2")["lr"] == 0.012345678901234567


class Bomb:
    """Would leave a trace if anything unpickled it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "it is not"), (b"lr=3", "it is not JSON"), (b"[]", "its 'format' is not")]
)
def test_what_is_not_a_saved_search_is_refused_and_not_run(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    (tmp_path / "state").write_bytes(content or pickle.dumps(Bomb(str(tmp_path / "boom"))))
    with pytest.raises(StateFileError, match=f"not a saved BayesOptSearch: {message}"):
        searcher().restore(str(tmp_path / "state"))
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its 'format' is not"),
        ({"version": 2}, "has version 2; this horovod_tune reads version 1"),
        ({"trials": None}, r"is damaged: it lacks \['trials'\]"),
        ({"metric": "accuracy"}, "has the metric 'accuracy', this one 'loss'"),
        ({"mode": "max"}, "has the mode 'max', this one 'min'"),
        ({"limits": ["a < 3"]}, r"has the limits \['a < 3'\], this one \[\]"),
        ({"space": {"lr": "float[0.0, 1.0]"}}, r"over another space \(.*lr: saved"),
    ],
)
def test_a_file_of_another_search_is_refused_with_its_reason(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    search, path = searcher(), tmp_path / "s"
    search.set_search_properties(METRIC, "min", mixed_space())
    search.save(str(path))
    state = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))
    with pytest.raises(StateFileError, match=message):
        search.restore(str(path))


@pytest.mark.parametrize("space", [None, mixed_space()])
@pytest.mark.parametrize(("metric", "mode"), [("accuracy", "min"), (METRIC, "max")])
def test_a_restored_search_refuses_another_metric_or_mode_of_the_tuner(
    tmp_path: Path, metric: str, mode: str, space: Any
) -> None:
    BayesOptSearch(mixed_space(), METRIC, "min").save(str(tmp_path / "s"))
    fresh = BayesOptSearch(space)
    fresh.restore(str(tmp_path / "s"))
    with pytest.raises(StateFileError, match="the saved search has the m"):
        fresh.set_search_properties(metric, mode, mixed_space())
    assert fresh.set_search_properties(METRIC, "min", mixed_space())


def test_a_space_with_numbers_of_numpy_is_saved(tmp_path: Path) -> None:
    space = {
        "a": tune.randint(np.int64(0), np.int64(5)),
        "b": tune.qrandint(16, 512, np.int64(16)),
        "c": tune.randn(np.float32(0), 1),
        "d": tune.uniform(np.float32(0.1), np.float64(1)),
    }
    search, fresh = BayesOptSearch(space, METRIC, "min"), BayesOptSearch()
    search.suggest("t")
    search.save(str(tmp_path / "s"))
    fresh.restore(str(tmp_path / "s"))
    assert fresh.suggest("u") == search.suggest("u")


class Named(str, Enum):
    ONE, TWO = "one", "two"


class Size(NamedTuple):
    height: int
    width: int


@pytest.mark.parametrize("options", [[Named.ONE, Named.TWO], [Size(1, 2), Size(3, 4)], [np.str_("a"), "b"]])
def test_values_of_subclasses_are_not_restored_as_their_base_class(tmp_path: Path, options: Any) -> None:
    search, fresh = (BayesOptSearch(metric=METRIC, mode="min") for _ in range(2))
    space = {"a": tune.choice(options), "x": tune.uniform(0, 1)}
    search.set_search_properties(None, None, space)
    search.suggest("t")
    search.save(str(tmp_path / "s"))
    fresh.restore(str(tmp_path / "s"))
    assert fresh.set_search_properties(None, None, space) and fresh.suggest("u") == search.suggest("u")


def test_a_space_with_functions_among_its_choices_is_recognised_in_another_process(tmp_path: Path) -> None:
    def make() -> Any:
        class Local:  # another address, and another identity, each time
            pass

        return {"f": tune.choice([lambda x: x, Local]), "x": tune.uniform(0, 1)}

    search = searcher()
    search.set_search_properties(METRIC, "min", make())
    search.suggest("t")
    search.save(str(tmp_path / "s"))
    other = searcher()
    other.set_search_properties(METRIC, "min", make())
    other.restore(str(tmp_path / "s"))


def test_what_does_not_fit_a_changed_space_is_counted(caplog: Any) -> None:
    frame = table(20)
    frame.loc[3, METRIC] = math.nan
    narrow = mixed_space() | {"lr": tune.loguniform(1e-4, 1e-2), "extra": tune.choice([1, 2])}
    with caplog.at_level(logging.INFO, logger="horovod_tune.search"):
        Loop(searcher(analysis=frame), narrow).start()
    assert "0 of 20 earlier results are used" in caplog.text and "'extra' is missing" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    narrow.pop("extra")
    with caplog.at_level(logging.INFO, logger="horovod_tune.search"):
        search = searcher(analysis=frame)
        Loop(search, narrow).start()
    inside = sum(1e-4 <= lr <= 1e-2 for i, lr in enumerate(frame["config/lr"]) if i != 3)
    assert f"{inside} of 20 earlier results are used" in caplog.text
    assert f"{19 - inside} ('lr' must be in [0.0001, 0.01])" in caplog.text
    assert "1 (no number 'loss')" in caplog.text
    assert len(search._history.earlier) == inside and len(search._history.trials) == 1


@pytest.mark.parametrize(
    "metrics",
    [
        {"valid": {"loss": 2.0}, "time": {"epoch": 3}},
        {"valid/loss": 2.0, "time/epoch": 3},
        {"valid": {"loss": np.float32(2.0)}, "time": {"epoch": np.int64(3)}},
    ],
)
def test_nested_metrics_of_an_earlier_experiment_are_found(metrics: dict[str, Any]) -> None:
    space = SearchSpace({"x": tune.uniform(0, 1)})
    [trial], message = fit_into(space, [({"x": 0.5}, [metrics])], "valid/loss", "time/epoch")
    assert (trial.point, trial.curve) == ((0.5,), {3.0: 2.0})
    assert message == "1 of 1 earlier results are used"


def test_the_trials_of_a_frame_of_the_analysis_count_up_to_their_last_iteration() -> None:
    """Its column is `iterations`; trials that were stopped early are no full trainings."""
    frame = table(6).assign(iterations=[1, 3, 9] * 2)
    # The metric may come from the tuner.
    search = BayesOptSearch(mixed_space(), analysis=frame)
    search.set_search_properties(METRIC, "min", {})
    search.suggest("t")
    assert [list(trial.curve) for trial in search._history.earlier] == [[1.0], [3.0], [9.0]] * 2


def test_lists_in_an_earlier_experiments_files_may_be_tuples_of_the_space() -> None:
    options = [(3, (3, 1)), {"k": (5, 5)}, [7]]
    rows = [({"a": value}, [{METRIC: 1.0}]) for value in json.loads(json.dumps(options))]
    used, _ = fit_into(SearchSpace({"a": tune.choice(options)}), rows, METRIC, "epoch")
    assert [trial.point for trial in used] == [(0.0,), (1.0,), (2.0,)]


def test_none_in_a_table_is_a_value_where_the_space_has_it() -> None:
    """Pandas reads it as NaN, like a parameter that a trial does not have."""
    space = {
        "a": tune.choice(["relu", None]),
        "n": tune.choice([None, 1.0, 2.0]),
        "opt": tune.choice([{"name": "adam"}, {"name": "sgd", "nesterov": tune.choice([True, None])}]),
    }
    configs = [
        {"a": "relu", "n": 1.0, "opt/name": "adam"},
        {"a": None, "n": None, "opt/name": "sgd", "opt/nesterov": None},
        {"a": None, "n": 2.0, "opt/name": "sgd", "opt/nesterov": True},
    ]
    frame = pd.DataFrame([{f"config/{k}": v for k, v in config.items()} for config in configs])
    search = BayesOptSearch(space, METRIC, "min", analysis=frame.assign(**{METRIC: 1.0}))
    search.suggest("t")
    found = [trial.point for trial in search._history.earlier]
    assert found == [(0.0, 1.0, 0.0, 0.0), (1.0, 0.0, 1.0, 1.0), (1.0, 2.0, 1.0, 0.0)]


def test_choices_that_are_dictionaries_are_found_in_a_flat_table() -> None:
    space = {"opt": tune.choice([{"name": "sgd", "lr": 0.1}, {"name": "adam", "lr": 0.001}])}
    frame = pd.DataFrame([{METRIC: 1.0, "config/opt/name": "adam", "config/opt/lr": 0.001}])
    search = searcher(analysis=frame)
    search.set_search_properties(METRIC, "min", space)
    search.suggest("t")
    assert [trial.point for trial in search._history.earlier] == [(1.0,)]
