"""The training actor: holds one rank's resources in Ray, starts its process for each trial, and watches it.

It imports neither torch nor Horovod, and replies to the coordinator whatever its rank does. Its rank's
process lives as long as the training function that it runs.

Step 2 of 5 of a report's path: a rank on the coordinator's host sends it there itself, through its socket;
otherwise this actor hands it on in the reply to the next `poll` (`coordinator/worker_group.py`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from horovod_tune.actors.host_template import HostTemplate
from horovod_tune.actors.outbox import Outbox
from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.actors.rank_process import RankProcess, Supervisor
from horovod_tune.actors.ranks import interfaces, own_gpu
from horovod_tune.channel.report_channel import ChannelToken
from horovod_tune.errors import StartFailed
from horovod_tune.files.process_start import process_start
from horovod_tune.messages import (
    Assignment,
    AwaitedRanks,
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    ImportsSeen,
    LogChunk,
    LongWait,
    Message,
    NeedsWorld,
    RankBegin,
    RankRejoin,
    RayAddress,
    Report,
    TrialRequest,
    WorkerInfo,
)
from horovod_tune.rank.process import Rank
from horovod_tune.rank.template import TEMPLATE_VARIABLE
from horovod_tune.ray_compat import queries
from horovod_tune.ray_compat.patches.actors import LIGHTNING_VARIABLE
from horovod_tune.transfer.host_copies import HostCopies

# `poll` waits in one thread while others run the methods below.
METHODS_AT_ONCE = 8
# How long a rank may take to send its function's stack; one that holds the GIL sends none.
STACK_TIMEOUT_S = 1.0
# How long a rank may take to answer what the coordinator asks, besides the stack.
ANSWER_TIMEOUT_S = 60.0
SUSPENDED_CHECK_S = 0.2
# How long a killed process may take to end.
KILL_TIMEOUT_S = 5.0


class TrainingActor:
    """One rank after another; implements `coordinator.backend_protocol.WorkerActor`.

    With torch_xla, `HostActor` has one of these for each process of its host, which may have two ranks.
    """

    def __init__(
        self, make_backend: Callable[[], RankBackend], preload: tuple[str, ...], timeout_s: float
    ) -> None:
        self._node_id = ray.get_runtime_context().get_node_id()
        self._host = socket.gethostname()
        self._make_backend, self._preload, self._timeout_s = make_backend, preload, timeout_s
        self._outbox = Outbox()
        self._supervisor: Supervisor | None = None
        self._preparing = threading.Lock()
        # The process of the current trial; None before it starts, and once it has ended.
        self._rank: RankProcess | None = None
        # That of the next trial, once the function has ended.
        self._spare: RankProcess | None = None
        # The ranks whose training function runs: from its start until its end is known.
        self.running: set[int] = set()
        # The process's rank, or the first of two.
        self._number = 0
        # Held while output moves to the outbox, so that it stays in order.
        self._sending = threading.Lock()
        # Where all ranks of this host share copies of checkpoints.
        self._copies = str(HostCopies().folder)

    def describe(self) -> WorkerInfo:
        self._prepare()
        if self._rank is None:
            self._fork_ahead()
        return WorkerInfo(
            node_id=self._node_id,
            node_ip=ray.util.get_node_ip_address(),
            host=self._host,
            pid=os.getpid(),
            process_started=process_start(os.getpid()),
            gpu_ids=tuple(map(str, ray.get_gpu_ids())),
            tpu_ids=tuple(ray.get_runtime_context().get_accelerator_ids().get("TPU", ())),
            interfaces=interfaces(),
        )

    def _prepare(self) -> Supervisor:
        """Connect to the host's template, again if the last one was killed."""
        with self._preparing:
            if self._supervisor is None or self._supervisor.is_lost:
                job = ray.get_runtime_context().get_job_id()
                folder = queries.private_directory()
                self._template = HostTemplate(folder, self._make_backend, self._preload, job)
                self._supervisor = Supervisor(self._template, self._timeout_s, self._record_end)
            return self._supervisor

    def start_process(self, token: ChannelToken | None = None) -> RankProcess:
        """Return the process of the next trial; raises StartFailed as `HostTemplate`."""
        spare, self._spare = self._spare, None
        if spare is None or spare.has_ended.is_set():
            spare = self._fork()
        spare.hand_over_channel(token)
        self.running = set()
        self._rank = spare
        return spare

    def _fork(self) -> RankProcess:
        rank = RankProcess(self._receive)
        self._prepare().start(rank)
        return rank

    def _fork_ahead(self) -> None:
        """Fork the process of the next trial while Tune handles the end of this one, which takes as long."""
        if self._spare is None:
            with contextlib.suppress(StartFailed):  # `start_process` tries again
                self._spare = self._fork()

    def ask_backend(self, token: ChannelToken | None, request: Callable[..., Any], *arguments: Any) -> Any:
        """Start the rank's process unless it runs, and `ask` it for one of its backend's `answers`."""
        rank = self._rank or self.start_process(token)
        return rank.ask(request, ANSWER_TIMEOUT_S, *arguments)

    def begin(self, assignment: Assignment, request: TrialRequest) -> None:
        self.begin_ranks(assignment, request, self.environment(), Outbox())

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a rank, besides those of its `Assignment`."""
        return {**os.environ, **LIGHTNING_VARIABLE, TEMPLATE_VARIABLE: self._template.token}

    def begin_ranks(
        self, assignment: Assignment, request: TrialRequest, environment: dict[str, str], outbox: Outbox
    ) -> None:
        """Do what `begin` does; ``environment`` is that of `RankBegin`, and messages go to ``outbox``."""
        self._outbox = outbox
        ranks = [each.rank for each in assignment.rank_infos]
        self._number = ranks[0]
        gpu = own_gpu(assignment, ray.get_gpu_ids())
        rank = self._rank or self.start_process(assignment.channel_token)
        function, parameters = ray.get(request.function), self._share(request.parameters)
        context = ray.get_runtime_context()
        begin = RankBegin(
            request=replace(request, function=function, parameters=parameters),
            assignment=replace(assignment, channel_token=None),
            environment=environment,
            directory=os.getcwd(),
            node_id=self._node_id,
            host=self._host,
            copies=self._copies,
            gpu=gpu,
            ray=RayAddress(
                context.gcs_address,
                context.namespace,
                dict(context.runtime_env),
                tuple(ray.get_gpu_ids()),
            ),
        )
        self.running = set(ranks)
        rank.send("begin", pickled=pickle.dumps(begin))
        if rank.has_ended.is_set():
            self._record_end(rank)

    def _share(self, reference: Any) -> str | None:
        """Return the path of a file with the bytes of ``reference``, a Ray ObjectRef; None for None."""
        if reference is None:
            return None

        def write(file: int) -> None:
            with open(file, "wb", closefd=False) as writer:
                writer.write(ray.get(reference))

        return self._template.share(reference.hex(), write)

    def poll(self, wait_s: float) -> list[Message]:
        messages = self._outbox.take(wait_s)
        # The reply is the heartbeat of a rank that could run.
        while not messages and (rank := self._rank) is not None and rank.is_suspended():
            messages = self._outbox.take(SUSPENDED_CHECK_S)
        if not messages:
            self.send_log()
        rank = self._rank
        if rank is not None and (awaited := rank.output.awaited_ranks()):
            rank.send("stalled", names=awaited)
        return messages

    def send_log(self) -> None:
        """Send what the process has printed, with the next reply to a poll."""
        rank = self._rank
        with self._sending:
            if rank is not None and (text := rank.output.take()):
                self._outbox.put(LogChunk(self._number, text))

    def acknowledge(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        if self._rank is not None:
            place = pickle.dumps(checkpoint)
            self._rank.send("acknowledge", run=run, index=index, pickled_checkpoint=place)

    def stop_training(self) -> None:
        if self._rank is not None:
            self._rank.send("stop")

    def close_world(self) -> None:
        if self._rank is not None:
            self._rank.send("close_world")

    def end_trial(self, timeout_s: float) -> tuple[list[LogChunk], str]:
        """Wait until the rank's process has ended, as Python does; kill it after ``timeout_s``.

        Returns what it has printed at the end, and what to warn of, or an empty text.
        """
        rank, warning = self._rank, ""
        if rank is None:
            return [], ""
        if not rank.has_ended.wait(timeout_s):
            warning = (
                f"rank {self._number}'s process ({rank.pid}) still ran {timeout_s:g} s after its training "
                "function had ended, and was killed"
            )
            rank.kill()
            rank.has_ended.wait(KILL_TIMEOUT_S)
        self._rank = None
        return [LogChunk(self._number, rank.output.take())], warning

    def end_process(self, timeout_s: float) -> None:
        """Break the rank's world, and give its process ``timeout_s`` to end, before this actor is killed."""
        if (rank := self._rank) is not None:
            rank.send("stop")
            rank.send("close_world")
            rank.has_ended.wait(timeout_s)

    def break_world(self, number: int) -> None:
        if self._rank is not None:
            self._rank.send("break_world", number=number)

    def rejoin(self, assignment: Assignment, number: int, reports: int, resources: bytes) -> None:
        assert self._rank is not None, "only a rank in a trial waits for a world"
        (rank_info,) = assignment.rank_infos
        self._number = rank_info.rank
        self.running = {rank_info.rank}
        self._rank.output.forget_stalls()
        rejoin = RankRejoin(replace(assignment, channel_token=None), number, reports, resources)
        self._rank.send("rejoin", pickled=pickle.dumps(rejoin))

    def offer_change(self, number: int) -> None:
        if self._rank is not None:
            self._rank.send("offer_change", number=number)

    def dump_commit(self) -> bytes | None:
        return self._rank.ask(Rank.dump_commit, ANSWER_TIMEOUT_S) if self._rank is not None else None

    def can_restore(self) -> bool:
        return self._rank is not None and self._rank.ask(Rank.can_restore, ANSWER_TIMEOUT_S)

    def reply_now(self) -> None:
        rank, stack = self._rank, ""
        if rank is not None and not rank.has_ended.is_set():
            if rank.is_suspended():
                return  # as if this actor were
            with contextlib.suppress(TimeoutError, RuntimeError):  # it holds the GIL, or has ended
                stack = rank.ask(Rank.stacks, STACK_TIMEOUT_S).get(self._number, "")
        text = rank.output.take() if rank is not None else b""
        self._outbox.put(LogChunk(self._number, text, stack))

    # What follows runs in the supervisor's thread.

    def _receive(self, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "report" | "pickled_report"} if self._number != 0:
                if (process := self._rank) is not None:
                    process.kill("it sent a report, which only rank 0 may do")
            case {"kind": "report", "index": index, "metrics": metrics, "checkpoint_path": path}:
                self._outbox.put(Report(index, metrics, path))
            case {"kind": "pickled_report", "index": index, "pickled": metrics, "checkpoint_path": path}:
                self._outbox.put(Report(index, metrics, path))
            case {"kind": "finished", "rank": rank, "has_returned": has_returned}:
                self.record_ending(Finished(rank, bool(has_returned)))
            case {"kind": "failed", "rank": rank, "failure_kind": kind, "traceback": text}:
                self.record_ending(Failed(rank, self._host, FailureKind(kind), text))
            case {"kind": "needs_world", "error": error, "stalled": stalled}:
                self.send_log()
                self._outbox.put(NeedsWorld(self._number, error, stalled))
            case {"kind": "awaited", "names": names}:
                self._outbox.put(AwaitedRanks(names))
            case {"kind": "imports", "seconds": seconds}:
                self._outbox.put(ImportsSeen(seconds))
            case {"kind": "long_wait", "rank": rank, "report": report}:
                self._outbox.put(LongWait(rank, report))

    def record_ending(self, message: Finished | Failed) -> None:
        """Report that a training function has ended, unless that was done, or another process runs it."""
        if message.rank in self.running:
            self.running.discard(message.rank)
            self.send_log()
            self._outbox.put(message)
            if isinstance(message, Finished) and not self.running:
                self._fork_ahead()

    def _record_end(self, rank: RankProcess) -> None:
        """Report ranks whose process has ended without having said how their functions ended."""
        if rank is self._rank and self.running:
            self.send_log()
            self._rank = None
            kind = FailureKind.UNRESPONSIVE if rank.was_suspended else FailureKind.DIED
            for number in sorted(self.running):
                self.record_ending(Failed(number, self._host, kind, rank.exit_text()))
