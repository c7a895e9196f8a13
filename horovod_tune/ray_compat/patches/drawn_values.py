"""Seeds what Tune draws for `tune.sample_from` when it adds a trial, and again after a restore."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from horovod_tune.compatibility import Patch, wrap
from horovod_tune.ray_compat.schedules import innermost

_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"


@Patch(
    "tune.sample_from draws different values in each run, even if the search has a seed",
    f"{_CONTROLLER}.add_trial(self, trial) uses resolve_config_placeholders",
    f"{_CONTROLLER} uses _search_alg",
    "ray.tune.search.search_generator:SearchGenerator uses searcher",
    "ray.tune.experiment.trial:Trial uses experiment_tag",
).once
def draw_with(seeding: Callable[[Any, str], AbstractContextManager[None]]) -> None:
    """Make Tune add each trial inside ``seeding(searcher, experiment_tag)``."""
    from ray.tune.execution.tune_controller import TuneController

    @wrap(TuneController, "add_trial")
    def add_trial(original: Any, self: Any, trial: Any) -> None:
        with seeding(innermost(self._search_alg), trial.experiment_tag or ""):
            original(self, trial)
