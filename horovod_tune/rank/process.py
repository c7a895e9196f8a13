"""One rank of one trial: a process that runs the training function in its main thread, and ends with it.

On TPU v2 and v3, a process has two ranks: the second one's function runs in a thread of its own.

A second thread receives from the training actor that started this process (`actors/rank_process.py`).

Step 2 of 5 of a report's path: `_send_report` sends it to the coordinator, or to the training actor.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import itertools
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from horovod_tune.channel.framing import ACTOR_MESSAGES, Channel
from horovod_tune.channel.report_channel import RankChannel
from horovod_tune.errors import MetricsError, encodable
from horovod_tune.messages import (
    Assignment,
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    LongWait,
    Message,
    NeedsWorld,
    RankBegin,
    RankInfo,
    RankRejoin,
    Report,
)
from horovod_tune.rank import script
from horovod_tune.rank.imports import ImportTimes, is_installed
from horovod_tune.rank.rank_start import RankStart
from horovod_tune.rank.streams import flush_streams
from horovod_tune.rank.training import Training
from horovod_tune.ray_compat import rank_connection
from horovod_tune.session.committed_state import CommittedState
from horovod_tune.session.session import Session
from horovod_tune.transfer.host_copies import HostCopies, open_checkpoint


def run(start: RankStart) -> NoReturn:
    """Run the trial that the training actor sends, and end this process."""
    _redirect_output(start.output)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed(None)  # a fork has its template's random state
    # Not all names: each would be counted once more, which copies a page of the template's memory.
    last_loaded = next(reversed(sys.modules))
    status = 1
    try:
        status = Rank(start).run()
    finally:
        end_process(status, last_loaded)


def end_process(status: int, last_loaded: str) -> NoReturn:
    """End this process as Python does: its threads, `atexit` handlers, the objects that are left.

    Python would then also end each of the thousands of objects of imported libraries, which takes 0.3 s.
    Here, that is done only for the script's own modules: those that came after ``last_loaded``, the last one
    before the trial, and are not installed.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        rank_connection.prepare_exit()
        atexit._run_exitfuncs()
        for name in list(itertools.takewhile(last_loaded.__ne__, reversed(sys.modules))):
            module = sys.modules[name]
            if not is_installed(getattr(module, "__file__", None) or "built-in"):
                vars(module).clear()
        rank_connection.end_script()
        gc.collect()
    except BaseException:  # any, also SystemExit of a handler: as in Python, it is printed
        traceback.print_exc()
    flush_streams()
    os._exit(status)


