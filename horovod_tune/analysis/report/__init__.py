"""The report: one HTML page that needs nothing but itself."""

from .page import render, write_report

__all__ = ["render", "write_report"]
