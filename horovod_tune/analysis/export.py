"""`horovod-tune export`: an experiment's frames as CSV or Parquet files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import pandas as pd

from horovod_tune.analysis.results import Analysis

WHAT = ("trials", "history")


def chosen_frame(analysis: Analysis, what: str) -> pd.DataFrame:
    """Return one row a trial ("trials") or one row a report ("history"). Raises `ValueError` for others."""
    if what not in WHAT:
        raise ValueError(f'what must be "trials" or "history", got {what!r}')
    return analysis.dataframe() if what == "trials" else analysis.history()


def write_csv(table: pd.DataFrame, path: Path | TextIO) -> None:
    """Write a frame as CSV in UTF-8; lists and the like are written as JSON."""
    _simple(table).to_csv(path, index=False)


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """Write a frame as Parquet with its types; columns that mix types are written as JSON text."""
    _simple(table).to_parquet(path, index=False)


def _simple(table: pd.DataFrame) -> pd.DataFrame:
    made = table.copy()
    for name in made.columns:
        column = made[name]
        if column.dtype == object:
            present = column[column.notna()]
            if not all(isinstance(value, str) for value in present):
                made[name] = pd.Series([_text(value) for value in column], index=made.index, dtype=object)
    return made


def _text(value: Any) -> str | None:
    if value is None or (isinstance(value, float) and value != value):
        return None
    return value if isinstance(value, str) else json.dumps(value, default=str)
