"""A CSV of results, from which an interrupted benchmark continues."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any


class ResultRows:
    """The rows of a CSV whose first `keys` fields identify a run.

    Each row is written immediately, so that an interrupted benchmark keeps its results.
    """

    def __init__(self, path: Path, fields: list[str], keys: int) -> None:
        self._path, self._fields = path, fields
        self._present: set[tuple[str, ...]] = set()
        if path.exists():
            with path.open(newline="") as file:
                self._present = {tuple(row[key] for key in fields[:keys]) for row in csv.DictReader(file)}

    def has(self, *key: object) -> bool:
        """Return True if the file already has the row of these keys."""
        return tuple(map(str, key)) in self._present

    def add(self, row: dict[str, Any]) -> None:
        """Write one row; a new file gets its header first."""
        is_new = not self._path.exists()
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._fields, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)
