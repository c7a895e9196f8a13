"""Large worker groups have a longer start timeout, and calls of Ray only for ranks on other hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_workers import REQUEST, TIMEOUT_S, Clock, FakeTrial
from processes import run_python


def test_a_large_world_has_a_longer_start_timeout(clock: Clock) -> None:
    trial = FakeTrial(clock, 512)
    last = trial.actors[-1]
    last.suspend()
    trial.group.create()
    last.resume()
    late = trial.group.workers[-1].description.reply
    clock.call_later(TIMEOUT_S + 100.0, lambda: late.set_result(last.replies["describe"]))
    trial.group.begin(REQUEST)
    assert len(trial.group.hosts) == 512
    trial.group.close()


REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["fixed", "elastic"])
def test_a_report_takes_one_call_of_ray_for_each_rank_on_another_host(way: str) -> None:
    ranks = 64
    figures = json.loads(run_python("-m", "benchmarks.scale_reports", way, ranks, 0.5, cwd=REPOSITORY).stdout)
    # Eight ranks per host: those of the coordinator's host are connected to it.
    assert figures["connected"] == 8
    assert figures["ray_calls_per_report"] == pytest.approx(ranks - 8, rel=0.05)
    assert figures["reports_per_s"] > 0
