"""`horovod-tune export`: an experiment's frames as CSV or Parquet files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

import pandas as pd

from horovod_tune.analysis.printable import one_line

_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last four: full-width ones
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def write_csv(table: pd.DataFrame, path: Path | TextIO) -> None:
    """Write a frame as CSV in UTF-8; lists and the like are written as JSON.

    A text that a spreadsheet would run as a formula gets an apostrophe in front, as OWASP advises; on a
    terminal, control characters are escaped. Parquet keeps every text unchanged.
    """
    made = _simple(table)
    if not isinstance(path, Path) and path.isatty():
        made = _each_text(made, one_line)
    made = _each_text(made, escape_formula)
    text = made.to_csv(index=False, lineterminator="\n")
    if "\r" in text:
        # A lone carriage return ends a row, unless its text is in quotation marks: Python puts a text with a
        # character of the line's end into them.
        text = made.to_csv(index=False, lineterminator="\r\n")
    if isinstance(path, Path):
        path.write_bytes(text.encode())
    else:
        path.write(text)


def write_parquet(table: pd.DataFrame, path: Path | BinaryIO) -> None:
    """Write a frame as Parquet with its types; lists and columns of mixed types are written as JSON text."""
    _simple(table).to_parquet(path, index=False)


def escape_formula(text: str) -> str:
    """Return a text that no spreadsheet runs as a formula; numbers written as text stay as they are.

    >>> escape_formula("=1+1"), escape_formula("-0.5"), escape_formula("relu")
    ("'=1+1", '-0.5', 'relu')
    """
    if not text.lstrip(" ").startswith(_FORMULA) or _NUMBER.fullmatch(text):
        return text
    return f"'{text}"


def _each_text(table: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    """Return a `_simple` frame with its texts and names changed."""
    made = table.rename(columns=lambda name: change(str(name)))
    for place, dtype in enumerate(table.dtypes):
        if not pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_datetime64_any_dtype(dtype):
            made.isetitem(place, table.iloc[:, place].map(change, na_action="ignore"))
    return made


def _simple(table: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with columns of numbers, times and texts only."""
    made = table.copy()
    for name in [name for name in table if table[name].dtype == object]:
        texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in table[name]]
        made[name] = pd.Series(texts, index=table.index, dtype=object).where(table[name].notna(), None)
    return made
