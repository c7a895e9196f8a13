"""Start slots: granted in order, no more at a time than allowed, and never lost with a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from horovod_tune.gloo.start_slots import StartSlot, start_slot

WAIT_S = 60


@pytest.fixture
def slots(tmp_path: Path) -> list[StartSlot]:
    return [StartSlot(tmp_path, "ranks", 2) for _ in range(4)]


def test_as_many_at_once_as_there_are_cpus_and_then_in_order(slots: list[StartSlot]) -> None:
    first, second, third, fourth = slots
    assert first.request().wait(WAIT_S) and second.request().wait(WAIT_S)
    assert not third.request().wait(0.2)
    assert not fourth.request().wait(0.2)
    first.release()
    assert third.wait(WAIT_S)
    assert not fourth.wait(0)
    second.release()
    assert fourth.wait(WAIT_S)
    third.release()
    fourth.release()
    fourth.release()


@pytest.mark.parametrize(("cpus", "ranks", "at_once"), [(2, 2, 1), (2, 16, 1), (8, 2, 4), (2, 1, 2)])
def test_as_many_trials_start_at_once_as_have_a_cpu_for_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int, at_once: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    starts = [start_slot(tmp_path, ranks).request() for _ in range(at_once + 1)]
    ends_s = time.monotonic() + WAIT_S
    while sum(start.wait(0) for start in starts) < at_once and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert sum(start.wait(0.2) for start in starts) == at_once
    for start in starts:
        start.release()


def hold(directory: Path, ready: Connection) -> None:
    assert StartSlot(directory, "ranks", 1).request().wait(WAIT_S)
    ready.send("has it")
    signal.pause()


def test_a_process_that_dies_releases_its_slot(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    try:
        assert ours.poll(WAIT_S) and ours.recv() == "has it"
        next_one = StartSlot(tmp_path, "ranks", 1)
        assert not next_one.request().wait(0.2)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert next_one.wait(WAIT_S)
        next_one.release()
    finally:
        process.kill()
        process.join(WAIT_S)


def test_a_slot_given_up_before_it_came_is_not_kept(slots: list[StartSlot], tmp_path: Path) -> None:
    only = [StartSlot(tmp_path / "one", "ranks", 1) for _ in range(3)]
    (tmp_path / "one").mkdir()
    assert only[0].request().wait(WAIT_S)
    assert not only[1].request().wait(0.1)
    only[1].release()
    only[0].release()
    assert only[2].request().wait(WAIT_S)
    only[2].release()
