"""Saving, restoring, and starting from an earlier experiment; and whole searches run by Tune."""

from __future__ import annotations

import json
import logging
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import conformance
import pandas as pd
import pytest
from conformance import METRIC, Loop, loss, mixed_space
from ray import cloudpickle, tune
from ray.tune.search import ConcurrencyLimiter

from horovod_tune.search import BayesOptSearch, StateFileError

# The trials run in other processes, which cannot import tests.
cloudpickle.register_pickle_by_value(conformance)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


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


def test_the_file_is_versioned_json(tmp_path: Path) -> None:
    _, path = half_done(tmp_path)
    state = json.loads(Path(path).read_text())
    assert (state["format"], state["version"]) == ("horovod_tune.BayesOptSearch", 1)
    assert [t["ending"] for t in state["trials"]] == ["scored"] * 12 + ["running"] * 2


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


def test_a_warm_start_goes_straight_to_the_good_region() -> None:
    suggestion = Loop(searcher(2, analysis=table(30)), mixed_space()).start()
    assert suggestion is not None and loss(suggestion) < 0.3


def test_what_does_not_fit_a_changed_space_is_counted(caplog: Any) -> None:
    frame = table(20)
    frame.loc[3, METRIC] = math.nan
    narrow = mixed_space() | {"lr": tune.loguniform(1e-4, 1e-2), "extra": tune.choice([1, 2])}
    with caplog.at_level(logging.INFO, logger="horovod_tune.search"):
        Loop(searcher(analysis=frame), narrow)
    assert "0 of 20 earlier results are used" in caplog.text and "'extra' is missing" in caplog.text
    caplog.clear()
    narrow.pop("extra")
    with caplog.at_level(logging.INFO, logger="horovod_tune.search"):
        search = searcher(analysis=frame)
        Loop(search, narrow)
    inside = sum(1e-4 <= lr <= 1e-2 for i, lr in enumerate(frame["config/lr"]) if i != 3)
    assert f"{inside} of 20 earlier results are used" in caplog.text
    assert f"{19 - inside} ('lr' must be in [0.0001, 0.01])" in caplog.text
    assert "1 (no finite 'loss')" in caplog.text
    assert len(search._history.trials) == inside


def test_choices_that_are_dictionaries_are_found_in_a_flat_table() -> None:
    space = {"opt": tune.choice([{"name": "sgd", "lr": 0.1}, {"name": "adam", "lr": 0.001}])}
    frame = pd.DataFrame([{METRIC: 1.0, "config/opt/name": "adam", "config/opt/lr": 0.001}])
    search = searcher(analysis=frame)
    search.set_search_properties(METRIC, "min", space)
    assert [trial.point for trial in search._history.trials.values()] == [(1.0,)]


# Whole searches by Tune.


def train(config: dict[str, Any]) -> None:
    if config["lr"] > 0.03:
        raise RuntimeError("diverged")
    for step in range(1, 4):
        tune.report({METRIC: loss(config) + 1.0 / step})


CHOICES = [{"kind": "a", "size": 1}, None, [1, 2], "text"]


def fit(storage: Path, search: Any, samples: int, name: str = "experiment", **config: Any) -> tune.ResultGrid:
    return tune.Tuner(
        train,
        param_space=mixed_space()
        | {"any": tune.choice(CHOICES), "twice": tune.sample_from(lambda c: 2 * c["layers"])},
        tune_config=tune.TuneConfig(
            metric=METRIC, mode="min", search_alg=search, num_samples=samples, **config
        ),
        run_config=tune.RunConfig(name=name, storage_path=str(storage), verbose=0),
    ).fit()


@pytest.fixture(scope="module")
def experiment(ray_session: Any, tmp_path_factory: Any) -> tune.ResultGrid:
    """A search of 10 trials, some of which fail and some of which ASHA stops."""
    storage = tmp_path_factory.mktemp("bayesopt")
    search = ConcurrencyLimiter(BayesOptSearch(), max_concurrent=4)
    return fit(storage, search, 10, scheduler=tune.schedulers.ASHAScheduler(grace_period=1, max_t=3))


