"""The worker of a TPU trial: one actor per host, which holds the chips for Ray; ranks are processes below it.

It never touches the device itself. Its methods are called by the coordinator's worker group and by
`xla_launcher.XlaLauncher` only.

Step 2 of 5 of a report's path: `xla/rank.py` sends it here, and `poll()` hands it to the
coordinator (`coordinator/worker_group.py`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Collection
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
    TrialRequest,
    WorkerInfo,
)
from horovod_tune.rank.outbox import Outbox
from horovod_tune.transfer.host_copies import Copy, HostCopies, hold_copy, readable_here
from horovod_tune.xla.hang_detector import CHECK_INTERVAL_S, Inactivity, explain
from horovod_tune.xla.runtime import LaunchPlan, Ordinals
from horovod_tune.xla.supervisor import RankProcess, Supervisor

METHODS_AT_ONCE = 5
# How often a rank that receives nothing, or a host whose ranks start, sends a heartbeat; more often if a
# timeout is short.
HEARTBEAT_S = 5.0
# How long the ranks may take to reset their processes.
RESET_S = 6.0
# How long inactive ranks may take to send their stacks.
STACKS_TIMEOUT_S = 5.0


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
        # What the ranks have printed. It goes into the outbox when that is empty, or a rank ends.
        self._logs: queue.SimpleQueue[LogChunk] = queue.SimpleQueue()
        # The ranks' answers to `_ask`, by kind and rank.
        self._replies: dict[str, dict[int, Any]] = {"stack": {}, "reset_done": {}}
        self._replied = threading.Condition()
        self._inactivity = Inactivity(stall_timeout_s)
        self._listened_s = 0.0
        # The objects of `with_parameters`, in an anonymous file in memory that all ranks map. It is freed
        # when this process and the ranks have ended.
        self._parameters: tuple[Any, int] | None = None
        # The newest copy of a checkpoint that a rank requested; the ranks hold those that they use.
        self._copies = HostCopies()
        self._newest_copy: Copy | None = None
        self._fetching = threading.Lock()
        self._supervisor = Supervisor(
            runtime_path,
            heartbeat_s=min(HEARTBEAT_S, timeout_s / 10, stall_timeout_s / 6),
            on_message=self._receive,
            on_output=self._record_output,
            on_loss=self._lose,
        )

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

    def wait_until_up(
        self, wait_s: float, plan: LaunchPlan | None = None
    ) -> tuple[list[Ordinals], list[tuple[int, float]]] | None:
        """Return the ordinals of this host's ranks when all have started, and every process below this actor.

        A process is its pid and its start time in s since the epoch. After ``wait_s`` the answer is None, a
        heartbeat. Only the first call has the ``plan``, by which the ranks are started.

        Raises:
            RuntimeError: they did not start; the message has how they ended.
        """
        if plan is not None:
            self._supervisor.launch(plan)
        ranks = self._supervisor.wait_until_up(wait_s)
        if not ranks:
            return None
        places = [(each.ordinal, each.world_size, each.local_ordinal, each.local_size) for each in ranks]
        return [Ordinals(*each) for each in places], self._supervisor.processes()

    def assign(self, assignment: Assignment) -> None:
        self._rank_infos = {each.rank: each for each in assignment.rank_infos}

    def begin(self, request: TrialRequest) -> None:
        """Start a trial's training function on every rank; returns at once."""
        self._outbox, self._logs = Outbox(), queue.SimpleQueue()
        self._restart_inactivity()
        # By cloudpickle, as Ray does: a config may hold objects of the script's own classes.
        function, parameters = ray.get(request.function), self._share(request.parameters)
        packed = cloudpickle.dumps(replace(request, function=function, parameters=parameters))
        self._running = set(self._rank_infos)
        for rank in self._supervisor.ranks:
            if rank.ordinal in self._lost:
                self._fail(rank, *self._lost[rank.ordinal])
                continue
            rank.send("begin", pickled_request=packed, world=list(astuple(self._rank_infos[rank.ordinal])))

    def _share(self, reference: Any) -> str | None:
        """Return a path of this host with the bytes of ``reference``, a Ray ObjectRef; None for None.

        They are fetched and written once: the next trial of the same function finds them there.
        """
        if reference is None:
            return None
        if self._parameters is None or self._parameters[0] != reference:
            content = memoryview(ray.get(reference)).cast("B")
            file = os.memfd_create("horovod_tune_parameters")
            written = 0
            while written < len(content):
                written += os.write(file, content[written:])
            if self._parameters is not None:
                os.close(self._parameters[1])
            self._parameters = reference, file
        return f"/proc/{os.getpid()}/fd/{self._parameters[1]}"

    def poll(self, wait_s: float) -> list[Message]:
        """Return the ranks' messages, after ``wait_s`` at the latest; an empty list is a heartbeat."""
        for rank in self._supervisor.unresponsive(self._timeout_s):
            if rank.ordinal in self._running:
                text = f"no heartbeat for {self._timeout_s:g} s (timeout_s)"
                self._fail(rank, FailureKind.UNRESPONSIVE, text)
        began = time.monotonic()
        messages = self._outbox.take(min(wait_s, self._stall_timeout_s / 3))
        if not messages:
            self._send_output()
        self._listened_s += time.monotonic() - began
        if any(not isinstance(message, LogChunk) for message in messages):
            self._restart_inactivity()
        elif self._running and self._listened_s >= min(CHECK_INTERVAL_S, self._stall_timeout_s / 6):
            self._check_hang()
        return messages

    def _send_output(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._outbox.put(self._logs.get_nowait())

    def _restart_inactivity(self) -> None:
        self._listened_s = 0.0
        self._inactivity.restart()

    def _check_hang(self) -> None:
        if self._fetching.locked():
            # This process is copying a checkpoint, for which a rank waits.
            self._restart_inactivity()
            return
        listened_s, self._listened_s = self._listened_s, 0.0
        if not self._inactivity.update(listened_s, self._supervisor.activity()):
            return
        self._inactivity.restart()
        running = set(self._running)
        stacks = self._ask("dump_stack", "stack", running, STACKS_TIMEOUT_S)
        found = explain({rank: stacks.get(rank) for rank in running}, self._stall_timeout_s)
        if found is None or running != self._running:
            return
        ordinal, text = found
        rank = next(each for each in self._supervisor.ranks if each.ordinal == ordinal)
        self._fail(rank, FailureKind.HUNG, f"process {rank.pid}: {text}")

    def _ask(
        self, request: str, reply: str, ordinals: Collection[int], timeout_s: float, **fields: Any
    ) -> dict[int, Any]:
        """Send ranks a request; return the replies of all but lost ranks, or those that came in time."""
        with self._replied:
            replies = self._replies[reply] = {}
        for rank in self._supervisor.ranks:
            if rank.ordinal in ordinals:
                rank.send(request, **fields)
        with self._replied:
            self._replied.wait_for(lambda: {*replies, *self._lost} >= {*ordinals}, timeout=timeout_s)
            return dict(replies)

    def _reply(self, kind: str, rank: int, answer: Any) -> None:
        with self._replied:
            self._replies[kind][rank] = answer
            self._replied.notify_all()

    def acknowledge(self, index: float, checkpoint: CheckpointPlace | None) -> None:
        self._restart_inactivity()
        for rank in self._supervisor.ranks:
            rank.send("acknowledge", index=index, pickled_checkpoint=cloudpickle.dumps(checkpoint))

    def stop_training(self) -> None:
        for rank in self._supervisor.ranks:
            rank.send("stop")

    def close_world(self) -> None:
        """Do nothing: a collective on a TPU breaks only when its ranks end; the coordinator ends them."""

    def end_process(self) -> None:
        """Run no exit handlers: those of the TPU runtime may wait for other hosts."""

    def dump_commit(self) -> bytes | None:
        """Return None: ranks of a TPU trial cannot commit."""
        return None

    def reply_now(self) -> None:
        self._send_output()
        for rank in list(self._rank_infos):
            self._outbox.put(LogChunk(rank, b""))

    def reset(self, join_s: float) -> list[str]:
        """Reset every rank's process; return what keeps the next trial from using it."""
        ranks = tuple(self._rank_infos)
        answers = self._ask("reset", "reset_done", ranks, join_s + RESET_S, join_s=join_s)
        problems = [f"rank {rank}: {problem}" for rank, found in answers.items() for problem in found]
        for rank in ranks:
            if rank in self._lost:
                problems.append(f"rank {rank}: {self._lost[rank][1]}")
            elif rank not in answers:
                problems.append(f"rank {rank} did not reset its process in time")
        self._newest_copy = None
        self._copies.release_all()
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
            case {"kind": "failed", "failure_kind": kind, "traceback": text}:
                self._fail(rank, FailureKind(kind), text)
            case {"kind": "reset_done", "problems": problems}:
                self._reply("reset_done", rank.ordinal, [str(problem) for problem in problems])
            case {"kind": "stack", "stack": stack}:
                self._reply("stack", rank.ordinal, stack)
            case {"kind": "fetch", "path": path, "node_id": node_id}:
                # In its own thread: a copy from another host may take minutes.
                place = CheckpointPlace(path, None, node_id)
                threading.Thread(target=self._fetch, args=(rank, place), daemon=True).start()

    def _record_output(self, rank: RankProcess, text: bytes) -> None:
        # One write for each block, which Ray forwards to the driver.
        lines = text.decode("utf-8", "replace").splitlines()
        sys.stdout.write("".join(f"[rank {rank.ordinal}] {line}\n" for line in lines))
        sys.stdout.flush()
        self._logs.put(LogChunk(rank.ordinal, text))

    def _end(self, rank: RankProcess, message: Message) -> None:
        self._send_output()
        self._running.discard(rank.ordinal)
        self._outbox.put(message)

    def _fail(self, rank: RankProcess, kind: FailureKind, text: str) -> None:
        self._end(rank, Failed(rank.ordinal, self._host, kind, text))

    def _lose(self, rank: RankProcess, text: str, own: bool) -> None:
        kind = FailureKind.DIED if own else FailureKind.DISCONNECTED
        with self._replied:
            self._lost[rank.ordinal] = (kind, f"process {rank.pid}: {text}")
            self._replied.notify_all()
        if rank.ordinal in self._running:
            self._fail(rank, *self._lost[rank.ordinal])

    # What follows runs in a thread for one fetch.

    def _fetch(self, rank: RankProcess, place: CheckpointPlace) -> None:
        try:
            with self._fetching:  # copied here when the first rank requests it
                local, error = place.path, ""
                if not readable_here(place, self._node_id):
                    copy = hold_copy(self._copies, place)
                    if self._newest_copy is not None:
                        self._newest_copy.release()
                    self._newest_copy, local = copy, copy.path
        except Exception as problem:
            # Any error: the rank waits for an answer, and raises it in the training function.
            local, error = "", f"{type(problem).__name__}: {problem}"
        rank.send("fetched", path=local, error=error)
