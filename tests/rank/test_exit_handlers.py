"""A trial's `atexit` handlers run in its ranks when the training function has ended."""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_tune.messages import Failed, FailureKind, Finished, RankInfo, TrialRequest
from horovod_tune.rank import exit_handlers, training
from horovod_tune.session.session import Session

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Notes:
    """Notes of training functions, which reach them through `sys`, since they are pickled by value."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.goes_on = threading.Event()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    made = Notes()
    monkeypatch.setattr(sys, "notes", made, raising=False)
    # Restored at the end: `atexit` is shared by the whole process.
    monkeypatch.setattr(atexit, "register", atexit.register)
    monkeypatch.setattr(atexit, "unregister", atexit.unregister)
    exit_handlers.install()
    # In a rank, the function's module is imported after the patch.
    monkeypatch.setattr(exit_handlers, "_lasting", exit_handlers._lasting - {__name__})
    yield made
    made.goes_on.set()


def run(function: Callable[[dict[str, Any]], Any], place: Path) -> tuple[list[Any], threading.Thread]:
    """Run a trial in this process until its rank has sent its last message."""
    messages: list[Any] = []
    ended = threading.Event()

    def send(message: Any) -> None:
        messages.append((message, list(sys.notes.lines)))  # type: ignore[attr-defined]
        ended.set()

    request = TrialRequest("id", "name", str(place), str(place), "experiment", {}, None)
    live = Session(request, RankInfo(0, 1, 0, 1, 0, 1), send=send, fetch=lambda place: place)
    rank = training.Training(
        live,
        cloudpickle.dumps(function),
        host="here",
        send=send,
        prepare=lambda: None,
        describe_failure=lambda error: (FailureKind.RAISED, ""),
    )
    rank.start()
    assert ended.wait(60)
    return messages, rank.thread


def test_handlers_run_in_reverse_order_before_finished_is_sent(notes: Notes, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        note = sys.notes.lines.append  # type: ignore[attr-defined]

        @atexit.register
        def first() -> None:
            note("first")

        atexit.register(note, "withdrawn")
        atexit.unregister(note)
        bound = functools.partial(note, "withdrawn")
        atexit.register(bound)
        atexit.unregister(bound)
        atexit.register(lambda: 1 / 0)
        atexit.register(note, "last")

    ((ending, lines),), thread = run(train, tmp_path)
    assert (ending, lines) == (Finished(0), ["last", "first"])
    thread.join(60)
    assert notes.lines == ["last", "first"]


def test_handlers_run_after_a_failure_too(notes: Notes, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        atexit.register(sys.notes.lines.append, "closed")  # type: ignore[attr-defined]
        raise ValueError("diverged")

    ((ending, lines),), _ = run(train, tmp_path)
    assert isinstance(ending, Failed) and "diverged" in ending.traceback
    assert lines == ["closed"]


def test_a_handler_that_hangs_delays_the_end_only_up_to_a_timeout(
    notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "EXIT_HANDLERS_TIMEOUT_S", 0.2)

    def train(config: dict[str, Any]) -> None:
        atexit.register(sys.notes.goes_on.wait, 60)  # type: ignore[attr-defined]

    messages, thread = run(train, tmp_path)
    assert messages == [(Finished(0), [])]
    assert thread.is_alive()  # so the reset replaces the process
    notes.goes_on.set()
    thread.join(60)
    assert len(messages) == 1


@pytest.mark.parametrize(("suffix", "expected"), [(".so", ["closed"]), (".py", ["closed", "ended"])])
def test_a_library_that_is_imported_in_a_trial_is_ended_if_it_can_be_imported_again(
    notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, expected: list[str]
) -> None:
    """pyarrow.fs registers at its import what makes S3 unusable; mlflow registers the end of the run."""
    package = types.ModuleType("imported_package")
    package.__file__ = f"imported_package{suffix}"
    monkeypatch.setitem(sys.modules, "imported_package", package)

    def train(config: dict[str, Any]) -> None:
        library = vars(sys.modules["imported_package"])
        exec("import atexit, sys\natexit.register(sys.notes.lines.append, 'ended')", library)
        exec("def use(): atexit.register(sys.notes.lines.append, 'closed')\nuse()", library)

    ((ending, lines),), _ = run(train, tmp_path)
    assert (ending, lines) == (Finished(0), expected)
    exit_handlers._real_unregister(notes.lines.append)


def test_handlers_of_libraries_that_stay_in_the_process_are_kept(notes: Notes, tmp_path: Path) -> None:
    """Such as multiprocessing and Horovod, which the next trial uses in the same process."""

    def train(config: dict[str, Any]) -> None:
        library = vars(multiprocessing.util)
        exec("import sys\natexit.register(sys.notes.lines.append, 'ended')", library)

    ((ending, lines),), _ = run(train, tmp_path)
    assert (ending, lines) == (Finished(0), [])
    exit_handlers._real_unregister(notes.lines.append)
