"""Simulates 8 ranks per host against the real coordinator, without torch, Horovod or 512 processes.

The coordinator, its worker group and the sockets are real. The training actors are stand-ins: Ray's part of
a start is left out, and each answers its poll when the wait is over. Rank 0 reports, waits until it may
continue, and reports again, in a process of its own; another process reads what is sent to the other ranks of
this host. Ranks on other hosts are reached by calls of their actors. With ``ray`` each is a call of a real
Ray actor; with ``fixed`` and ``elastic`` (a trial that may change its size) calls are only counted.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import json
import pickle
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from benchmarks.scale_rendezvous import RANKS_PER_HOST
from horovod_tune.actors import ranks
from horovod_tune.backends.horovod.horovod_backend import horovod_environment
from horovod_tune.channel.report_channel import CoordinatorChannel, Listener, RankChannel, hand_over
from horovod_tune.coordinator import slots, workers
from horovod_tune.coordinator import world as world_module
from horovod_tune.coordinator.coordinator import Coordinator
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.messages import Assignment, Report, TrialRequest, WorkerInfo
from horovod_tune.ray_compat import queries

METRICS = {"loss": 0.25, "accuracy": 0.5, "epoch": 3, "lr": 0.1}


class Answer:
    """The answer to a call of a stand-in."""

    def __init__(self) -> None:
        self.value: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.value


class Later:
    """Answers polls when their time is over, in one thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Answer]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, wait_s: float, answer: Answer) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + wait_s, next(self._numbers), answer))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                left_s = self._due[0][0] - time.monotonic() if self._due else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                _, _, answer = heapq.heappop(self._due)
            answer.value.set_result([])


class StandIn:
    """A training actor as the worker group calls it."""

    def __init__(self, facts: WorkerInfo, later: Later, calls: collections.Counter[str], sink: Any) -> None:
        self._facts, self._later, self._calls, self._sink = facts, later, calls, sink

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Answer:
            self._calls[name] += 1
            answer = Answer()
            if name == "acknowledge" and self._sink is not None:
                self._sink.acknowledge.remote(*arguments)
            if name == "poll":
                self._later.add(arguments[0], answer)
            else:
                answer.value.set_result({"describe": self._facts}.get(name))
            return answer

        return type("Method", (), {"remote": staticmethod(remote)})


class StandInLauncher:
    """Gives stand-ins their ranks as `ActorLauncher` does, and starts the programs that simulate them."""

    def __init__(self, size: int, *, sink: Any, stack: contextlib.ExitStack) -> None:
        later = Later()
        self.calls: collections.Counter[str] = collections.Counter()
        self._actors = []
        for rank in range(size):
            host = rank // RANKS_PER_HOST
            facts = WorkerInfo(f"node{host}", f"10.0.0.{host}", f"host{host}", 1000 + rank, 0.0)
            self._actors.append(StandIn(facts, later, self.calls, sink))
        self._stack = stack
        self.players: list[subprocess.Popen[bytes]] = []

    def create(self) -> Sequence[Any]:
        return self._actors

    def assign(self, workers: Sequence[Any], facts: Sequence[WorkerInfo]) -> list[Assignment]:
        rank_infos = ranks.assign_ranks([each.node_id for each in facts], first_node="node0")
        self._listener = Listener()
        assignments = []
        for number, (fact, world) in enumerate(zip(facts, rank_infos, strict=True)):
            environment = horovod_environment(
                world,
                host_key=fact.node_id,
                rendezvous="10.0.0.0:10000/secret",
                interface="eth0",
                gloo_timeout_s=60,
                stall_timeout_s=60,
            )
            token = self._listener.create_token(number) if fact.node_id == "node0" else None
            assignments.append(Assignment((world,), environment, channel_token=token))
        tokens = [each.channel_token for each in assignments if each.channel_token is not None]
        self.players = [
            self._stack.enter_context(_player("first", tokens[:1])),
            self._stack.enter_context(_player("others", tokens[1:])),
        ]
        return assignments

    def channels(self) -> dict[int, CoordinatorChannel]:
        for player in self.players:
            assert player.stdout is not None and player.stdout.readline() == b"connected\n"
        return self._listener.accept()

    def processes_below(self) -> list[WorkerInfo]:
        return []

    def close(self) -> None:
        """The programs end with the measurement."""


