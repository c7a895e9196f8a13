"""Patches Tune's check of results, which a trial that has reported nothing does not pass."""

from __future__ import annotations

import functools
from typing import Any


def accept_trials_without_results() -> None:
    """Let a trial end that has reported nothing, whatever its config; once a process.

    Tune takes the config's entries of such a trial for metrics when there are two or more, misses the metric
    among them, and ends the experiment with that error.
    """
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.result import DEBUG_METRICS, DONE

    if hasattr(TuneController._validate_result_metrics, "_horovod_tune"):
        return
    original = TuneController._validate_result_metrics
    without_report = {*DEBUG_METRICS, DONE}

    @functools.wraps(original)
    def validate(self: Any, result: dict[str, Any]) -> None:
        if any(not name.startswith("config/") and name not in without_report for name in result):
            original(self, result)

    validate._horovod_tune = True  # type: ignore[attr-defined]
    TuneController._validate_result_metrics = validate  # type: ignore[method-assign]
