"""Saving, restoring, and starting from an earlier experiment."""

from __future__ import annotations

import json
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conformance import METRIC, Loop, loss, mixed_space
from ray import tune

from horovod_tune.search import BayesOptSearch, StateFileError
from horovod_tune.search.earlier_experiment import fit_into
from horovod_tune.search.space.search_space import SearchSpace


def searcher(seed: int = 1, **kwargs: Any) -> BayesOptSearch:
    return BayesOptSearch(metric=METRIC, mode="min", random_state=seed, **kwargs)


def half_done(tmp_path: Path, space: Any = mixed_space, **kwargs: Any) -> tuple[Loop, str]:
    """Return a search with 12 results and two trials in flight, and the file it was saved in."""
    loop = Loop(searcher(**kwargs), space(), in_flight=4)
    loop.run(12)
    loop.start(), loop.start()
    path = str(tmp_path / "search.json")
    loop.searcher.save(path)
    return loop, path


def continuation(loop: Loop) -> list[Any]:
    """Suggest two more, end what is in flight, and suggest again."""
    suggested = [loop.searcher.suggest("a"), loop.searcher.suggest("b")]
    for trial_id in ("trial13", "a", "trial12"):
        loop.searcher.on_trial_complete(trial_id, {METRIC: 0.5})
    return [*suggested, loop.searcher.suggest("c")]


@pytest.mark.parametrize("space_known_before", [True, False])
def test_a_restored_search_suggests_what_the_uninterrupted_one_does(
    tmp_path: Path, space_known_before: bool
) -> None:
    loop, path = half_done(tmp_path)
    fresh = searcher(seed=99)
    if space_known_before:
        fresh.set_search_properties(METRIC, "min", mixed_space())
    fresh.restore(path)
    if not space_known_before:
        fresh.set_search_properties(METRIC, "min", mixed_space())
    resumed = Loop(searcher(), None)
    resumed.searcher = fresh  # type: ignore[assignment]
    loop.searcher = loop.searcher.searcher
    assert continuation(resumed) == continuation(loop)


def test_given_points_that_are_still_to_come_survive(tmp_path: Path) -> None:
    search = searcher(points_to_evaluate=[{"layers": 1}, {"layers": 2}, {"lr": 0.012345678901234567}])
    search.set_search_properties(METRIC, "min", mixed_space())
    assert search.suggest("t0")["layers"] == 1
    search.save(str(tmp_path / "s"))
    other = searcher()
    other.set_search_properties(METRIC, "min", mixed_space())
    other.restore(str(tmp_path / "s"))
    assert other.suggest("t1")["layers"] == 2 and other.suggest("t2")["lr"] == 0.012345678901234567


def test_a_search_saved_before_it_has_a_space_can_be_restored(tmp_path: Path) -> None:
    searcher().save(str(tmp_path / "s"))
    fresh = searcher()
    fresh.restore(str(tmp_path / "s"))
    assert len(Loop(fresh, mixed_space()).run(6)) == 6


class Bomb:
    """Would leave a trace if anything unpickled it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(pickle.dumps(Bomb(str(tmp_path / "boom"))))
    with pytest.raises(StateFileError, match="not a saved BayesOptSearch: it is not"):
        searcher().restore(str(tmp_path / "state"))
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(format="other"), "its 'format' is not"),
        (lambda state: state.update(version=2), "has version 2; this horovod_tune reads version 1"),
        (lambda state: state.pop("trials"), r"is damaged: it lacks \['trials'\]"),
        (lambda state: state.update(metric="accuracy"), "has the metric 'accuracy', this one 'loss'"),
        (lambda state: state.update(mode="max"), "has the mode 'max', this one 'min'"),
        (lambda state: state["space"].update(lr="float[0.0, 1.0]"), r"over another space \(lr: saved"),
    ],
)
def test_a_file_of_another_search_is_refused_with_its_reason(
    tmp_path: Path, change: Any, message: str
) -> None:
    _, path = half_done(tmp_path)
    state = json.loads(Path(path).read_text())
    change(state)
    Path(path).write_text(json.dumps(state))
    fresh = searcher()
    fresh.set_search_properties(METRIC, "min", mixed_space())
    with pytest.raises(StateFileError, match=message):
        fresh.restore(path)


def test_text_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("lr=3")
    with pytest.raises(StateFileError, match="it is not JSON"):
        searcher().restore(str(tmp_path / "state"))


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


# Warm starts.


def table(rows: int = 20) -> pd.DataFrame:
    configs = Loop(searcher(), mixed_space()).run(rows)
    return pd.DataFrame(
        [
            {
                METRIC: loss(c),
                "config/lr": c["lr"],
                "config/momentum": c["momentum"],
                "config/layers": c["layers"],
                "config/model/activation": c["model"]["activation"],
            }
            for c in configs
        ]
    )


def test_what_does_not_fit_a_changed_space_is_counted(caplog: Any) -> None:
    frame = table(20)
    frame.loc[3, METRIC] = math.nan
    narrow = mixed_space() | {"lr": tune.loguniform(1e-4, 1e-2), "extra": tune.choice([1, 2])}
    with caplog.at_level(logging.INFO, logger="horovod_tune.search"):
        Loop(searcher(analysis=frame), narrow)
    assert "0 of 20 earlier results are used" in caplog.text and "'extra' is missing" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    narrow.pop("extra")
    with caplog.at_level(logging.INFO, logger="horovod_tune.search"):
        search = searcher(analysis=frame)
        Loop(search, narrow)
    inside = sum(1e-4 <= lr <= 1e-2 for i, lr in enumerate(frame["config/lr"]) if i != 3)
    assert f"{inside} of 20 earlier results are used" in caplog.text
    assert f"{19 - inside} ('lr' must be in [0.0001, 0.01])" in caplog.text
    assert "1 (no finite 'loss')" in caplog.text
    assert len(search._history.earlier) == inside and not search._history.trials


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
    [trial], message = fit_into(space, [({"x": 0.5}, metrics)], "valid/loss", "time/epoch")
    assert (trial.point, trial.curve) == ((0.5,), {3.0: 2.0})
    assert message == "1 of 1 earlier results are used"


def test_the_trials_of_a_frame_of_the_analysis_count_up_to_their_last_iteration() -> None:
    """Its column is `iterations`; trials that were stopped early are no full trainings."""
    frame = table(6).assign(iterations=[1, 3, 9] * 2)
    search = searcher(analysis=frame)
    search.set_search_properties(METRIC, "min", mixed_space())
    assert [list(trial.curve) for trial in search._history.earlier] == [[1.0], [3.0], [9.0]] * 2


def test_choices_that_are_dictionaries_are_found_in_a_flat_table() -> None:
    space = {"opt": tune.choice([{"name": "sgd", "lr": 0.1}, {"name": "adam", "lr": 0.001}])}
    frame = pd.DataFrame([{METRIC: 1.0, "config/opt/name": "adam", "config/opt/lr": 0.001}])
    search = searcher(analysis=frame)
    search.set_search_properties(METRIC, "min", space)
    assert [trial.point for trial in search._history.earlier] == [(1.0,)]