class NoStorage:
    """A trial without checkpoints or output."""

    def append_log(self, rank: int, text: bytes) -> None: ...

    def publish_logs(self, *, at_end: bool = False) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def _player(part: str, tokens: list[Any]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.scale_reports", part]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    pickle.dump(tokens, process.stdin)
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _connected(token: Any) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        hand_over(token, theirs)
    return ours


def play_first() -> None:
    """Simulate rank 0: report, wait until the report may return, report again."""
    (token,) = pickle.load(sys.stdin.buffer)
    channel = RankChannel(_connected(token))
    allowed, changed = [0.0], threading.Condition()

    def on_ack(run: int, index: float, checkpoint: Any) -> None:
        with changed:
            allowed[0] = max(allowed[0], index)
            changed.notify()

    threading.Thread(target=channel.listen, args=(on_ack,), daemon=True).start()
    print("connected", flush=True)
    for index in itertools.count(1):
        if not channel.report(1, Report(index, METRICS)):
            return
        with changed:
            changed.wait_for(lambda index=index: allowed[0] >= index)  # type: ignore[misc]


def play_others() -> None:
    """Simulate all other ranks of this host: receive and discard."""
    ends = [_connected(token) for token in pickle.load(sys.stdin.buffer)]
    print("connected", flush=True)
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)


class NoRay:
    """The part of Ray's API that the coordinator uses, for stand-ins, which answer immediately."""

    @staticmethod
    def wait(refs: list[Answer], **_: Any) -> tuple[list[Answer], list[Answer]]:
        return refs, []

    @staticmethod
    def get(refs: Any, timeout: float | None = None) -> Any:
        return [ref.value.result(0) for ref in refs] if isinstance(refs, list) else refs.value.result(0)


def measure(size: int, *, way: str, seconds: float) -> dict[str, float]:
    """Return what a trial of ``size`` ranks costs its coordinator: its start, and each report."""
    workers.ray = world_module.ray = NoRay  # type: ignore[attr-defined]
    slots.end_workers = world_module.end_workers = lambda *_, **__: None
    queries.draining_nodes = set
    with contextlib.ExitStack() as stack:
        launcher = StandInLauncher(size, sink=_ray_sink(stack) if way == "ray" else None, stack=stack)
        limits = Limits(60.0, 1, size, 60.0) if way == "elastic" else Limits(60.0)
        group = WorkerGroup(launcher, limits)
        coordinator = Coordinator(group)
        request = TrialRequest("id", "trial", "dir", "dir", "experiment", b"", None)
        group.world.create()
        coordinator.set_trial(request, NoStorage())  # type: ignore[arg-type]
        cpu_s = _cpu_s()
        assert coordinator.next_result() is not None
        start_cpu_s = _cpu_s() - cpu_s
        linked = sum(worker.channel is not None for worker in group.state.members)
        calls_before = launcher.calls.copy()
        cpu_s, began, reports = _cpu_s(), time.monotonic(), 0
        while time.monotonic() - began < seconds:
            assert coordinator.next_result() is not None
            reports += 1
        took_s, used_s = time.monotonic() - began, _cpu_s() - cpu_s
        calls = launcher.calls - calls_before
        return {
            "start_cpu_s": start_cpu_s,
            "connected": linked,
            "reports_per_s": reports / took_s,
            "cpu_ms_per_report": 1000 * used_s / reports,
            "ray_calls_per_report": (calls["acknowledge"]) / reports,
            "polls_per_s": calls["poll"] / took_s,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def _ray_sink(stack: contextlib.ExitStack) -> Any:
    import ray

    class Sink:
        def acknowledge(self, run: int, index: float, checkpoint: Any) -> None: ...

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    stack.callback(ray.shutdown)
    return ray.remote(Sink).remote()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["first"]:
            play_first()
        case ["others"]:
            play_others()
        case [way, size, seconds]:
            print(json.dumps(measure(int(size), way=way, seconds=float(seconds))))
