"""What plain processes show of the ranks of a host: what reaches them, how they end, and that none outlives
the process above it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import ray
from processes import eventually, see_them_gone, tpu_processes
from worker_kinds import Workers

from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import RankInfo, WorkerInfo
from horovod_tune.xla.supervisor import RankProcess

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray has a copy of its own


@pytest.mark.long
def test_a_process_that_computes_is_not_silent_but_one_that_is_stopped_is() -> None:
    """It computes and never sends anything, as one that holds Python's lock while it compiles."""
    nothing: Any = None
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            rank = RankProcess(RankInfo(0, 1, 0, 1, 0, 1), process.pid, nothing, -1)
            times = psutil.Process(process.pid).cpu_times
            for _ in range(3):
                before = times().user
                eventually(lambda before=before: times().user > before + 0.02, within_s=60)
                rank.last_heard = 0.0
                assert not rank.is_unresponsive(60)
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: rank.is_unresponsive(0.5), within_s=60)
        finally:
            process.kill()


@pytest.fixture
def workers(ray_session: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers("plain", tmp_path, timeout_s=180)
    yield made
    made.close()


@dataclass
class Layer:
    """As a script defines it: in no module that another process could import."""

    width: int


@pytest.mark.slow
def test_a_config_may_hold_objects_of_the_scripts_own_classes(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> dict[str, Any]:
        return {"width": config["layer"].width, "made": config["kind"](3).width}

    _, events = workers.run(train, layer=Layer(8), kind=Layer)
    assert events[0].metrics == {"width": 8, "made": 3}


@pytest.mark.slow
def test_what_two_ranks_print_at_once_arrives_whole(workers: Workers) -> None:
    lines = 20_000

    def train(config: dict[str, Any]) -> None:
        rank = os.environ["RANK"]
        for number in range(config["lines"]):
            print(f"{rank} {number}")

    workers.begin(train, lines=lines)
    workers.events()
    logs = workers.group.take_logs()
    for rank in (0, 1):
        text = b"".join(each.text for each in logs if each.rank == rank).decode()
        own = [
            line for line in text.splitlines() if line.startswith(f"{rank} ")
        ]  # torch may warn of something
        assert own == [f"{rank} {number}" for number in range(lines)]
    assert workers.group.end_trial() == []


@pytest.mark.slow
def test_a_rank_that_leaves_by_the_back_door_is_named_though_its_status_is_0(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import horovod_tune

        horovod_tune.report(step=1)
        if os.environ["RANK"] == "1":
            os._exit(0)
        horovod_tune.report(step=2)

    workers.begin(train)
    with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 2 on .* died.*exited with status 0"):
        workers.events()


@pytest.mark.slow
@pytest.mark.parametrize("was_reset", [True, False])
def test_a_rank_that_dies_between_two_trials_is_named_at_once(workers: Workers, was_reset: bool) -> None:
    def train(config: dict[str, Any]) -> None:
        Path(f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))

    directory = workers.begin(train)
    workers.events()
    pid = int((directory / "pid_1").read_text())
    if was_reset:
        assert workers.group.end_trial() == []
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    if was_reset:
        workers.begin(train)
        with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 2 on .* died.*ended by SIGKILL"):
            workers.events()
    else:
        (problem,) = [each for each in workers.group.end_trial() if each.startswith("rank 1: process")]
        assert "SIGKILL" in problem


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
        info = workers.group.world.members[0].info
        assert info is not None
        os.kill(info.pid, signal.SIGKILL)
    else:
        (parent,) = [each for each in processes if each.pid in {other.ppid() for other in processes}]
        parent.kill()
    see_them_gone(processes)
    with pytest.raises(TrainingFailed, match=r"rank [01] of 2 on .* died"):
        workers.group.next_event()


STOPPED_RESPONDING = r"the host actor of .* stopped responding: no heartbeat for 8 s \(timeout_s\)"
SUSPENDED = r"(?s)the ranks of .* did not start:.*process PID was suspended for 8 s \(timeout_s\)"


@pytest.mark.slow
@pytest.mark.parametrize(("which", "said"), [("actor", STOPPED_RESPONDING), ("rank", SUSPENDED)])
def test_a_process_that_is_suspended_while_ranks_start_fails_the_start_after_timeout_s(
    ray_session: Any, tmp_path: Path, which: str, said: str
) -> None:
    made = Workers("plain", tmp_path, timeout_s=8)
    (plan,) = made.launcher._plans([WorkerInfo("", "", "", 0, 0.0)])
    # Its two ranks wait for a third one, as for another host of a slice.
    three = replace(plan, of_each=tuple({**each, "LOCAL_WORLD_SIZE": "3"} for each in plan.of_each))
    made.launcher._plans = lambda _: [three]

    def suspend() -> None:
        eventually(lambda: len(tpu_processes()) == 3, within_s=60)  # with their parent
        above = {each.pid: each.ppid() for each in tpu_processes()}
        (parent,) = (pid for pid in above if above[pid] not in above)
        pid = above[parent] if which == "actor" else next(iter(above.keys() - {parent}))
        os.kill(pid, signal.SIGSTOP)
        suspended.append((pid, time.monotonic()))

    suspended: list[tuple[int, float]] = []
    suspending = threading.Thread(target=suspend)
    suspending.start()
    try:
        with pytest.raises(StartFailed) as caught:
            made.begin(wait_for_ever)
        assert time.monotonic() - suspended[0][1] < 4 * 8
    finally:
        suspending.join()
        processes = tpu_processes()
        made.close()
    assert re.match(said.replace("PID", str(suspended[0][0])), str(caught.value))
    see_them_gone(processes)


@pytest.mark.slow
def test_a_host_without_torch_xla_is_an_error_at_the_start(ray_session: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("torch_xla") is not None:
        pytest.skip("torch_xla is installed")
    made = Workers("torch_xla", tmp_path)
    try:
        with pytest.raises(StartFailed, match=r"(?s)ranks of .* did not start.*No module named 'torch_xla'"):
            made.begin(wait_for_ever)
    finally:
        made.close()
