"""What a preflight found, and the table that shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_tune.preflight.judge import MachineLook, Problem

WIDTH = 100


@dataclass(frozen=True)
class PreflightReport:
    """The machines that were looked at and what is wrong with them; `str()` is the table."""

    looks: tuple[MachineLook, ...]
    problems: tuple[Problem, ...]
    # How long the look took.
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether a trial across these machines can run, warnings or not."""
        return all(problem.level != "problem" for problem in self.problems)

    def __str__(self) -> str:
        rows = [("machine", "collectives", "torch", "horovod", "clock", ""), *map(self._row, self.looks)]
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        for problem in self.problems:
            first = f"{problem.node}: "
            lines += ["", *_wrap(problem.problem, first), *_wrap(problem.cure, "  Cure: ")]
        return "\n".join(lines)

    def _row(self, look: MachineLook) -> tuple[str, ...]:
        levels = {problem.level for problem in self.problems if problem.node == look.label}
        mark = "problem" if "problem" in levels else "warning" if levels else "ok"
        facts = look.facts
        if facts is None:
            return (look.label, look.address, "", "", "", mark)
        collectives = f"{look.interface or '?'} {look.interface_address or look.address}"
        clock = "" if look.clock_ahead_s is None else f"{look.clock_ahead_s:+.1f} s"
        return (
            look.label,
            collectives,
            facts.torch.version if facts.torch else "none",
            facts.horovod.version if facts.horovod else "none",
            clock,
            mark,
        )


def _wrap(text: str, first: str) -> Sequence[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )
