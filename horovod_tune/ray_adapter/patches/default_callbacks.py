"""A callback of ours beside those that Tune adds to every experiment."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

from horovod_tune.experiment_facts import write_facts

logger = logging.getLogger(__name__)


def write_facts_of_experiments() -> None:
    """Let every experiment of this driver leave its facts beside Tune's files; once a process.

    ``tune.run`` tells metric and mode to nobody who could write them down; without this, what it wrote can
    be looked at only by somebody who says them again.
    """
    from ray.tune import Callback, tune

    class ExperimentFacts(Callback):
        """Writes the facts when the first trial starts."""

        def __init__(self, metric: str | None, mode: str | None) -> None:
            self._aim: tuple[str | None, str | None] | None = (metric, mode)

        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            if self._aim is not None:
                write_facts(trial, *self._aim)
                self._aim = None

    original = getattr(tune, "_create_default_callbacks", None)
    if hasattr(original, "_horovod_tune"):
        return
    if original is None or not {"metric", "mode"} <= set(inspect.signature(original).parameters):
        logger.warning(
            "This Ray does not make its callbacks as Ray 2.60 does: metric and mode of tune.run are not "
            "written down, and horovod-tune show and report need --metric and --mode."
        )
        return

    @functools.wraps(original)
    def create(*args: Any, metric: str | None = None, mode: str | None = None, **more: Any) -> Any:
        callbacks = original(*args, metric=metric, mode=mode, **more)
        return [*callbacks, ExperimentFacts(metric, mode)]

    create._horovod_tune = True  # type: ignore[attr-defined]
    tune._create_default_callbacks = create  # type: ignore[assignment]
