"""An experiment that is started a second time goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune

from horovod_tune import resume_or_start


def started(run_config: tune.RunConfig, ran: Path, *, fail: bool) -> tune.ResultGrid:
    def train(config: dict[str, Any]) -> None:
        with ran.open("a") as lines:
            lines.write(f"{config['x']}\n")
        if fail and config["x"] == 2:
            raise RuntimeError("the node went away")
        tune.report({"loss": config["x"]})

    return resume_or_start(
        train,
        param_space={"x": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=run_config,
    ).fit()


def test_the_second_start_runs_only_what_had_not_ended(ray_session: Any, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    here = tune.RunConfig(name="mine", storage_path=str(tmp_path / "results"), verbose=0)
    assert started(here, ran, fail=True).num_errors == 1
    results = started(here, ran, fail=False)
    assert sorted(result.metrics["loss"] for result in results) == [1, 2]
    assert sorted(ran.read_text().split()) == ["1", "2", "2"]
    # A third time there is nothing left to run, and the results are still there.
    assert started(here, ran, fail=False).get_best_result().config == {"x": 1}
    assert len(ran.read_text().split()) == 3


def test_an_experiment_without_a_name_cannot_be_found_again() -> None:
    with pytest.raises(ValueError, match=r"run_config\.name must be set, got None"):
        resume_or_start(lambda config: None, run_config=tune.RunConfig())
