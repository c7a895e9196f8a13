"""Patches Tune's check of results, which a trial that has reported nothing does not pass."""

from __future__ import annotations

import functools
from typing import Any

from horovod_tune.compatibility import Patch, part

_PATCH = Patch(
    "empty results",
    "a trial that reports nothing may end its experiment with an error about the metric",
    (
        part(
            "ray.tune.execution.tune_controller:TuneController._validate_result_metrics",
            "self",
            "result",
            uses="DEBUG_METRICS DONE",
        ),
        part("ray.tune.result:DEBUG_METRICS"),
        part("ray.tune.result:DONE"),
    ),
)


def accept_trials_without_results() -> None:
    """Let a trial end that has reported nothing, whatever its config; once a process.

    Tune takes the config's entries of such a trial for metrics when there are two or more, misses the metric
    among them, and ends the experiment with that error.
    """
    if not _PATCH.is_due:
        return
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.result import DEBUG_METRICS, DONE

    original = TuneController._validate_result_metrics
    without_report = {*DEBUG_METRICS, DONE}

    @functools.wraps(original)
    def validate(self: Any, result: dict[str, Any]) -> None:
        if any(not name.startswith("config/") and name not in without_report for name in result):
            original(self, result)

    TuneController._validate_result_metrics = validate  # type: ignore[method-assign]
