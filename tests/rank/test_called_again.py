"""A training function whose world breaks is called again where nothing that it did is lost by that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_tune import commit, report
from horovod_tune.errors import NotInitialized
from horovod_tune.gloo.horovod_world import is_collective_error
from horovod_tune.messages import Failed, FailureKind, Finished, NeedsWorld, RankInfo, Report, TrialRequest
from horovod_tune.rank.training import Training
from horovod_tune.session.committed_state import CommittedState, NoStates
from horovod_tune.session.session import Session, WorldBroken


class Stalled(Exception):
    """What a rank meets that waited for others which hang."""


def describe_failure(error: BaseException) -> tuple[FailureKind, str]:
    assert not is_collective_error(error)  # of a cause that is its own it has to find an end
    if isinstance(error, Stalled):
        return FailureKind.STALLED, "Missing ranks: 1"
    return FailureKind.DISCONNECTED if isinstance(error, WorldBroken) else FailureKind.RAISED, ""


class Alone:
    """What a world of one rank agrees on."""

    init_call = "hvd.init()"

    def __init__(self, *, is_ready: bool = True) -> None:
        self._is_ready = is_ready

    def are_ready(self) -> bool:
        return self._is_ready

    def any(self, flag: bool) -> bool:
        return flag

    def newest(self, number: int, state: Any) -> tuple[int, Any]:
        return number, state


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a function as the only rank of a trial, whose next world comes at once; return what it sends."""
    monkeypatch.chdir(tmp_path)

    def run_it(function: Callable[[dict[str, Any]], None], *, is_elastic: bool) -> list[Any]:
        sent: list[Any] = []
        world = RankInfo(0, 1, 0, 1, 0, 1)

        def send(message: Any) -> None:
            sent.append(message)
            if isinstance(message, Report):
                live.proceed(message.index)
            if isinstance(message, NeedsWorld):
                # A rank that waits returns as soon as its world's number is higher than the one it left.
                live.join_world(
                    world,
                    number=live.world_number + 1,
                    reports=live.reports,
                    resources=live.request.resources,
                )

        request = TrialRequest("t", "t", str(tmp_path), str(tmp_path), "e", {}, None, is_elastic=is_elastic)
        live = Session(request, world, send=send, fetch=lambda place: pytest.fail("there is no checkpoint"))
        live.committed = CommittedState(Alone(), NoStates())
        training = Training(
            live,
            cloudpickle.dumps(function),
            host="here",
            send=send,
            prepare=lambda: None,
            describe_failure=describe_failure,
        )
        training.start()
        training.thread.join(timeout=30)
        assert not training.thread.is_alive()
        return sent

    return run_it


class Breaks:
    """A function in whose first call the world breaks after it did what is given."""

    def __init__(self, *first: Callable[[], None], error: type[Exception] = WorldBroken) -> None:
        self.first, self.error, self.calls = first, error, 0

    def __call__(self, config: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls == 1:
            for do in self.first:
                do()
            raise self.error("a rank is gone")


def say() -> None:
    report(epoch=1)


def keep() -> None:
    commit({"epoch": 1})


def keep_in(committed: CommittedState) -> None:
    committed.commit({"epoch": 1})


@pytest.mark.parametrize("first", [(), (keep,), (say, keep)])
def test_it_is_called_again_when_it_has_committed_or_reported_nothing(run: Any, first: Any) -> None:
    sent = run(Breaks(*first), is_elastic=True)
    assert [message for message in sent if not isinstance(message, Report)] == [
        NeedsWorld(0, "WorldBroken: a rank is gone"),
        Finished(0),
    ]


def test_it_is_called_again_when_others_did_not_enter_a_collective(run: Any) -> None:
    left, ending = run(Breaks(keep, error=Stalled), is_elastic=True)
    assert isinstance(left, NeedsWorld) and ending == Finished(0)
    assert left.error == "Stalled: a rank is gone"
    assert left.stalled.startswith("Traceback") and left.stalled.endswith("Missing ranks: 1")


def test_it_fails_when_it_has_reported_and_committed_nothing(run: Any) -> None:
    reported, ending = run(Breaks(say), is_elastic=True)
    assert isinstance(reported, Report)
    assert isinstance(ending, Failed) and ending.kind is FailureKind.DISCONNECTED


def test_an_error_of_its_own_is_no_reason_to_call_it_again(run: Any) -> None:
    (ending,) = run(Breaks(error=ArithmeticError), is_elastic=True)
    assert isinstance(ending, Failed) and ending.kind is FailureKind.RAISED


class BadName(Exception):
    """An error whose text holds a file's name that is not UTF-8."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: caf\udce9.txt")


class WorldBrokenOverBadName(WorldBroken, BadName):
    pass


class StalledOverBadName(Stalled, BadName):
    pass


def test_the_text_of_an_error_can_be_encoded_whatever_it_holds(run: Any) -> None:
    (ending,) = run(Breaks(error=BadName), is_elastic=False)
    assert r"BadName: a rank is gone: caf\udce9.txt" in ending.traceback and ending.traceback.encode()
    left, _ = run(Breaks(error=WorldBrokenOverBadName), is_elastic=True)
    assert left.error == r"WorldBrokenOverBadName: a rank is gone: caf\udce9.txt"
    left, _ = run(Breaks(keep, error=StalledOverBadName), is_elastic=True)
    assert r"caf\udce9.txt" in left.stalled and left.stalled.encode()


def without_text() -> None:
    class WithoutText(ValueError):
        def __str__(self) -> str:
            raise AttributeError("no text")

    raise WithoutText


def from_itself() -> None:
    try:
        raise OSError("a file is gone")
    except OSError as error:
        raise error from error


@pytest.mark.parametrize("fail", [without_text, from_itself])
def test_how_it_ended_is_sent_whatever_it_raises(run: Any, fail: Any) -> None:
    (ending,) = run(Breaks(fail), is_elastic=False)
    assert isinstance(ending, Failed) and f"in {fail.__name__}" in ending.traceback


@pytest.mark.parametrize(("call", "name"), [(CommittedState.get, "get_state"), (keep_in, "commit")])
def test_before_init_nothing_can_be_committed(call: Callable[[CommittedState], Any], name: str) -> None:
    committed = CommittedState(Alone(is_ready=False), NoStates())
    with pytest.raises(NotInitialized, match=rf"call hvd\.init\(\) before {name}\(\)"):
        call(committed)
    assert not committed.has_committed and not committed.can_restore


def test_in_a_trial_of_a_fixed_size_it_is_called_once(run: Any) -> None:
    (ending,) = run(Breaks(), is_elastic=False)
    assert isinstance(ending, Failed)
