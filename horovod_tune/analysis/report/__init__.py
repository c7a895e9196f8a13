"""The report: one HTML page that needs nothing but itself."""

from horovod_tune.analysis.report.page import render, write_report

__all__ = ["render", "write_report"]
