"""What plain processes show of the ranks of a host: what reaches them, how they end, and that none outlives
the process above it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
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
import ray
from processes import eventually, rank_processes, see_them_gone, template_processes
from worker_kinds import Workers

from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import WorkerInfo

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray has a copy of its own


@pytest.fixture
def workers(ray_session: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers("plain", tmp_path, timeout_s=180)
    yield made
    made.close()


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
    assert workers.group.end_trial()


@pytest.mark.slow
def test_a_rank_that_dies_before_its_function_starts_is_named(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = workers.group.world.form

    def form_and_kill() -> None:
        form()
        (pid, _) = [each.pid for each in workers.launcher.processes_below()][::-1]
        process = psutil.Process(pid)
        process.kill()
        see_them_gone([process])

    monkeypatch.setattr(workers.group.world, "form", form_and_kill)
    workers.begin(wait_for_ever)
    with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 2 on .* died.*ended by SIGKILL"):
        workers.events()


def wait_for_ever(config: dict[str, Any]) -> None:
    import threading

    import horovod_tune

    horovod_tune.report(there=1)
    threading.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the host's actor", "the host's template"])
def test_what_is_below_a_killed_process_dies_with_it(workers: Workers, killed: str) -> None:
    workers.begin(wait_for_ever)
    assert workers.group.next_event()
    ranks = [psutil.Process(each.pid) for each in workers.launcher.processes_below()]
    (template,) = {each.parent() for each in ranks}
    assert len(ranks) == workers.size and template is not None
    if killed == "the host's actor":
        info = workers.group.state.members[0].info
        assert info is not None
        os.kill(info.pid, signal.SIGKILL)
    else:
        template.kill()
    see_them_gone([*ranks, template])
    with pytest.raises(TrainingFailed, match=r"rank [01] of 2 on .* died"):
        workers.group.next_event()


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_for_longer_than_timeout_s_is_not_lost(
    ray_session: Any, tmp_path: Path
) -> None:
    def train(config: dict[str, Any]) -> None:
        import ctypes

        import horovod_tune

        ctypes.PyDLL(None).sleep(9)  # as a compilation
        horovod_tune.report(done=1)

    made = Workers("plain", tmp_path, timeout_s=6)
    try:
        _, events = made.run(train)
        assert [each.index for each in events[:-1]] == [1]
    finally:
        made.close()


def with_plan(workers: Workers, *, of_each: bool = True, **environment: str) -> Workers:
    """Add variables to the plan of the only host; without ``of_each``, processes are not planned."""
    (plan,) = workers.launcher._plans([WorkerInfo("", "", "", 0, 0.0)])
    plan = replace(plan, environment={**plan.environment, **environment})
    plan = replace(plan, of_each=tuple({**each, **environment} for each in plan.of_each if of_each))
    workers.launcher._plans = lambda _: [plan]
    return workers


STOPPED_RESPONDING = r"the host actor of .* stopped responding: no heartbeat for 8 s \(timeout_s\)"
SUSPENDED = (
    r"(?s)the ranks of .* did not start:.*"
    r"process PID: no heartbeat for 8 s \(timeout_s\): a signal has stopped it"
)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "said"), [("actor", STOPPED_RESPONDING), ("rank", SUSPENDED)])
def test_a_process_that_is_suspended_while_ranks_start_fails_the_start_after_timeout_s(
    ray_session: Any, tmp_path: Path, which: str, said: str
) -> None:
    # As for another host of a slice.
    made = with_plan(Workers("plain", tmp_path, timeout_s=8), WAITS_FOR_OTHERS="1")

    def suspend() -> None:
        def find_rank() -> Any:
            # Not those of an earlier test, which may still end.
            return made.group.state.members and len(rank_processes()) == 2 and rank_processes()[0]

        rank = eventually(find_rank, within_s=60)
        info = made.group.state.members[0].info
        assert info is not None
        pid = info.pid if which == "actor" else rank.pid
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
        processes = [*template_processes(), *rank_processes()]
        made.close()
    assert re.match(said.replace("PID", str(suspended[0][0])), str(caught.value))
    see_them_gone(processes)


@pytest.mark.slow
def test_a_process_without_its_chip_fails_the_start_with_its_own_error(workers: Workers) -> None:
    with_plan(workers, WAITS_FOR_OTHERS="1", FAILS_AT="1")
    for _ in range(2):  # the actors are as before
        with pytest.raises(StartFailed) as caught:
            workers.begin(wait_for_ever)
        said = r"(?s)the ranks of .* did not start:\nprocess \d+:\nTraceback .*OSError: the chip is in use\s*"
        assert re.fullmatch(said, str(caught.value))
        eventually(lambda: not rank_processes(), why=rank_processes)


@pytest.mark.slow
def test_a_process_that_dies_while_it_starts_fails_the_start_with_its_end(workers: Workers) -> None:
    with_plan(workers, WAITS_FOR_OTHERS="1", DIES_AT="1")
    with pytest.raises(StartFailed) as caught:
        workers.begin(wait_for_ever)
    said = r"(?s)the ranks of .* did not start:\nprocess \d+: it was ended by SIGSEGV.*Fatal Python error"
    assert re.match(said, str(caught.value))


@pytest.mark.slow
def test_a_host_without_chips_fails_the_start(workers: Workers) -> None:
    with_plan(workers, of_each=False, PROCESSES="0")
    with pytest.raises(StartFailed, match=r"(?s)the ranks of .* did not start:\ntorch_xla finds no TPU chip"):
        workers.begin(wait_for_ever)


def write_facts(config: dict[str, Any]) -> None:
    import horovod_tune
    from horovod_tune.session import session

    live = session.current()
    assert live is not None
    is_main = threading.current_thread() is threading.main_thread()
    facts = [os.getpid(), live.rank_info.local_rank, is_main, horovod_tune.get_world().size]
    Path(f"rank_{live.rank_info.rank}.json").write_text(json.dumps(facts))
    for step in range(2):
        horovod_tune.report(step=step, rank=live.rank_info.rank)


@pytest.mark.slow
def test_two_processes_with_two_ranks_each_as_on_a_tpu_v3(workers: Workers) -> None:
    """Their number is the runtime's, since no process is planned."""
    with_plan(workers, of_each=False, PROCESSES="2", RANKS_OF_A_PROCESS="2", WORLD_SIZE="4")
    pids = []
    for _ in range(2):
        directory, events = workers.run(write_facts)
        assert [each.metrics for each in events[:-1]] == [{"step": 0, "rank": 0}, {"step": 1, "rank": 0}]
        facts = [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in range(4)]
        assert [each[1:] for each in facts] == [[0, True, 4], [1, False, 4], [2, True, 4], [3, False, 4]]
        assert facts[0][0] == facts[1][0] != facts[2][0] == facts[3][0]
        pids += [each[0] for each in facts[::2]]
    assert len(set(pids)) == 4 and not any(map(psutil.pid_exists, pids))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "dies", "is stopped"])
def test_one_of_two_ranks_in_a_process_ends_the_trial(workers: Workers, how: str) -> None:
    def train(config: dict[str, Any]) -> None:
        import horovod_tune

        horovod_tune.report(step=1)
        if horovod_tune.get_world().rank == 1:
            if config["how"] == "raises":
                raise ValueError("bad batch")
            if config["how"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        horovod_tune.report(step=2)
        horovod_tune.report(step=3)

    with_plan(workers, of_each=False, PROCESSES="1", RANKS_OF_A_PROCESS="2", WORLD_SIZE="2")
    workers.begin(train, how=how)
    if how == "is stopped":
        assert workers.group.next_event() and workers.group.next_event()
        assert workers.group.end_trial()
        return
    said = {"raises": r"rank 1 of 2 .*bad batch", "dies": r"rank 0 of 2 on .* died.*SIGKILL"}[how]
    with pytest.raises(TrainingFailed, match=f"(?s){said}"):
        workers.events()


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
