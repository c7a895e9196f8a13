"""The coordinator speaks to hosts, not to ranks: its work between reports, with the benchmark's stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["relays", "elastic"])
@pytest.mark.parametrize(("ranks", "connections"), [(8, 8), (64, 8 + 7), (256, 8 + 31)])
def test_a_report_takes_a_message_to_each_host_and_no_call_of_ray(
    way: str, ranks: int, connections: int
) -> None:
    command = [sys.executable, "-m", "benchmarks.scale_reports", way, str(ranks), "0.5"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    # Eight ranks a host: those of the coordinator's host, and the first of each other one.
    assert figures["connected"] == connections
    assert figures["ray_calls_per_report"] == 0
    assert figures["reports_per_s"] > 0
