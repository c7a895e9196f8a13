"""Runs in each rank: calls the training function, and sends how it ended."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from horovod_tune.errors import encodable, traceback_text
from horovod_tune.messages import Failed, FailureKind, Finished, Message, TrialRequest
from horovod_tune.rank.advice import advice_on
from horovod_tune.rank.streams import flush_streams
from horovod_tune.ray_compat import rank_connection, tune_session
from horovod_tune.session import session
from horovod_tune.session.committed_state import WorldChanges
from horovod_tune.session.session import Session, StopTraining

# The kinds of failure that another rank causes.
_CAUSED_BY_OTHERS = (FailureKind.DISCONNECTED, FailureKind.STALLED)
# How many frames of a hung function's stack the error shows: the innermost ones.
STACK_FRAMES = 50


class Training:
    """One rank's run of the training function for one trial, in the thread that calls `run`.

    ``load()`` imports the backend's libraries; ``enter_world()`` prepares the world in which the function is
    about to be called; ``leave_world()`` leaves a world that is changing or broken.
    """

    def __init__(
        self,
        live_session: Session,
        *,
        host: str,
        send: Callable[[Message], None],
        load: Callable[[], None],
        enter_world: Callable[[], None] = lambda: None,
        leave_world: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = live_session
        self._host = host
        self._send = send
        self._load = load
        self._enter_world, self._leave_world = enter_world, leave_world
        # None until the function is unpickled, in its first world.
        self._function: Callable[[dict[str, Any]], Any] | None = None
        self._thread: int | None = None

    def stack(self) -> str:
        """Return the training function's current stack as text; empty if it is not running."""
        frame = sys._current_frames().get(self._thread or 0)
        lines = traceback.extract_stack(frame) if frame is not None else []
        ours = [number for number, line in enumerate(lines) if line.filename == __file__]
        return "".join(traceback.format_list(lines[ours[-1] + 1 :][-STACK_FRAMES:] if ours else []))

    def run(self) -> int:
        """Call the function and send how it has ended; return the exit status of a script that ends so."""
        self._thread = threading.get_ident()
        ending: Message
        status = 0
        try:
            self._load()
            enter_working_directory(self.session.request)
            session.activate(self.session)
            tune_session.install_session(self.session)
            self._call()
            ending = Finished(self.session.rank_info.rank)
        except StopTraining:
            ending = Finished(self.session.rank_info.rank, has_returned=False)
        except BaseException as error:
            # The coordinator raises it. SystemExit too: the function has not finished.
            kind, text, status = FailureKind.RAISED, _own_traceback(error), 1
            with contextlib.suppress(Exception):  # the user's error may raise in its __str__
                kind, more = self.session.describe_failure(error)
                text += more + advice_on(error)
            ending = Failed(self.session.rank_info.rank, self._host, kind, encodable(text))
        self._send(ending)
        # The objects of the function end as at the end of a script, while the process can still use them.
        self._function = None
        self.session.parameters.clear()
        session.activate(None)
        tune_session.install_session(session.current())
        return status

    def _call(self) -> None:
        """Call the training function; in an elastic trial, call it again whenever its world has changed."""
        while True:
            reason = "", ""
            try:
                self._enter_world()
                if self._function is None:  # in its world, which objects of torch.distributed need
                    self._function = rank_connection.loads(self.session.request.function)
                call(self._function, self.session)
                if self.session.failed_unnoticed:
                    raise self.session.world_error(
                        "a collective failed before the training function returned"
                    )
                return
            except WorldChanges:
                self.session.committed.change_pending = False
            except Exception as error:  # the function may raise anything if a rank was lost
                found = reason_of_leaving(self.session, error)
                if found is None or not self._can_restart():
                    raise
                reason = found
            self._leave_world()
            self.session.wait_for_world(*reason)

    def _can_restart(self) -> bool:
        """Return True if the trial is elastic, and the function saves state or nothing was reported yet."""
        live = self.session
        return live.request.is_elastic and (live.committed.can_restore or not live.trial_has_reported)


def reason_of_leaving(live_session: Session, error: BaseException) -> tuple[str, str] | None:
    """Return the arguments of `Session.wait_for_world`; None if no other rank is the cause of ``error``."""
    kind, more = live_session.describe_failure(error)
    if kind not in _CAUSED_BY_OTHERS:
        return None
    stalled = _own_traceback(error) + more if kind is FailureKind.STALLED else ""
    return f"{type(error).__name__}: {error}", stalled


def call(function: Callable[[dict[str, Any]], Any], live_session: Session) -> None:
    """Call the training function, and report what it returns or yields, as Tune does."""
    try:
        output = function(rank_connection.loads(live_session.request.config))
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