def test_tune_runs_every_sample_and_records_what_was_suggested(experiment: tune.ResultGrid) -> None:
    assert len(experiment) == 10
    state = json.loads(next(Path(experiment.experiment_path).glob("searcher-state-*.json")).read_text())
    recorded = {result.config["lr"] for result in experiment}  # type: ignore[attr-defined]
    low, high = math.log(1e-5), math.log(1e-1)
    suggested = [math.exp(low + trial["point"][0] * (high - low)) for trial in state["trials"]]
    assert sorted(recorded) == pytest.approx(sorted(suggested), rel=1e-12)
    for result in experiment:  # type: ignore[attr-defined]
        assert result.config["any"] in CHOICES and result.config["twice"] == 2 * result.config["layers"]


def test_failed_trials_are_known_as_such_and_early_stopped_ones_count(experiment: tune.ResultGrid) -> None:
    state = json.loads(next(Path(experiment.experiment_path).glob("searcher-state-*.json")).read_text())
    endings = [trial["ending"] for trial in state["trials"]]
    assert endings.count("failed") == len(experiment.errors) and "running" not in endings
    values = sorted(trial["value"] for trial in state["trials"] if trial["value"] is not None)
    last = sorted(r.metrics[METRIC] for r in experiment if not r.error)  # type: ignore[attr-defined]
    assert values == pytest.approx(last)


@pytest.mark.parametrize("kind", ["directory", "analysis", "grid", "frame"])
def test_an_experiment_of_tune_is_a_start(experiment: tune.ResultGrid, kind: str) -> None:
    source: Any = {
        "directory": lambda: experiment.experiment_path,
        "analysis": lambda: tune.ExperimentAnalysis(experiment.experiment_path),
        "grid": lambda: experiment,
        "frame": experiment.get_dataframe,
    }[kind]()
    search = searcher(analysis=source)
    space = mixed_space() | {"any": tune.choice(CHOICES)} if kind != "frame" else mixed_space()
    assert search.set_search_properties(METRIC, "min", space)
    assert len(search._history.trials) == 10 - len(experiment.errors)


class DriverDies(tune.Callback):
    """Raises in the driver when the given number of trials have ended; once only."""

    def __init__(self, trials: int, folder: Path) -> None:
        self._trials, self._folder = trials, folder

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        ended = sum(trial.status == "TERMINATED" for trial in trials)
        if ended >= self._trials and not (self._folder / "died").exists():
            (self._folder / "died").touch()
            raise RuntimeError("the driver dies")


def plain_train(config: dict[str, Any]) -> None:
    tune.report({METRIC: loss(config)})


def test_tuner_restore_continues_the_model(ray_session: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A search whose driver died at the 5th trial goes on as the one whose driver did not."""
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")

    def tuner(name: str, callbacks: list[Any]) -> tune.Tuner:
        return tune.Tuner(
            plain_train,
            param_space=mixed_space(),
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode="min",
                search_alg=ConcurrencyLimiter(
                    BayesOptSearch(random_state=3, random_search_steps=3), max_concurrent=1
                ),
                num_samples=8,
            ),
            run_config=tune.RunConfig(name=name, storage_path=str(tmp_path), verbose=0, callbacks=callbacks),
        )

    with pytest.raises(Exception, match="the driver dies"):
        tuner("broken", [DriverDies(5, tmp_path)]).fit()
    restored = tune.Tuner.restore(str(tmp_path / "broken"), plain_train, param_space=mixed_space()).fit()
    whole = tuner("whole", []).fit()
    assert len(restored) == len(whole) == 8
    assert _learning_rates(restored) == _learning_rates(whole)


def _learning_rates(results: tune.ResultGrid) -> list[float]:
    return sorted(results[i].config["lr"] for i in range(len(results)))