def _redirect_output(output: int) -> None:
    flush_streams()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class Rank:
    """This process's rank, or on TPU v2 and v3 its two ranks."""

    def __init__(self, start: RankStart) -> None:
        self._backend = start.backend
        self._control = Channel(socket.socket(fileno=start.control), ACTOR_MESSAGES)
        # Closed by `listen`, as soon as no coordinator has the other end.
        self._channel = RankChannel(socket.socket(fileno=start.channel))
        self._begin: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # Of each rank, while its function runs.
        self._trainings: list[Training] = []
        # Set once they are there, or could not be made. Other ranks may have reported before.
        self._has_begun = threading.Event()
        self._forming = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        # What the actor may ask, by name.
        answers = (self.stacks, self.dump_commit, self.can_restore, *start.backend.answers())
        self._answers: dict[str, Callable[..., Any]] = {each.__name__: each for each in answers}

    def run(self) -> int:
        threading.Thread(target=self._listen, name="horovod_tune", daemon=True).start()
        listen = functools.partial(self._channel.listen, self._acknowledge_later)
        threading.Thread(target=listen, name="horovod_tune reports", daemon=True).start()
        begin: RankBegin = pickle.loads(self._begin.get())
        rank_infos = begin.assignment.rank_infos
        try:
            self._prepare(begin)
            self._trainings = [self._make_training(begin, each) for each in rank_infos]
        except Exception:  # any: the trial fails with it
            text = encodable(traceback.format_exc())
            for each in rank_infos:
                self._send(HostCopies(), Failed(each.rank, begin.host, FailureKind.RAISED, text))
            return 1
        finally:
            self._has_begun.set()
        first, *others = self._trainings
        threads = [threading.Thread(target=each.run, name="horovod_tune rank") for each in others]
        for thread in threads:
            thread.start()
        status = first.run()
        for thread in threads:
            thread.join()
        self._trainings = []
        return status

    def _prepare(self, begin: RankBegin) -> None:
        # What imports of the template have set, stays.
        os.environ.update(begin.environment)
        os.chdir(begin.directory)
        rank_connection.set_cluster(begin.ray)
        script.send_to_spawned()
        set_variables(begin.assignment)
        self._run = begin.request.run
        self._imports = ImportTimes()

    def _make_training(self, begin: RankBegin, rank_info: RankInfo) -> Training:
        # Of each rank, since the first to end in a process releases its own.
        copies = HostCopies(Path(begin.copies))
        send = functools.partial(self._send, copies)
        fetch = functools.partial(open_checkpoint, node_id=begin.node_id, copies=copies, ask=self._ask_node)
        request, backend = begin.request, self._backend
        committed = None
        if backend.collectives is not None:
            committed = CommittedState(backend.collectives, backend.states, lambda: live.stored_commit())
        live = Session(
            request,
            rank_info,
            send=send,
            fetch=fetch,
            gpu=begin.gpu,
            device=backend.device if begin.gpu is None else f"cuda:{begin.gpu}",
            committed=committed,
            world_error=backend.world_error,
            describe_failure=self._describe_failure,
            before_first_report=self._send_imports,
        )
        return Training(
            live,
            host=begin.host,
            send=send,
            load=backend.load,
            enter_world=lambda: backend.enter(live.rank_info, f"{request.run}.{live.world_number}"),
            leave_world=backend.leave,
        )

    # What follows runs in the thread of the training function.

    def _send(self, copies: HostCopies, message: Message) -> None:
        if not isinstance(message, Report | LongWait):
            # The function has ended or left its world: the coordinator gets its output before this message.
            copies.release_all()
            flush_streams()
        match message:
            case Report():
                self._send_report(message)
            case Finished(rank=rank, has_returned=has_returned):
                self._control.send("finished", rank=rank, has_returned=int(has_returned))
            case Failed(rank=rank, kind=kind, traceback=text):
                self._control.send("failed", rank=rank, failure_kind=kind.value, traceback=text)
            case LongWait():
                self._control.send("long_wait", **vars(message))
            case NeedsWorld(error=error, stalled=stalled):
                self._control.send("needs_world", error=error, stalled=stalled)
        if isinstance(message, Finished | Failed):
            # After the message: other ranks fail because of this, and must not be mistaken for the cause.
            self._backend.end(has_returned=isinstance(message, Finished) and message.has_returned)

    def _send_report(self, report: Report) -> None:
        if self._channel.report(self._run, report):
            return
        try:
            self._control.send("report", run=self._run, **vars(report))
        except (MetricsError, ValueError, OverflowError, RecursionError):
            # Nested more deeply than msgpack allows, or of a type that only pickle handles.
            pickled = {"pickled": pickle.dumps(report.metrics), "checkpoint_path": report.checkpoint_path}
            self._control.send("pickled_report", run=self._run, index=report.index, **pickled)

    def _send_imports(self) -> None:
        if seconds := self._imports.stop():
            self._control.send("imports", seconds=seconds)

    def _describe_failure(self, error: BaseException) -> tuple[FailureKind, str]:
        stall_report = functools.partial(self._ask, "stall_report")
        kind, text, awaited = self._backend.describe_failure(error, stall_report)
        if awaited:
            self._control.send("awaited", names=awaited)
        return kind, text

    def _ask_node(self, place: CheckpointPlace, target: str | None = None) -> Any:
        """Make the actor call `host_copies.ask_node`: this process has no connection to Ray."""
        return self._ask("fetch", path=place.path, node_id=place.node_id, target=target)

    def _ask(self, kind: str, **fields: Any) -> Any:
        """Send the training actor a request, and return what it replies.

        There is no timeout: the actor limits each request, and this process ends with the actor.
        """
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        self._control.send(kind, id=number, **fields)
        return answer.result()

    # What follows runs in the thread that receives from the coordinator or the training actor.

    def _acknowledge_later(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        self._has_begun.wait()
        self._acknowledge(run, index, checkpoint)

    def _acknowledge(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        for training in self._trainings:
            if run == self._run:  # otherwise it is late, from another trial
                training.session.acknowledge(index, checkpoint)

    def _listen(self) -> None:
        is_open = True
        while is_open:
            messages, is_open = self._control.receive(None)
            for message in messages:
                self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        # Trials with two ranks in a process are not elastic.
        training = self._trainings[0] if self._trainings else None
        match message:
            case {"kind": "begin", "pickled": pickled}:
                self._begin.put(pickled)
                self._has_begun.wait()  # the next messages are for the trainings
            case {"kind": "ask", "id": number, "request": name, "arguments": arguments, "named": named}:
                self._answer(number, name, arguments, named)
            case {"kind": "reply", "id": number, "value": value, "error": error}:
                answer = self._asked.pop(number)
                answer.set_exception(RuntimeError(error)) if error else answer.set_result(value)
            case {"kind": "acknowledge", "run": run, "index": index, "pickled_checkpoint": place}:
                self._acknowledge(run, index, pickle.loads(place))
            case {"kind": "close_world"}:
                self._backend.close()
            case {"kind": "stalled", "names": names}:
                if self._backend.confirms_awaited():
                    self._control.send("awaited", names=names)
            case _ if training is None:
                return  # the function has ended
            case {"kind": "stop"}:
                for each in self._trainings:
                    each.session.stop()
            case {"kind": "break_world", "number": number}:
                with self._forming:
                    if training.session.world_number == number:
                        training.session.break_world()
                        self._backend.abort()
            case {"kind": "rejoin", "pickled": pickled}:
                self._rejoin(training, pickle.loads(pickled))
            case {"kind": "offer_change", "number": number}:
                if training.session.world_number == number:
                    self._backend.states.offer_change()
                    training.session.committed.change_pending = True

    def _rejoin(self, training: Training, rejoin: RankRejoin) -> None:
        with self._forming:
            (rank_info,) = rejoin.assignment.rank_infos
            rejoin.assignment.environment.pop("CUDA_VISIBLE_DEVICES", None)  # CUDA reads it only once
            os.environ.update(rejoin.assignment.environment)
            training.session.committed.change_pending = False
            training.session.join_world(
                rank_info, number=rejoin.number, reports=rejoin.reports, resources=rejoin.resources
            )

    def _answer(self, number: int, name: str, arguments: list[Any], named: dict[str, Any]) -> None:
        value, error = None, ""
        try:
            value = self._answers[name](*arguments, **named)
        except Exception:  # any: the actor raises it
            error = encodable(traceback.format_exc(limit=-5))
        with contextlib.suppress(OSError):
            self._control.send("reply", id=number, value=value, error=error)

    # What the actor may ask, with `RankProcess.ask`.

    def stacks(self) -> dict[int, str]:
        return {each.session.rank_info.rank: encodable(each.stack()) for each in self._trainings}

    def dump_commit(self) -> bytes | None:
        committed = self._trainings[0].session.committed if self._trainings else None
        dumped: bytes | None = committed.dump() if committed is not None else None
        return dumped

    def can_restore(self) -> bool:
        return bool(self._trainings) and self._trainings[0].session.committed.can_restore


def set_variables(assignment: Assignment) -> None:
    """Set the environment variables of a rank's world."""
    os.environ.update({**assignment.defaults, **os.environ, **assignment.environment})
