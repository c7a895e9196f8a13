"""Signs of life, and that no process outlives the one above it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from processes import eventually
from worker_kinds import Workers
from xla_processes import rank_processes, see_them_gone

from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import WorkerInfo
from horovod_tune.xla.supervisor import RankProcess, Supervisor

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def busy_rank() -> Iterator[RankProcess]:
    """A process that computes and never says a word, as one that holds Python's lock while it compiles."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    place = {"ordinal": 0, "world_size": 1, "local_ordinal": 0, "local_size": 1}
    nothing: Any = None
    yield RankProcess(**place, pid=process.pid, process_started=0.0, channel=nothing, output=None)
    process.kill()
    process.wait()


def supervisor_of(rank: RankProcess) -> Supervisor:
    made = Supervisor.__new__(Supervisor)
    made._heartbeat_s, made.ranks = 0.01, [rank]
    return made


def test_a_process_that_computes_is_not_silent_but_one_that_is_stopped_is(busy_rank: RankProcess) -> None:
    supervisor = supervisor_of(busy_rank)
    process = psutil.Process(busy_rank.pid)

    def used() -> float:
        times = process.cpu_times()
        return times.user + times.system

    for _ in range(3):
        before = used()
        eventually(lambda before=before: used() > before + 0.02, within_s=60)
        supervisor.unresponsive(1e9)  # takes note of the time that it has used
        assert supervisor.unresponsive(60) == []
    os.kill(busy_rank.pid, signal.SIGSTOP)
    eventually(lambda: supervisor.unresponsive(0.5) == [busy_rank], within_s=60)


@pytest.fixture
def workers(ray_session: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers("plain", tmp_path, timeout_s=180)
    yield made
    made.close()


def wait_for_ever(config: dict[str, Any]) -> None:
    import threading

    import horovod_tune

    horovod_tune.report(there=1)
    threading.Event().wait()


def below(workers: Workers) -> list[psutil.Process]:
    """Return the processes below the host's actor: its ranks and their parent."""
    found = [psutil.Process(fact.pid) for fact in workers.launcher._below]  # type: ignore[attr-defined]
    assert len(found) == workers.size + 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the host's actor", "the ranks' parent"])
def test_what_is_below_a_killed_process_dies_with_it(workers: Workers, killed: str) -> None:
    workers.begin(wait_for_ever)
    assert workers.group.next_event()
    processes = below(workers)
    if killed == "the host's actor":
        info = workers.group.workers[0].info
        assert info is not None
        os.kill(info.pid, signal.SIGKILL)
    else:
        (parent,) = [each for each in processes if each.pid in {other.ppid() for other in processes}]
        parent.kill()
    see_them_gone(processes)
    with pytest.raises(TrainingFailed, match=r"rank [01] of 2 on .* died"):
        workers.group.next_event()


@pytest.mark.slow
def test_a_host_that_is_suspended_while_its_ranks_start_fails_the_start_after_timeout_s(
    ray_session: Any, tmp_path: Path
) -> None:
    made = Workers("plain", tmp_path, timeout_s=8)
    (plan,) = made.launcher._plans([WorkerInfo("", "", "", 0, 0.0)])
    # Its two ranks wait for a third one, as for another host of a slice.
    three = replace(plan, of_each=tuple({**each, "LOCAL_WORLD_SIZE": "3"} for each in plan.of_each))
    made.launcher._plans = lambda _: [three]

    def suspend() -> None:
        eventually(lambda: len(rank_processes()) == 3, within_s=60)  # with their parent
        found = {each.pid: each.ppid() for each in rank_processes()}
        (actor,) = {above for above in found.values() if above not in found}
        os.kill(actor, signal.SIGSTOP)
        suspended.append(time.monotonic())

    suspended: list[float] = []
    suspending = threading.Thread(target=suspend)
    suspending.start()
    try:
        with pytest.raises(StartFailed) as caught:
            made.begin(wait_for_ever)
        assert time.monotonic() - suspended[0] < 4 * 8
    finally:
        suspending.join()
        processes = rank_processes()
        made.close()
    said = r"the host actor of .* stopped responding: no heartbeat for 8 s \(timeout_s\)"
    assert re.match(said, str(caught.value))
    see_them_gone(processes)


@pytest.mark.slow
def test_a_host_without_torch_xla_says_so_at_the_start(ray_session: Any, tmp_path: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("torch_xla") is not None:
        pytest.skip("torch_xla is installed")
    made = Workers("torch_xla", tmp_path)
    try:
        with pytest.raises(StartFailed, match=r"(?s)ranks of .* did not start.*No module named 'torch_xla'"):
            made.begin(wait_for_ever)
    finally:
        made.close()
