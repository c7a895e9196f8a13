"""What a report costs the coordinator of a large trial, with the benchmark's stand-ins for the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_python

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["fixed", "elastic"])
def test_a_report_takes_one_call_of_ray_for_each_rank_on_another_host(way: str) -> None:
    ranks = 64
    figures = json.loads(run_python("-m", "benchmarks.scale_reports", way, ranks, 0.5, cwd=REPOSITORY).stdout)
    # Eight ranks per host: those of the coordinator's host are connected to it.
    assert figures["connected"] == 8
    assert figures["ray_calls_per_report"] == pytest.approx(ranks - 8, rel=0.05)
    assert figures["reports_per_s"] > 0
