"""The figures of README.md and docs/benchmarks.md are those of the runs in benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.__main__ import read_results
from benchmarks.parts import OURS, PARTS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_the_pages_have_the_figures_of_the_results(path: Path) -> None:
    page = path.read_text()
    assert re.search("<!-- (trial|speed) -->", page)
    assert tables.fill(page, read_results()) == page, "python -m benchmarks picture"


def test_a_page_gets_the_medians_of_other_results() -> None:
    def rows(*values: float) -> list[dict[str, float]]:
        return [{"trial_s": value, "trial_mean_s": value} for value in values]

    ways = {way: rows(1.0, 3.0, 2.0) for way in PARTS["turnaround"].ways}
    results = {"turnaround": {**ways, OURS: rows(0.251, 0.02, 7.0)}}
    page = "takes <!-- trial -->1 s<!-- end -->, alone <!-- floor -->2 s<!-- end -->."
    assert (
        tables.fill(page, results)
        == "takes <!-- trial -->0.25 s<!-- end -->, alone <!-- floor -->2 s<!-- end -->."
    )


def test_the_results_are_of_one_commit_and_of_the_ways_that_are_measured() -> None:
    for name, figures in read_results().items():
        assert set(figures) <= set(PARTS[name].ways), f"{name}: measured by a program that is gone"
        rounds = {len(rows) for rows in figures.values()}
        assert len(rounds) == 1, f"{name}: not all ways were measured in the same rounds"
    described = (ROOT / "benchmarks/results/speed_machine.txt").read_text()
    assert re.search("^commit: [0-9a-f]{8}", described, re.MULTILINE)
