"""What a report costs the coordinator of a large trial, with the benchmark's stand-ins for the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["fixed", "elastic"])
def test_a_report_takes_one_call_of_ray_for_each_rank_on_another_host(way: str) -> None:
    ranks = 64
    command = [sys.executable, "-m", "benchmarks.scale_reports", way, str(ranks), "0.5"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    # Eight ranks per host: those of the coordinator's host are connected to it.
    assert figures["connected"] == 8
    assert figures["ray_calls_per_report"] == pytest.approx(ranks - 8, rel=0.05)
    assert figures["reports_per_s"] > 0
