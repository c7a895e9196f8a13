"""A search returns its results even if what we show, record or advise fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune

from horovod_tune import DistributedTrainableCreator, report
from horovod_tune.analysis import ProgressCallback, progress
from horovod_tune.best_effort import best_effort, best_effort_callback
from horovod_tune.doctor.preflight import Preflight
from horovod_tune.run_settings import ExperimentMetadata, SilentTrials, UnusedArguments, prepare


def broken(*args: Any, **keywords: Any) -> Any:
    raise KeyError("broken on purpose")


def test_each_hook_of_ours_is_guarded() -> None:
    for kind in (ProgressCallback, ExperimentMetadata, SilentTrials, UnusedArguments, Preflight):
        hooks = [name for name in vars(kind) if name == "setup" or name.startswith("on_")]
        assert hooks
        assert all(hasattr(vars(kind)[name], "__wrapped__") for name in hooks), kind


@pytest.mark.slow
def test_a_search_returns_its_results_when_everything_that_is_shown_or_recorded_fails(
    ray_session: None,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(config: dict[str, Any]) -> None:
        report(loss=config["x"])

    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    monkeypatch.setattr(progress, "last_screen", broken)
    monkeypatch.setattr(progress.Progress, "reported", broken)
    monkeypatch.setattr("horovod_tune.run_settings.write_metadata", broken)
    monkeypatch.setattr("horovod_tune.run_settings.TRAINING_ITERATION", ["cannot be a key"])
    with caplog.at_level(logging.WARNING):
        results = tune.run(
            DistributedTrainableCreator(train, num_slots=1),
            config={"x": tune.grid_search([2.0, 1.0])},
            metric="loss",
            mode="min",
            storage_path=str(tmp_path),
        )
    assert results.best_config == {"x": 1.0}
    warned = [each.getMessage() for each in caplog.records if "continues without it" in each.getMessage()]
    assert len(warned) == 3, warned


def test_a_callback_that_cannot_be_made_is_left_out(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ProgressCallback, "__init__", broken)
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "1")
    monkeypatch.setattr("horovod_tune.run_settings.placement_of", broken)
    with prepare(DistributedTrainableCreator(print), {"config": {}}) as prepared:
        assert prepared["config"] == {}
    assert len([each for each in caplog.records if "broken on purpose" in each.getMessage()]) == 2


def test_a_notebooks_table_that_fails_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("IPython")
    monkeypatch.setattr("horovod_tune.analysis.terminal.as_html", broken)
    monkeypatch.setattr("IPython.display.display", lambda *args, **keywords: SimpleNamespace(update=print))
    monkeypatch.setattr("IPython.get_ipython", type("ZMQInteractiveShell", (), {}))
    shown = ProgressCallback()
    shown.setup()
    for step in range(2):
        shown.on_step_begin(step, [])
        shown.on_step_end(step, [])
    shown.on_experiment_end([])
    (warning,) = caplog.records
    assert "broken on purpose" in warning.getMessage()


def test_the_warning_is_one_line_and_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    @best_effort_callback("showing the progress")
    class Shown:
        def on_trial_result(self) -> None:
            raise ValueError("bad value")

    shown = Shown()
    shown.on_trial_result()
    shown.on_trial_result()
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "showing the progress failed (ValueError: bad value); the search continues without it"
    )
    with best_effort("advice"):
        raise RuntimeError
    assert len(caplog.records) == 2
