"""Runs in each rank: the training actor, a process with one rank that several trials use in turn.

The training function runs in a thread, so that the actor replies to calls even if two reports are an hour
apart.

Step 2 of 5 of a report's path: `_send()` sends it to the coordinator (`coordinator/worker_group.py`), through
the rank's channel or in the reply to the next `poll`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from horovod_tune.actors.output_reader import OutputReader
from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.actors.ranks import interfaces
from horovod_tune.channel.report_channel import RankChannel
from horovod_tune.files.process_start import process_start
from horovod_tune.messages import (
    Assignment,
    AwaitedRanks,
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
from horovod_tune.rank.allocator import keep_freed_memory
from horovod_tune.rank.exit_handlers import end_process
from horovod_tune.rank.outbox import Outbox
from horovod_tune.rank.training import Training
from horovod_tune.ray_compat import tune_session
from horovod_tune.session.committed_state import CommittedState
from horovod_tune.session.session import Session
from horovod_tune.transfer.host_copies import HostCopies, open_checkpoint

if TYPE_CHECKING:
    from horovod_tune.rank.reset.baseline import Baseline

logger = logging.getLogger(__name__)

# `poll` waits in one thread while the others run `acknowledge`, `stop_training` and `reset`.
METHODS_AT_ONCE = 4
PROBE_TIMEOUT_S = 5.0


class TrainingActor:
    """One rank; implements `coordinator.backend_protocol.WorkerActor`."""

    def __init__(self, make_backend: Callable[[], RankBackend]) -> None:
        keep_freed_memory()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._host = socket.gethostname()
        self._outbox = Outbox()
        self._output = OutputReader()
        self._copies = HostCopies()
        self._backend = make_backend()
        self._training: Training | None = None
        self._rank_info: RankInfo | None = None
        self._gpu: int | None = None
        self._baseline: Baseline | None = None
        self._channel: RankChannel | None = None
        self._run = 0
        self._forming = threading.Lock()
        tune_session.prepare_rank_process()
        with contextlib.suppress(Exception):  # the training thread loads it again, and reports the error
            self._backend.load()

    def describe(self) -> WorkerInfo:
        return WorkerInfo(
            node_id=self._node_id,
            node_ip=ray.util.get_node_ip_address(),
            host=self._host,
            pid=os.getpid(),
            process_started=process_start(os.getpid()),
            gpu_ids=tuple(map(str, ray.get_gpu_ids())),
            interfaces=interfaces(),
            output=tuple(self._output.paths),
        )

    def call_backend(self, method: str, *arguments: Any) -> Any:
        """Call a method of this rank's backend, for `OpenRendezvous`."""
        self._backend.load()
        return getattr(self._backend, method)(*arguments)

    def assign(self, assignment: Assignment) -> None:
        (self._rank_info,) = assignment.rank_infos
        os.environ.update({**assignment.defaults, **os.environ, **assignment.environment})
        if visible := assignment.environment.get("CUDA_VISIBLE_DEVICES"):
            self._gpu = visible.split(",").index(str(ray.get_gpu_ids()[0]))
        self._connect(assignment)

    def _connect(self, assignment: Assignment) -> None:
        """Replace the previous world's channel to the coordinator with the new world's."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if assignment.channel_token is None:
            return
        try:
            self._channel = RankChannel(assignment.channel_token)
        except OSError as error:
            # The coordinator may be in another container, for example.
            logger.warning("reports go through Ray: could not connect to the coordinator directly: %s", error)
            return
        listen = self._channel.listen
        threading.Thread(target=listen, args=(self._release,), name="channel", daemon=True).start()

    def _release(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        if run == self._run:  # otherwise it is late, from the previous trial
            self.acknowledge(index, checkpoint)

    def begin(self, request: TrialRequest) -> None:
        assert self._rank_info is not None, "assign() comes before begin()"
        self._outbox = Outbox()
        self._run = request.run
        self._output.mark()
        fetch = functools.partial(open_checkpoint, node_id=self._node_id, copies=self._copies)
        live = Session(request, self._rank_info, send=self._send, fetch=fetch)
        live.gpu = self._gpu
        live.world_error = self._backend.world_error
        live.committed = CommittedState(self._backend.collectives, self._backend.states, live.stored_commit)

        def prepare() -> None:
            self._backend.load()
            if self._baseline is None:
                from horovod_tune.rank.reset.baseline import Baseline

                self._baseline = Baseline()
            live.before_first_report = self._baseline.environment.check

        self._training = Training(
            live,
            ray.get(request.function),
            host=self._host,
            send=self._send,
            prepare=prepare,
            describe_failure=self._describe_failure,
            enter_world=lambda: self._backend.enter(live.rank_info, f"{request.run}.{live.world_number}"),
            leave_world=self._backend.leave,
        )
        self._training.start()

    def _send(self, message: Message) -> None:
        if isinstance(message, Report):
            channel = self._channel
            if channel is not None and channel.report(self._run, message):
                return
        else:
            # The function has ended or left its world: the coordinator gets its output before this message.
            self._copies.release_all()
            self._send_log()
        self._outbox.put(message)
        if isinstance(message, Finished | Failed):
            # After the message: other ranks fail because of this, and must not be mistaken for the cause.
            self._backend.end(has_returned=isinstance(message, Finished) and message.has_returned)

    def _send_log(self) -> None:
        if self._rank_info is not None and (chunk := self._log_chunk(self._rank_info.rank)).text:
            self._outbox.put(chunk)

    def _log_chunk(self, rank: int, stack: str = "") -> LogChunk:
        text = self._output.take()
        return LogChunk(rank, text, stack, tuple(self._output.offsets))

    def poll(self, wait_s: float) -> list[Message]:
        messages = self._outbox.take(wait_s)
        if not messages:
            self._send_log()
        awaited = self._backend.awaited_ranks(self._output)
        if awaited:
            messages.append(AwaitedRanks(awaited))
        return messages

    def acknowledge(self, index: float, checkpoint: CheckpointPlace | None) -> None:
        if self._training is not None:
            self._training.session.acknowledge(index, checkpoint)

    def stop_training(self) -> None:
        if self._training is not None:
            self._training.session.stop()

    def close_world(self) -> None:
        self._backend.close()

    def end_process(self) -> None:
        self._backend.close()
        end_process()

    def break_world(self, number: int) -> None:
        training = self._training
        if training is None:
            return
        with self._forming:
            if training.session.world_number == number:
                training.session.break_world()
                self._backend.abort()

    def rejoin(self, assignment: Assignment, number: int, reports: int, resources: bytes) -> None:
        assert self._training is not None, "only a rank in a trial waits for a world"
        self._connect(assignment)
        with self._forming:
            (self._rank_info,) = assignment.rank_infos
            assignment.environment.pop("CUDA_VISIBLE_DEVICES", None)  # CUDA reads it only once
            os.environ.update(assignment.environment)
            self._output.forget_stalls()
            live = self._training.session
            live.committed.change_pending = False
            live.join_world(self._rank_info, number=number, reports=reports, resources=resources)

    def offer_change(self, number: int) -> None:
        if self._training is not None and self._training.session.world_number == number:
            self._backend.states.offer_change()
            self._training.session.committed.change_pending = True

    def dump_commit(self) -> bytes | None:
        return self._training.session.committed.dump() if self._training is not None else None

    def can_restore(self) -> bool:
        return self._training is not None and self._training.session.committed.can_restore

    def reply_now(self) -> None:
        assert self._rank_info is not None
        stack = self._training.stack() if self._training is not None else ""
        self._outbox.put(self._log_chunk(self._rank_info.rank, stack))

    def reset(self, join_s: float) -> list[str]:
        assert self._rank_info is not None and self._training is not None
        self._training.thread.join(timeout=join_s)
        if self._training.thread.is_alive():
            return [f"the training function of rank {self._rank_info.rank} still runs"]
        own_package, self._training = self._training.session.own_package, None
        if problems := self._backend.keep(PROBE_TIMEOUT_S):
            return problems
        assert self._baseline is not None
        problems = self._baseline.restore(own_package) + self._backend.release(PROBE_TIMEOUT_S)
        return problems + self._baseline.memory_left()

    def _describe_failure(self, error: BaseException) -> tuple[FailureKind, str]:
        kind, text, awaited = self._backend.describe_failure(error, self._output)
        if awaited:
            self._outbox.put(AwaitedRanks(awaited))
        return kind, text
