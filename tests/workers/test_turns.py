"""Turns at starting: in order, as many at once as is said, and never lost with a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from horovod_tune.workers.turns import Turn, starts_turn

WAIT_S = 60


@pytest.fixture
def turns(tmp_path: Path) -> list[Turn]:
    return [Turn(tmp_path, "ranks", 2) for _ in range(4)]


def test_as_many_at_once_as_there_are_cpus_and_then_in_order(turns: list[Turn]) -> None:
    first, second, third, fourth = turns
    assert first.ask().comes_within(WAIT_S) and second.ask().comes_within(WAIT_S)
    assert not third.ask().comes_within(0.2)
    assert not fourth.ask().comes_within(0.2)
    first.end()
    assert third.comes_within(WAIT_S)
    assert not fourth.comes_within(0)
    second.end()
    assert fourth.comes_within(WAIT_S)
    third.end()
    fourth.end()
    fourth.end()


@pytest.mark.parametrize(("cpus", "ranks", "at_once"), [(2, 2, 1), (2, 16, 1), (8, 2, 4), (2, 1, 2)])
def test_as_many_trials_start_at_once_as_have_a_cpu_for_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int, at_once: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    starts = [starts_turn(tmp_path, ranks).ask() for _ in range(at_once + 1)]
    ends_s = time.monotonic() + WAIT_S
    while sum(start.comes_within(0) for start in starts) < at_once and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert sum(start.comes_within(0.2) for start in starts) == at_once
    for start in starts:
        start.end()


def hold(directory: Path, ready: Connection) -> None:
    assert Turn(directory, "ranks", 1).ask().comes_within(WAIT_S)
    ready.send("has it")
    signal.pause()


def test_a_process_that_dies_gives_its_turn_back(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    try:
        assert ours.poll(WAIT_S) and ours.recv() == "has it"
        next_one = Turn(tmp_path, "ranks", 1)
        assert not next_one.ask().comes_within(0.2)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert next_one.comes_within(WAIT_S)
        next_one.end()
    finally:
        process.kill()
        process.join(WAIT_S)


def test_a_turn_given_up_before_it_came_is_not_kept(turns: list[Turn], tmp_path: Path) -> None:
    only = [Turn(tmp_path / "one", "ranks", 1) for _ in range(3)]
    (tmp_path / "one").mkdir()
    assert only[0].ask().comes_within(WAIT_S)
    assert not only[1].ask().comes_within(0.1)
    only[1].end()
    only[0].end()
    assert only[2].ask().comes_within(WAIT_S)
    only[2].end()
