"""The worker of a TPU trial: one actor per host, which reserves the chips in Ray and never touches a device.

It has a `TrainingActor` for each of the host's processes, which the host's template forks for every trial.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from horovod_tune.actors.outbox import Outbox
from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.actors.rank_process import RankProcess
from horovod_tune.actors.training_actor import ANSWER_TIMEOUT_S, TrainingActor
from horovod_tune.backends.torch_xla.hang_detector import CHECK_INTERVAL_S, Inactivity, explain
from horovod_tune.backends.torch_xla.topology import LaunchPlan
from horovod_tune.backends.torch_xla.torch_xla_runtime import TorchXla
from horovod_tune.files.process_start import process_start
from horovod_tune.messages import (
    Assignment,
    CheckpointPlace,
    Failed,
    FailureKind,
    LogChunk,
    Message,
    RankInfo,
    TrialRequest,
    WorkerInfo,
)
from horovod_tune.rank.process import Rank

_P = ParamSpec("_P")
_T = TypeVar("_T")
# How long the ranks of a slice may take to start: each waits for all others, so a large slice takes minutes.
LAUNCH_TIMEOUT_S = 900.0
# How long inactive ranks may take to answer.
STACKS_TIMEOUT_S = 5.0
# How the error of a process ends that died from a lack of memory, with libtpu.
_SEGMENTATION_FAULT = "(segmentation fault)"
_USUAL_CAUSE = (
    f"{_SEGMENTATION_FAULT}. On a TPU host the usual cause is a lack of memory: load less in each rank, or "
    "share one model (horovod_tune.with_parameters)."
)


class HostActor:
    """The ranks of one host; implements `coordinator.backend_protocol.WorkerActor`.

    Only `launch` is called by `XlaLauncher`.
    """

    def __init__(
        self,
        make_backend: Callable[[], RankBackend],
        preload: tuple[str, ...],
        timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._host = socket.gethostname()
        self._arguments = make_backend, preload, timeout_s
        self._stall_timeout_s = stall_timeout_s
        # The host's processes, by their place on it; only the first one until their number is known.
        self._actors = [TrainingActor(*self._arguments)]
        # Of the current trial: the processes, and their ranks.
        self._processes: list[RankProcess] = []
        self._rank_infos: list[list[RankInfo]] = []
        self._outbox = Outbox()
        self._inactivity = Inactivity(stall_timeout_s)

    def describe(self) -> WorkerInfo:
        return self._actors[0].describe()

    def launch(self, plan: LaunchPlan) -> tuple[list[RankInfo], list[tuple[int, float]]]:
        """Start the processes of a trial; return their ranks, once all have their devices, and the processes.

        A process is given as its pid and `process_start`. While the ranks start, `describe` is the heartbeat.

        Raises:
            RuntimeError: the ranks did not start; the message has the error of the first process that failed.
        """
        self.end_trial(0.0)  # of a trial that did not begin
        self._processes = [self._actors[0].start_process()]
        inherited = self._actors[0].environment()
        environments = [{**plan.environment, **each} for each in plan.of_each] or [plan.environment]
        if not plan.of_each:
            environments *= _ask(self._processes[0], TorchXla.count_processes, inherited, plan.environment)
        if not environments:
            raise RuntimeError("torch_xla finds no TPU chip on this host")
        size = len(environments)
        self._actors += [TrainingActor(*self._arguments) for _ in range(size - len(self._actors))]
        self._processes += [actor.start_process() for actor in self._actors[1:size]]

        def launch(local_rank: int) -> list[RankInfo]:
            process, planned = self._processes[local_rank], environments[local_rank]
            numbers = _ask(process, TorchXla.launch, inherited, planned, local_rank, size)
            return [RankInfo(*each) for each in numbers]

        with ThreadPoolExecutor(size) as threads:
            calls = [threads.submit(launch, local_rank) for local_rank in range(size)]
            try:
                for call in as_completed(calls):
                    call.result()
            except BaseException:  # the other processes of the slice wait for the one that failed
                for process in self._processes:
                    process.kill("another process of its host did not start")
                raise
        self._rank_infos = [call.result() for call in calls]
        for process, rank_infos in zip(self._processes, self._rank_infos, strict=True):
            process.output.label = f"[rank {rank_infos[0].rank}] ".encode()
        return list(chain.from_iterable(self._rank_infos)), list(_starts_of(self._processes))

    def begin(self, assignment: Assignment, request: TrialRequest) -> None:
        outbox = self._outbox = Outbox()
        self._inactivity.restart()
        assigned = {each.rank: each for each in assignment.rank_infos}
        for actor, rank_infos in zip(self._actors, self._rank_infos, strict=False):
            own = tuple(assigned[each.rank] for each in rank_infos)
            actor.begin_ranks(replace(assignment, rank_infos=own), request, {}, outbox)

    def poll(self, wait_s: float) -> list[Message]:
        began = time.monotonic()
        messages = self._outbox.take(min(wait_s, self._stall_timeout_s / 3))
        if not messages:
            for actor in self._actors:
                actor.send_log()
        self._inactivity.listened_s += time.monotonic() - began
        is_fetching = any(process.unanswered for process in self._processes)
        if is_fetching or not all(isinstance(message, LogChunk) for message in messages):
            self._inactivity.restart()
        elif self._inactivity.listened_s >= min(CHECK_INTERVAL_S, self._stall_timeout_s / 6):
            self._check_hang()
        return [_with_usual_cause(message) for message in messages]

    def _check_hang(self) -> None:
        actors = zip(self._actors, self._processes, strict=False)
        running = {process: actor for actor, process in actors if actor.running}
        operations = sum(each or 0 for each in _ask_all(running, TorchXla.operations))
        if not running or not self._inactivity.update(operations, _cpu_s(running)):
            return
        self._inactivity.restart()
        stacks: dict[int, str | None] = dict.fromkeys(
            rank for actor in running.values() for rank in list(actor.running)
        )
        for found in _ask_all(running, Rank.stacks):
            stacks.update(found or {})
        hung = explain(stacks, self._stall_timeout_s)
        for process, actor in running.items():
            if hung is not None and hung[0] in actor.running:
                text = f"process {process.pid}: {hung[1]}"
                actor.record_ending(Failed(hung[0], self._host, FailureKind.HUNG, text))

    def acknowledge(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        self._inactivity.restart()
        for actor in self._actors:
            actor.acknowledge(run, index, checkpoint)

    def stop_training(self) -> None:
        for actor in self._actors:
            actor.stop_training()

    def close_world(self) -> None:
        """Do nothing: a collective on a TPU breaks only when its ranks end; the coordinator ends them."""

    def end_trial(self, timeout_s: float) -> tuple[list[LogChunk], str]:
        end_s = time.monotonic() + timeout_s
        ends = [actor.end_trial(max(0.0, end_s - time.monotonic())) for actor in self._actors]
        chunks = chain.from_iterable(each for each, _ in ends)
        return list(chunks), "\n".join(warning for _, warning in ends if warning)

    def end_process(self, timeout_s: float) -> None:
        self.stop_training()
        end_s = time.monotonic() + timeout_s
        for actor in self._actors:
            actor.end_process(max(0.0, end_s - time.monotonic()))

    def dump_commit(self) -> None:
        """Do nothing: ranks of a TPU trial cannot commit."""

    def reply_now(self) -> None:
        with ThreadPoolExecutor(len(self._actors)) as threads:
            list(threads.map(TrainingActor.reply_now, self._actors))


def _ask(
    process: RankProcess, request: Callable[Concatenate[Any, _P], _T], *arguments: _P.args, **named: _P.kwargs
) -> _T:
    """Ask a process that starts; the launcher raises before this call takes too long."""
    try:
        return process.ask(request, LAUNCH_TIMEOUT_S + ANSWER_TIMEOUT_S, *arguments, **named)
    except RuntimeError as error:
        text = process.exit_text() if process.has_ended.is_set() else f"process {process.pid}:\n{error}"
        raise RuntimeError(text) from None


def _ask_all(processes: Collection[RankProcess], request: Callable[[Any], _T]) -> list[_T | None]:
    """Return every process's reply; None for one that did not reply in time, or has ended."""

    def ask(process: RankProcess) -> _T | None:
        with contextlib.suppress(RuntimeError, TimeoutError):
            return process.ask(request, STACKS_TIMEOUT_S)
        return None

    with ThreadPoolExecutor(max(1, len(processes))) as threads:
        return list(threads.map(ask, processes))


def _starts_of(processes: Iterable[RankProcess]) -> Iterable[tuple[int, float]]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process.pid, process_start(process.pid)


def _cpu_s(processes: Iterable[RankProcess]) -> float:
    """Return the CPU time of the processes and those below them so far, as `Inactivity.update` takes it."""
    cpu_s = 0.0
    for each in processes:
        # A process that ends meanwhile makes the sum smaller, which counts as activity.
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(each.pid)
            for one in (process, *process.children(recursive=True)):
                cpu_s += sum(one.cpu_times()[:4])  # user and system, its own and of ended children
    return cpu_s


def _with_usual_cause(message: Message) -> Message:
    if isinstance(message, Failed) and message.kind is FailureKind.DIED:
        text = message.traceback.replace(_SEGMENTATION_FAULT, _USUAL_CAUSE, 1)
        return replace(message, traceback=text)
    return message
