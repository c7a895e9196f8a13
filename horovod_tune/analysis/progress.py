"""`ProgressCallback`: runs in the driver and says how a search goes while it goes."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from ray.tune import Callback

from horovod_tune.analysis.last_screen import last_screen, searched_for
from horovod_tune.analysis.printable import printable
from horovod_tune.analysis.progress_state import Progress
from horovod_tune.best_effort import best_effort_callback
from horovod_tune.experiment_facts import write_facts


@best_effort_callback("showing the progress")
class ProgressCallback(Callback):
    """Show a search's progress: in a terminal or a notebook one live line a trial, elsewhere plain lines.

    Pass it to Tune with its other callbacks; Tune's own reporter goes on as before (its lines scroll above
    the live ones). Tune tells callbacks neither metric nor mode: without them here, no best value is shown.

    ```python
    tune.RunConfig(callbacks=[ProgressCallback(metric="loss", mode="min")])
    ```

    It also leaves metric and mode, the versions and the cluster's size in the experiment's folder
    (`horovod_tune_run-….json`), where `analyze` and the report find them.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        *,
        every_s: float = 30.0,
        live: bool | None = None,
        stream: Any = None,
    ):
        """Make the callback; nothing is written before the search starts.

        `every_s` bounds how often a plain line repeats a trial's progress (seconds). `live` forces live or
        plain lines; by default live where `stream` (standard output unless given) is a terminal. Raises
        `ValueError` for an unknown mode, or one of metric and mode without the other.
        """
        if mode not in (None, "min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}')
        if (metric is None) != (mode is None):
            raise ValueError(f"metric and mode belong together, got metric={metric!r} and mode={mode!r}")
        if not every_s >= 0:
            raise ValueError(f"every_s must be at least 0 seconds, got {every_s}")
        self._metric, self._mode = metric, mode
        self._every_s, self._live, self._stream = every_s, live, stream
        self._progress = Progress(metric=metric, mode=mode)
        self._view: Any = None
        self._facts_written = False
        # Trials that run, as Tune has them: it tells callbacks nothing when one is paused.
        self._running: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks; a screen and an open stream stay here.
        return self.__dict__ | {"_view": None, "_stream": None, "_facts_written": False, "_running": {}}

    def setup(
        self, stop: Any = None, num_samples: Any = None, total_num_samples: Any = None, **info: Any
    ) -> None:
        total = total_num_samples if isinstance(total_num_samples, int) else None
        goal = stop.get("training_iteration") if isinstance(stop, dict) else None
        self._progress = Progress(
            metric=self._metric,
            mode=self._mode,
            total=total if total is not None and 0 < total < 2**31 else None,
            goal=goal if isinstance(goal, (int, float)) else None,
            budget_s=_seconds(info.get("time_budget_s")),
            began=time.time(),
        )
        self._view = self._make_view()

    def _make_view(self) -> Any:
        from horovod_tune.analysis.progress_notebook import NotebookView, in_notebook
        from horovod_tune.analysis.progress_view import LiveView, PlainView

        if self._live is not False and self._stream is None and in_notebook():
            return NotebookView()
        stream = self._stream or sys.stdout
        live = self._live if self._live is not None else bool(getattr(stream, "isatty", lambda: False)())
        return LiveView(stream) if live else PlainView(stream, self._every_s)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not self._facts_written:
            self._facts_written = True
            write_facts(trial, self._metric, self._mode)
        goal = (trial.stopping_criterion or {}).get("training_iteration")
        resumed = self._progress.is_paused(trial.trial_id)
        self._progress.started(trial.trial_id, time.time(), goal=goal, config=trial.evaluated_params)
        self._running[trial.trial_id] = trial
        self._tell("resumed" if resumed else "started", trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        better = self._progress.reported(trial.trial_id, result, time.time())
        self._tell("better" if better else "reported", trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._progress.ended(trial.trial_id, "done", time.time())
        self._tell("done", trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._progress.ended(trial.trial_id, "failed", time.time())
        self._tell("failed", trial.trial_id)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._progress.ended(trial.trial_id, "restarting", time.time())
        self._tell("restarting", trial.trial_id)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for trial_id, trial in list(self._running.items()):
            if trial.status in ("PAUSED", "TERMINATED", "ERROR"):
                del self._running[trial_id]
                if trial.status == "PAUSED":
                    self._progress.paused(trial_id)
        if self._view is not None:
            self._view.tick(self._progress, time.time())

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        if self._view is not None:
            self._view.close(self._progress, time.time())
            self._view = None
            if trials:
                folder = str(trials[0].storage.experiment_fs_path)
                aims = searched_for(trials[0].storage.experiment_driver_staging_path)
                text = last_screen(self._progress, folder, trials, aims)
                print(printable(text), file=self._stream or sys.stdout, flush=True)

    def _tell(self, what: str, trial_id: str) -> None:
        if self._view is not None:
            self._view.tell(what, trial_id, self._progress, time.time())


def _seconds(value: Any) -> float | None:
    if hasattr(value, "total_seconds"):
        value = value.total_seconds()
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
