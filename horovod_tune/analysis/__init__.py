"""Results of a search: `analyze`, its frames, plots, the HTML report, the terminal view, and progress.

The parts that need Plotly, rich or Ray are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_tune.analysis.open_experiment import Analysis as Analysis
    from horovod_tune.analysis.open_experiment import analyze as analyze
    from horovod_tune.analysis.progress import ProgressCallback as ProgressCallback
    from horovod_tune.analysis.report import write_report as write_report

_HOMES = {
    "Analysis": "open_experiment",
    "analyze": "open_experiment",
    "ProgressCallback": "progress",
    "write_report": "report",
}

__all__ = ["Analysis", "ProgressCallback", "analyze", "write_report"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
