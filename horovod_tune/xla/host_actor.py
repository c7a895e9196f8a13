"""The worker of a TPU trial: one actor per host, which holds the chips for Ray; ranks are processes below it.

It never touches the device itself. Its methods are called by the coordinator's worker group and by
`xla_launcher.XlaLauncher` only.

Step 2 of 5 of a report's path: `xla/rank.py` sends it here, and `poll()` hands it to the
coordinator (`coordinator/worker_group.py`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import astuple, replace
from typing import Any

import cloudpickle
import ray

from horovod_tune.files.process_start import process_start
from horovod_tune.messages import (
    Assignment,
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    LogChunk,
    Message,
    RankInfo,
    Report,
    Stopped,
    TrialRequest,
    WorkerInfo,
)
from horovod_tune.rank.outbox import Outbox
from horovod_tune.xla.checkpoint_cache import CheckpointCache
from horovod_tune.xla.hang_detector import HangDetector, Replies
from horovod_tune.xla.inactivity import StackDump
from horovod_tune.xla.rank_output import RankOutput
from horovod_tune.xla.runtime import LaunchPlan, Ordinals
from horovod_tune.xla.shared_parameters import SharedParameters
from horovod_tune.xla.supervisor import RankProcess, Supervisor

METHODS_AT_ONCE = 5
# How often an idle rank sends a heartbeat; more often where a timeout is shorter than usual.
HEARTBEAT_S = 5.0
# How long the ranks may take to reset their processes.
RESET_S = 6.0


class HostActor:
    """The ranks of one host; implements `coordinator.backend_protocol.WorkerActor`."""

    def __init__(self, runtime_path: str, timeout_s: float, stall_timeout_s: float) -> None:
        self._node_id = ray.get_runtime_context().get_node_id()
        self._host = socket.gethostname()
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._outbox = Outbox()
        self._rank_infos: dict[int, RankInfo] = {}
        self._running: set[int] = set()
        self._lost: dict[int, tuple[FailureKind, str]] = {}
        self._logs = RankOutput(lambda chunk: self._outbox.put(chunk))
        self._reset_replies: Replies[list[str]] = Replies()
        self._parameters = SharedParameters()
        self._request: TrialRequest | None = None
        self._checkpoints = CheckpointCache(self._node_id)
        self._supervisor = Supervisor(
            runtime_path,
            heartbeat_s=min(HEARTBEAT_S, timeout_s / 10, stall_timeout_s / 6),
            on_message=self._receive,
            on_output=lambda rank, text: self._logs.take(rank.ordinal, text),
            on_loss=self._lose,
        )
        self._hang_detector = HangDetector(self._supervisor, limit_s=stall_timeout_s)

    def describe(self) -> WorkerInfo:
        chips = ray.get_runtime_context().get_accelerator_ids().get("TPU", [])
        return WorkerInfo(
            node_id=self._node_id,
            node_ip=ray.util.get_node_ip_address(),
            host=self._host,
            pid=os.getpid(),
            process_started=process_start(os.getpid()),
            tpu_ids=tuple(str(chip) for chip in chips),
        )

    def launch(self, plan: LaunchPlan) -> None:
        """Start this host's ranks; returns at once."""
        self._supervisor.launch(plan)

    def wait_until_up(self, wait_s: float) -> list[Ordinals] | None:
        """Return the ordinals of this host's ranks when all have started, None after ``wait_s``.

        Raises:
            RuntimeError: they did not start; the message has how they ended.
        """
        ranks = self._supervisor.wait_until_up(wait_s)
        if ranks is None:
            return None
        return [
            Ordinals(each.ordinal, each.world_size, each.local_ordinal, each.local_size) for each in ranks
        ]

    def processes(self) -> list[tuple[int, float]]:
        """Return (pid, start time in s since the epoch) of every process below this actor."""
        return self._supervisor.processes()

    def assign(self, assignment: Assignment) -> None:
        self._rank_infos = {each.rank: each for each in assignment.rank_infos}

    def begin(self, request: TrialRequest) -> None:
        """Start a trial's training function on every rank; returns at once."""
        self._outbox = Outbox()
        self._logs.clear()
        self._hang_detector.restart()
        if request.checkpoint is not None:
            self._checkpoints.add(request.checkpoint)
        self._request = request
        # By cloudpickle, as Ray does: a config may hold objects of the script's own classes.
        packed = cloudpickle.dumps(replace(request, parameters=self._parameters.path_of(request.parameters)))
        self._running = set(self._rank_infos)
        for rank in self._supervisor.ranks:
            if rank.ordinal in self._lost:
                self._fail(rank, *self._lost[rank.ordinal])
                continue
            rank.send("begin", pickled_request=packed, world=list(astuple(self._rank_infos[rank.ordinal])))

    def _send_to_all(self, kind: str, **fields: Any) -> None:
        for rank in self._supervisor.ranks:
            rank.send(kind, **fields)

    def poll(
        self, wait_s: float, proceed: int = 0, checkpoint: CheckpointPlace | None = None
    ) -> list[Message]:
        """Return the ranks' messages, after ``wait_s`` at the latest; an empty list is a heartbeat."""
        if proceed:
            self.proceed(proceed, checkpoint)
        for rank in self._supervisor.unresponsive(self._timeout_s):
            if rank.ordinal in self._running:
                text = f"no heartbeat for {self._timeout_s:g} s (timeout_s)"
                self._fail(rank, FailureKind.UNRESPONSIVE, text)
        began = time.monotonic()
        messages = self._wait_for_messages(min(wait_s, self._stall_timeout_s / 3))
        self._hang_detector.add_time(time.monotonic() - began)
        if any(not isinstance(message, LogChunk) for message in messages):
            self._hang_detector.restart()
        elif self._running and self._hang_detector.is_due:
            self._check_hang()
        return messages

    def _wait_for_messages(self, wait_s: float) -> list[Message]:
        messages = self._outbox.take(wait_s)
        if not messages:
            for rank in list(self._rank_infos):
                self._logs.send(rank)
        return messages

    def _check_hang(self) -> None:
        if self._checkpoints.is_busy:
            # This process is copying a checkpoint, for which a rank waits.
            self._hang_detector.restart()
            return
        running = set(self._running)
        found = self._hang_detector.check(running)
        if found is None or running != self._running:
            return
        ordinal, text = found
        rank = next(each for each in self._supervisor.ranks if each.ordinal == ordinal)
        self._fail(rank, FailureKind.HUNG, f"process {rank.pid}: {text}")

    def proceed(self, index: float, checkpoint: CheckpointPlace | None = None) -> None:
        self._hang_detector.restart()
        if checkpoint is not None:
            self._checkpoints.add(checkpoint)
        place, filesystem = None, None
        if checkpoint is not None:
            place = (checkpoint.path, checkpoint.node_id, checkpoint.report)
            if checkpoint.filesystem is not None:
                filesystem = cloudpickle.dumps(checkpoint.filesystem)
        run = self._request.run if self._request is not None else 0
        self._send_to_all("proceed", run=run, index=index, checkpoint=place, pickled_filesystem=filesystem)

    def stop_training(self) -> None:
        self._send_to_all("stop")

    def close_world(self) -> None:
        """Do nothing: only the end of its processes breaks a collective on a TPU; the group ends them."""

    def end_process(self) -> None:
        """Do nothing: the runtime's own handlers may wait for other hosts."""

    def dump_commit(self) -> bytes | None:
        """Return None: ranks of a TPU trial cannot commit."""
        return None

    def send_logs(self) -> None:
        for rank in list(self._rank_infos):
            self._logs.send(rank)
            self._outbox.put(LogChunk(rank, b""))

    def reset(self, join_s: float) -> list[str]:
        """Reset every rank's process; return what keeps the next trial from using it."""
        ranks = tuple(self._rank_infos)
        self._reset_replies.clear()
        for rank in list(self._lost):
            self._reset_replies.put(rank, [])
        self._send_to_all("reset", join_s=join_s)
        answers = self._reset_replies.wait_for(len(ranks), timeout_s=join_s + RESET_S)
        problems = [f"rank {rank}: {problem}" for rank, found in answers.items() for problem in found]
        for rank in ranks:
            if rank in self._lost:
                problems.append(f"rank {rank}: {self._lost[rank][1]}")
            elif rank not in answers:
                problems.append(f"rank {rank} did not reset its process in time")
        self._checkpoints.forget()
        return problems

    # What follows runs in the supervisor's thread.

    def _receive(self, rank: RankProcess, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "report", "index": index, "metrics": metrics, "checkpoint_path": path}:
                if rank.ordinal != 0:
                    self._fail(rank, FailureKind.RAISED, "it sent a report, which only rank 0 does")
                    return
                self._outbox.put(Report(index, metrics, path))
            case {"kind": "finished"}:
                self._end(rank, Finished(rank.ordinal))
            case {"kind": "stopped"}:
                self._end(rank, Stopped(rank.ordinal))
            case {"kind": "failed", "failure_kind": kind, "traceback": text}:
                self._fail(rank, FailureKind(kind), text)
            case {"kind": "reset_done", "problems": problems}:
                self._reset_replies.put(rank.ordinal, [str(problem) for problem in problems])
            case {"kind": "stack", "stack": stack, "in_report": in_report}:
                self._hang_detector.add_stack(rank.ordinal, StackDump(stack, in_report))
            case {"kind": "fetch", "path": path, "node_id": node_id}:
                # In its own thread: a copy from another host may take minutes.
                threading.Thread(target=self._fetch, args=(rank, path, node_id), daemon=True).start()

    def _end(self, rank: RankProcess, message: Message) -> None:
        self._logs.send(rank.ordinal)
        self._running.discard(rank.ordinal)
        self._outbox.put(message)

    def _fail(self, rank: RankProcess, kind: FailureKind, text: str) -> None:
        self._end(rank, Failed(rank.ordinal, self._host, kind, text))

    def _lose(self, rank: RankProcess, text: str, own: bool) -> None:
        kind = FailureKind.DIED if own else FailureKind.DISCONNECTED
        self._lost[rank.ordinal] = (kind, f"process {rank.pid}: {text}")
        if rank.ordinal in self._running:
            self._fail(rank, *self._lost[rank.ordinal])
        else:
            self._reset_replies.put(rank.ordinal, [])  # a reset need not wait for it

    # What follows runs in a thread for one fetch.

    def _fetch(self, rank: RankProcess, path: str, node_id: str | None) -> None:
        try:
            local, error = self._checkpoints.fetch(path, node_id), ""
        except Exception as problem:
            # Any error: the rank waits for an answer, and raises it in the training function.
            local, error = "", f"{type(problem).__name__}: {problem}"
        rank.send("fetched", path=local, error=error)
