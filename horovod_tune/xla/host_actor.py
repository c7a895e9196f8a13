"""The worker of a TPU trial: one actor per host, which reserves the chips in Ray. Ranks are its subprocesses.

Step 2 of 5 of a report's path: `xla/rank.py` sends it here, and `poll()` hands it to the
coordinator (`coordinator/worker_group.py`).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import astuple, replace
from typing import Any

import ray
from ray import cloudpickle

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
from horovod_tune.actors.outbox import Outbox
from horovod_tune.transfer.host_copies import HostCopies, ask_node
from horovod_tune.xla.hang_detector import CHECK_INTERVAL_S, Inactivity, explain
from horovod_tune.xla.supervisor import RankProcess, Supervisor
from horovod_tune.xla.topology import LaunchPlan

METHODS_AT_ONCE = 5
# How often a rank that receives nothing sends a heartbeat; more often if a timeout is short.
HEARTBEAT_S = 5.0
# How long the ranks may take to reset their processes.
RESET_S = 6.0
# How long inactive ranks may take to send their stacks.
STACKS_TIMEOUT_S = 5.0


class HostActor:
    """The ranks of one host; implements `coordinator.backend_protocol.WorkerActor`.

    Only `launch` is called by `XlaLauncher`. The actor never touches the device itself.
    """

    def __init__(self, runtime_path: str, timeout_s: float, stall_timeout_s: float) -> None:
        self._node_id = ray.get_runtime_context().get_node_id()
        self._host = socket.gethostname()
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._outbox = Outbox()
        # Held while the ranks' output moves to the outbox: several threads may do this.
        self._sending = threading.Lock()
        self._inactivity = Inactivity(stall_timeout_s)
        # The objects of `with_parameters`, in an anonymous file in memory that all ranks map. It is freed
        # when neither this process nor a rank uses it.
        self._parameters: tuple[Any, int] | None = None
        # Where all ranks share copies of checkpoints.
        self._copies = str(HostCopies().folder)
        self._supervisor = Supervisor(
            runtime_path,
            heartbeat_s=min(HEARTBEAT_S, timeout_s / 10, stall_timeout_s / 6),
            on_message=self._receive,
            on_loss=self._lose,
        )
        self._ranks = self._supervisor.ranks

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

    def launch(self, plan: LaunchPlan) -> tuple[list[RankInfo], list[tuple[int, float]]]:
        """Start this host's ranks; return their numbers, and every process below this actor.

        A process is given as its pid and `process_start`. While the ranks start, `describe` is the heartbeat.

        Raises:
            RuntimeError: the ranks did not start; the message says why.
        """
        ranks = self._supervisor.launch(plan, self._timeout_s)
        return [rank.info for rank in ranks], self._supervisor.processes()

    def assign(self, assignment: Assignment) -> None:
        infos = {each.rank: each for each in assignment.rank_infos}
        for rank in self._ranks:
            rank.info = infos[rank.info.rank]

    def begin(self, request: TrialRequest) -> None:
        self._outbox = Outbox()
        self._inactivity.restart()
        # Ray's, so that objects keep their classes: a config may hold objects of the script's own classes.
        function, parameters = ray.get(request.function), self._share(request.parameters)
        packed = cloudpickle.dumps(replace(request, function=function, parameters=parameters))
        place = {"node_id": self._node_id, "copies": self._copies}
        for rank in self._ranks:
            rank.drop_output()
            rank.is_running = True
            rank.send("begin", pickled_request=packed, world=list(astuple(rank.info)), **place)
            self._lose(rank)

    def _share(self, reference: Any) -> str | None:
        """Return the path of a file with the bytes of ``reference``, a Ray ObjectRef; None for None.

        The file is written once, also for later trials of the same function.
        """
        if reference is None:
            return None
        if self._parameters is None or self._parameters[0] != reference:
            file = os.memfd_create("horovod_tune_parameters")
            with open(file, "wb", closefd=False) as writer:
                writer.write(ray.get(reference))
            if self._parameters is not None:
                os.close(self._parameters[1])
            self._parameters = reference, file
        return f"/proc/{os.getpid()}/fd/{self._parameters[1]}"

    def poll(self, wait_s: float) -> list[Message]:
        silent = f"no heartbeat for {self._timeout_s:g} s (timeout_s)"
        for rank in self._running():
            if rank.is_unresponsive(self._timeout_s):
                self._fail(rank, FailureKind.UNRESPONSIVE, silent)
        began = time.monotonic()
        messages = self._outbox.take(min(wait_s, self._stall_timeout_s / 3))
        if not messages:
            self._send_output()
        self._inactivity.listened_s += time.monotonic() - began
        if any(rank.is_fetching for rank in self._ranks) or not all(
            isinstance(message, LogChunk) for message in messages
        ):
            self._inactivity.restart()
        elif self._inactivity.listened_s >= min(CHECK_INTERVAL_S, self._stall_timeout_s / 6):
            self._check_hang()
        return messages

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.is_running]

    def _send_output(self) -> None:
        with self._sending:
            for rank in self._ranks:
                for text in rank.new_output():
                    # One write per block, which Ray forwards to the driver.
                    lines = text.decode("utf-8", "replace").splitlines()
                    sys.stdout.write("".join(f"[rank {rank.info.rank}] {line}\n" for line in lines))
                    sys.stdout.flush()
                    self._outbox.put(LogChunk(rank.info.rank, text))

    def _check_hang(self) -> None:
        running = self._running()
        if not running or not self._inactivity.update(*self._supervisor.activity()):
            return
        self._inactivity.restart()
        replies = self._supervisor.ask(running, "dump_stack", "stack", STACKS_TIMEOUT_S)
        stacks = {rank.info.rank: replies.get(rank.info.rank, {}).get("stack") for rank in running}
        found = explain(stacks, self._stall_timeout_s)
        if found is not None and running == self._running():
            number, text = found
            rank = next(each for each in running if each.info.rank == number)
            self._fail(rank, FailureKind.HUNG, f"process {rank.pid}: {text}")

    def acknowledge(self, index: float, checkpoint: CheckpointPlace | None) -> None:
        self._inactivity.restart()
        for rank in self._ranks:
            rank.send("acknowledge", index=index, pickled_checkpoint=cloudpickle.dumps(checkpoint))

    def stop_training(self) -> None:
        for rank in self._ranks:
            rank.send("stop")

    def close_world(self) -> None:
        """Do nothing: a collective on a TPU breaks only when its ranks end; the coordinator ends them."""

    def end_process(self) -> None:
        """Do nothing: exit handlers of the TPU runtime may wait for other hosts."""

    def dump_commit(self) -> None:
        """Do nothing: ranks of a TPU trial cannot commit."""

    def reply_now(self) -> None:
        self._send_output()
        for rank in self._ranks:
            self._outbox.put(LogChunk(rank.info.rank, b""))

    def reset(self, join_s: float) -> list[str]:
        answers = self._supervisor.ask(self._ranks, "reset", "reset_done", join_s + RESET_S, join_s=join_s)
        problems = []
        for rank in self._ranks:
            number, late = rank.info.rank, rank.loss[1] if rank.loss else "did not reset its process in time"
            found = answers[number]["problems"] if number in answers else [late]
            problems += [f"rank {number}: {each}" for each in found]
        return problems

    # The methods below run in the thread that receives a rank's messages.

    def _receive(self, rank: RankProcess, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "report", "index": index, "metrics": metrics, "checkpoint_path": path}:
                if rank.info.rank != 0:
                    self._fail(rank, FailureKind.RAISED, "it sent a report, which only rank 0 may do")
                    return
                self._outbox.put(Report(index, metrics, path))
            case {"kind": "finished"}:
                self._end(rank, Finished(rank.info.rank))
            case {"kind": "failed", "failure_kind": kind, "traceback": text}:
                self._fail(rank, FailureKind(kind), text)
            case {"kind": "fetch", "path": path, "node_id": node_id, "target": target}:
                # In its own thread: a copy from another host may take minutes.
                rank.is_fetching = True
                place = CheckpointPlace(path, node_id=node_id)
                threading.Thread(target=self._fetch, args=(rank, place, target), daemon=True).start()

    def _end(self, rank: RankProcess, message: Message) -> None:
        self._send_output()
        rank.is_running = False
        self._outbox.put(message)

    def _fail(self, rank: RankProcess, kind: FailureKind, text: str) -> None:
        self._end(rank, Failed(rank.info.rank, self._host, kind, text))

    def _lose(self, rank: RankProcess) -> None:
        if rank.is_running and rank.loss:
            self._fail(rank, *rank.loss)

    # This runs in a thread of its own for each fetch.

    def _fetch(self, rank: RankProcess, place: CheckpointPlace, target: str | None) -> None:
        fingerprint, error = None, ""
        try:
            fingerprint = ask_node(place, target)
        except Exception as problem:
            # Catch any error: the rank waits for a reply, and raises the error in the training function.
            error = f"{type(problem).__name__}: {problem}"
        rank.is_fetching = False
        rank.send("fetched", fingerprint=fingerprint, error=error)
