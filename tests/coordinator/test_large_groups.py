"""Large worker groups have a longer start timeout, and calls of Ray only for ranks on other hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_workers import REQUEST, TIMEOUT_S, Clock, Group
from processes import run_python


def start_late(group: Group, seconds: float) -> None:
    """Let the last actor of a group reply to `describe` after ``seconds``."""
    description = group.worker_group.workers[-1].description
    info = group.actors[-1].replies["describe"]
    group.clock.call_later(seconds, lambda: description.reply.set_result(info))


def begin_with_a_late_start(clock: Clock, size: int, seconds: float) -> Group:
    group = Group(clock, size)
    group.actors[-1].suspend()
    group.worker_group.create()
    group.actors[-1].resume()
    start_late(group, seconds)
    group.worker_group.begin(REQUEST)
    return group


def test_a_large_world_has_a_longer_start_timeout(clock: Clock) -> None:
    group = begin_with_a_late_start(clock, 512, TIMEOUT_S + 100.0)
    assert len(group.worker_group.hosts) == 512
    group.worker_group.close()


REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("way", ["fixed", "elastic"])
def test_a_report_takes_one_call_of_ray_for_each_rank_on_another_host(way: str) -> None:
    ranks = 64
    figures = json.loads(run_python("-m", "benchmarks.scale_reports", way, ranks, 0.5, cwd=REPOSITORY).stdout)
    # Eight ranks per host: those of the coordinator's host are connected to it.
    assert figures["connected"] == 8
    assert figures["ray_calls_per_report"] == pytest.approx(ranks - 8, rel=0.05)
    assert figures["reports_per_s"] > 0
