"""Runs in each rank: the thread of the training function, and the message about how it ended."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ray import cloudpickle

from horovod_tune.errors import encodable, traceback_text
from horovod_tune.function.training_function import unwrapped
from horovod_tune.messages import Failed, FailureKind, Finished, Message, TrialRequest
from horovod_tune.rank import exit_handlers
from horovod_tune.rank.advice import advice_on
from horovod_tune.rank.streams import flush_streams
from horovod_tune.ray_compat import tune_session
from horovod_tune.session import session
from horovod_tune.session.committed_state import WorldChanges
from horovod_tune.session.session import Session, StopTraining

# The kinds of failure that another rank causes.
_CAUSED_BY_OTHERS = (FailureKind.DISCONNECTED, FailureKind.STALLED)
# How long the trial's `atexit` handlers may delay the message that the function has ended. If Tune stops the
# trial, the coordinator waits for this message only `UNWIND_TIMEOUT_S`.
EXIT_HANDLERS_TIMEOUT_S = 30.0
# The limit if the function failed: other ranks that lose contact meanwhile would be reported as the cause.
FAILED_EXIT_HANDLERS_TIMEOUT_S = 1.0
# How many frames of a hung function's stack the error shows: the innermost ones.
STACK_FRAMES = 50


class Training:
    """One rank's run of the training function for one trial, in a new thread.

    Every trial has a new thread, since much of torch's state (grad mode, autocast, default device) and every
    `threading.local` belongs to a thread.

    ``describe_failure(error)`` returns the kind of a failure and text to add to its traceback;
    ``enter_world()`` prepares the world in which the function is about to be called; ``leave_world()`` leaves
    a world that is changing or broken.
    """

    def __init__(
        self,
        live_session: Session,
        function: bytes,
        *,
        host: str,
        send: Callable[[Message], None],
        prepare: Callable[[], None],
        describe_failure: Callable[[BaseException], tuple[FailureKind, str]],
        enter_world: Callable[[], None] = lambda: None,
        leave_world: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = live_session
        live_session.reason_of_leaving = self._reason_of_leaving
        self._function = function
        self._host = host
        self._send = send
        self._prepare = prepare
        self._describe_failure = describe_failure
        self._enter_world, self._leave_world = enter_world, leave_world
        self.thread = threading.Thread(
            target=self._run, name=f"training-{live_session.request.trial_id}", daemon=True
        )

    def start(self) -> None:
        self.thread.start()

    def stack(self) -> str:
        """Return the training function's current stack as text; empty if it is not running."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        lines = traceback.extract_stack(frame) if frame is not None else []
        ours = [number for number, line in enumerate(lines) if line.filename == __file__]
        return "".join(traceback.format_list(lines[ours[-1] + 1 :][-STACK_FRAMES:] if ours else []))

    def _run(self) -> None:
        ending: Message
        try:
            self._prepare()
            enter_working_directory(self.session.request)
            session.activate(self.session)
            tune_session.install_session(self.session)
            function = cloudpickle.loads(self._function)
            self.session.own_package = str(getattr(unwrapped(function), "__module__", "")).partition(".")[0]
            self._call(function)
            ending = Finished(self.session.rank_info.rank)
        except StopTraining:
            ending = Finished(self.session.rank_info.rank, has_returned=False)
        except BaseException as error:
            # The coordinator raises it. SystemExit too: the function has not finished.
            kind, text = FailureKind.RAISED, _own_traceback(error)
            with contextlib.suppress(Exception):  # the user's error may raise in its __str__
                kind, more = self._describe_failure(error)
                text += more + advice_on(error)
            ending = Failed(self.session.rank_info.rank, self._host, kind, encodable(text))
        is_first = threading.Lock()

        def send_ending() -> None:
            if is_first.acquire(blocking=False):
                self._send(ending)

        failed = isinstance(ending, Failed)
        timeout_s = FAILED_EXIT_HANDLERS_TIMEOUT_S if failed else EXIT_HANDLERS_TIMEOUT_S
        timer = threading.Timer(timeout_s, send_ending)
        timer.daemon = True
        if self.session.exit_handlers:
            timer.start()
            exit_handlers.run_handlers(self.session)
            timer.cancel()
        self.session.parameters = None
        session.activate(None)
        tune_session.install_session(session.current())  # on TPU, the process may have another rank
        send_ending()

    def _call(self, function: Callable[[dict[str, Any]], Any]) -> None:
        """Call the training function; in an elastic trial, call it again whenever its world has changed."""
        while True:
            reason = "", ""
            try:
                self._enter_world()
                call(function, self.session)
                if self.session.failed_unnoticed:
                    raise self.session.world_error(
                        "a collective failed before the training function returned"
                    )
                return
            except WorldChanges:
                self.session.committed.change_pending = False
            except Exception as error:  # the function may raise anything if a rank was lost
                found = self._reason_of_leaving(error)
                if found is None or not self._can_restart():
                    raise
                reason = found
            self._leave_world()
            self.session.wait_for_world(*reason)

    def _reason_of_leaving(self, error: BaseException) -> tuple[str, str] | None:
        kind, more = self._describe_failure(error)
        if kind not in _CAUSED_BY_OTHERS:
            return None
        stalled = _own_traceback(error) + more if kind is FailureKind.STALLED else ""
        return f"{type(error).__name__}: {error}", stalled

    def _can_restart(self) -> bool:
        """Return True if the trial is elastic, and the function saves state or nothing was reported yet."""
        live = self.session
        return live.request.is_elastic and (live.committed.can_restore or not live.trial_has_reported)


def call(function: Callable[[dict[str, Any]], Any], live_session: Session) -> None:
    """Call the training function, and report what it returns or yields, as Tune does."""
    try:
        output = function(dict(live_session.request.config))
        # Not inspect.isgeneratorfunction(function): a partial or a callable object may return one too.
        for each in output if inspect.isgenerator(output) else (output,):
            session.handle_output(live_session, each)
    finally:
        if os.getpid() != live_session.pid:  # the function has called os.fork()
            _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    """End this process as Python does; going on, it would shut down the connections of its parent."""
    status = error.code if isinstance(error, SystemExit) else error
    if error is not None and status is error:
        traceback.print_exception(error)
    flush_streams()
    os._exit(status if isinstance(status, int) else status is not None)


def enter_working_directory(request: TrialRequest) -> None:
    """Change to the trial's working directory unless RAY_CHDIR_TO_TRIAL_DIR=0, as Tune does."""
    os.makedirs(request.working_dir, exist_ok=True)
    os.environ.setdefault("TUNE_ORIG_WORKING_DIR", os.getcwd())
    if bool(int(os.environ.get("RAY_CHDIR_TO_TRIAL_DIR", "1"))):
        os.chdir(request.working_dir)


def _own_traceback(error: BaseException) -> str:
    """Return the traceback, beginning at the training function."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return traceback_text(traceback.format_exception(type(error), error, frames))
