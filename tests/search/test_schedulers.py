"""What `docs/schedulers.md` says about Tune's schedulers is what they do."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune import Callback, Stopper, schedulers
from ray.tune.schedulers.pb2 import PB2

from horovod_tune.search import PromotingASHA

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedulers.md"
X = tune.uniform(0, 1)
OFTEN = {"time_attr": "training_iteration", "perturbation_interval": 1}
# By its name in the table of the page.
SCHEDULERS: dict[str, Any] = {
    "none": lambda: None,
    "ASHA": lambda: schedulers.ASHAScheduler(max_t=4, grace_period=2),
    "`PromotingASHA`": lambda: PromotingASHA(max_t=4, grace_period=2),
    "Median stopping": lambda: schedulers.MedianStoppingRule("training_iteration", grace_period=1),
    "HyperBand": lambda: schedulers.HyperBandScheduler(max_t=4),
    "BOHB": lambda: schedulers.HyperBandForBOHB(max_t=4),
    "Population based training": lambda: schedulers.PopulationBasedTraining(
        **OFTEN, hyperparam_mutations={"x": X}
    ),
    "PB2": lambda: PB2(**OFTEN, hyperparam_bounds={"x": [0, 1]}),
}


class FirstPause(Callback, Stopper):
    """Ends the search when a trial is paused."""

    seen = False

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.seen = self.seen or any(trial.status == "PAUSED" for trial in trials)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.seen


def rows() -> dict[str, str]:
    """Return whether a scheduler needs checkpoints, as the table of the page has it."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    named = {re.match(r"\[?(`\w+`|[\w ]+)", first)[1]: more for first, *more in cells}  # type: ignore[index]
    return {name.strip(): more[1].strip() for name, more in named.items() if name.strip() in SCHEDULERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_pauses_trials_needs_checkpoints_according_to_its_page(
    tune_run: Any, name: str
) -> None:
    def train(config: dict[str, Any]) -> None:
        for step in range(1, 5):
            with tempfile.TemporaryDirectory() as directory:
                tune.report(
                    {"loss": config["x"] / step}, checkpoint=tune.Checkpoint.from_directory(directory)
                )

    pause = FirstPause()
    search = None
    if name == "BOHB":
        pytest.importorskip("hpbandster", reason="pip install 'horovod_tune[bohb]'")
        from horovod_tune.search import TuneBOHB

        search = TuneBOHB()
    tune_run(
        tune.with_resources(train, {"cpu": 1}),
        config={"x": X},
        num_samples=6,
        metric="loss",
        mode="min",
        scheduler=SCHEDULERS[name](),
        search_alg=search,
        max_concurrent_trials=None if search else 3,
        callbacks=[pause],
        stop=pause,
    )
    assert rows()[name].startswith("yes" if pause.seen else "no")
    assert set(rows()) == set(SCHEDULERS)
