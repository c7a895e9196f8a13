"""What a search with limits, or for several metrics, prints at its end, and what `analyze` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune

from horovod_tune import analyze
from horovod_tune.analysis import ProgressCallback
from horovod_tune.cli import main
from horovod_tune.search import BayesOptSearch

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def search(folder: Path, name: str, metric: str | None, capsys: Any, aims: dict[str, Any]) -> tuple[str, str]:
    """Run a search and return its folder and its last screen."""

    def train(config: dict[str, Any]) -> None:
        # The better, the slower.
        tune.report({"accuracy": config["x"], "latency_ms": 40 * config["x"]})

    mode = "max" if metric else None
    tune.Tuner(
        train,
        param_space={"x": tune.uniform(0, 1)},
        tune_config=tune.TuneConfig(
            search_alg=tune.search.ConcurrencyLimiter(BayesOptSearch(**aims), max_concurrent=2),
            num_samples=8,
            metric=metric,
            mode=mode,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=str(folder), name=name, verbose=0, callbacks=[ProgressCallback(metric, mode)]
        ),
    ).fit()
    return str(folder / name), capsys.readouterr().out


def test_the_best_meets_the_limits_that_the_search_was_given(
    ray_session: Any, tmp_path: Path, capsys: Any
) -> None:
    path, screen = search(tmp_path, "limits", "accuracy", capsys, {"limits": ["latency_ms <= 20"]})
    analysis = analyze(path)
    assert [str(limit) for limit in analysis.limits] == ["latency_ms <= 20"]
    values = [trial.last_result["accuracy"] for trial in analysis.trials if trial.last_result]
    assert max(values) > 0.5, "a trial has to break the limit"
    assert analysis.best_result["accuracy"] == max(value for value in values if value <= 0.5)
    line = next(line for line in screen.splitlines() if line.startswith("best trial"))
    assert "within latency_ms <= 20" in line and analysis.best_trial.trial_id in line
    assert analyze(path, limits=[]).best_result["accuracy"] == max(values)
    assert analyze(path, limits=["latency_ms < 1e-9"]).limits[0].bound == 1e-9

    path, screen = search(tmp_path, "none", "accuracy", capsys, {"limits": ["latency_ms <= -1"]})
    assert "none: no trial's last report has a finite accuracy and meets latency_ms <= -1" in screen


def test_the_front_is_that_of_the_metrics_that_the_search_had(
    ray_session: Any, tmp_path: Path, capsys: Any
) -> None:
    aims = {"metric": ["accuracy", "latency_ms"], "mode": ["max", "min"]}
    path, screen = search(tmp_path, "front", None, capsys, aims)
    assert "8 of 8 trials are on the Pareto front of accuracy and latency_ms" in screen
    front = analyze(path).pareto_front()
    assert front.metrics == {"accuracy": "max", "latency_ms": "min"} and front.on_front.sum() == 8
    assert main(["report", path, "-o", str(tmp_path / "page.html")]) == 0
    assert 'id="trade-offs"' in (tmp_path / "page.html").read_text()
