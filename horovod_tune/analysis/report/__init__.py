"""The report: one self-contained HTML page."""

from horovod_tune.analysis.report.page import render, write_report

__all__ = ["render", "write_report"]
