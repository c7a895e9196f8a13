"""Writes the figures of `results/speed.csv` into README.md and docs/benchmarks.md: one set of figures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.parts import EXECUTOR, FLOOR, OURS, PARTS, RUN, TRAIN, Figures, Part, judge

Results = Mapping[str, Figures]

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")


_COMPARED = (
    "| horovod_tune | a new RayExecutor | a new `horovodrun` | a new Ray Train V2 run |\n|---|---|---|---|\n"
)
_SPEED = "| part | what is measured | horovod_tune | others | targets |\n|---|---|---|---|---|\n"


def short(value: float) -> str:
    """Return ``value`` with two significant digits.

    >>> [short(value) for value in (0.0623, 3.91, 477.2, 30.06)]
    ['0.062', '3.9', '480', '30']
    """
    return f"{float(f'{value:.2g}'):g}"


def texts(results: Results) -> dict[str, str]:
    """Return what is written between ``<!-- NAME -->`` and ``<!-- end -->`` in the pages, by name."""
    medians = {
        way: short(statistics.median(row["trial_s"] for row in rows))
        for way, rows in results["turnaround"].items()
    }
    compared = " | ".join(f"{medians[way]} s" for way in (OURS, EXECUTOR, RUN, TRAIN) if way in medians)
    rows = [_row(name, part, results[name]) for name, part in PARTS.items() if name in results]
    return {
        "trial": f"{medians[OURS]} s",
        "floor": f"{medians[FLOOR]} s",
        "compared": f"\n\n{_COMPARED}| {compared} |\n\n",
        "speed": f"\n\n{_SPEED}{''.join(rows)}\n",
    }


def _row(name: str, part: Part, figures: Figures) -> str:
    ours, others = list[str](), list[str]()
    for way, rows in figures.items():
        values = [row[part.figure] for row in rows]
        text = short(statistics.median(values))
        if len(values) > 1:
            text += f" ({short(min(values))} to {short(max(values))})"
        is_ours = way.startswith(OURS)
        label = way.removeprefix(OURS).lstrip(", ") if is_ours else way
        (ours if is_ours else others).append(f"{label} {text}".strip())
    judged = judge(part, figures)
    return f"| `{name}` | {part.question} | {_cell(ours)} | {_cell(others)} | {_cell(judged)} |\n"


def _cell(texts: Sequence[str]) -> str:
    return "; ".join(texts) or "-"


def fill(page: str, results: Results) -> str:
    """Return a page with the current figures."""
    for name, text in texts(results).items():
        page = re.sub(
            f"(<!-- {name} -->).*?(<!-- end -->)",
            lambda found, text=text: f"{found[1]}{text}{found[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def write(results: Results) -> None:
    for path in PAGES:
        path.write_text(fill(path.read_text(), results))
