"""After its world breaks, a training function is called again if it can continue from a commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_tune import commit, get_state, report
from horovod_tune.backends.horovod import horovod_elastic
from horovod_tune.backends.horovod.horovod_world import is_collective_error
from horovod_tune.errors import NotInitialized
from horovod_tune.messages import Failed, FailureKind, Finished, NeedsWorld, RankInfo, Report, TrialRequest
from horovod_tune.rank.training import Training
from horovod_tune.session.committed_state import CommittedState, States
from horovod_tune.session.session import Session, WorldBroken, current


class Stalled(Exception):
    """The error of a rank that waited for a rank which hangs."""


def describe_failure(error: BaseException) -> tuple[FailureKind, str]:
    assert not is_collective_error(error)  # must return for an error that is its own cause
    if isinstance(error, Stalled):
        return FailureKind.STALLED, "Missing ranks: 1"
    return FailureKind.DISCONNECTED if isinstance(error, WorldBroken) else FailureKind.RAISED, ""


class Alone:
    """The agreement of a world of one rank."""

    init_call = "hvd.init()"

    def __init__(self, *, is_ready: bool = True) -> None:
        self._is_ready = is_ready

    def are_ready(self) -> bool:
        return self._is_ready

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, number: int) -> list[int]:
        return [number]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a function as the only rank of a trial, whose next world is ready at once; return its messages."""
    monkeypatch.chdir(tmp_path)

    def run_it(function: Callable[[dict[str, Any]], None], *, is_elastic: bool) -> list[Any]:
        sent: list[Any] = []
        world = RankInfo(0, 1, 0, 1, 0, 1)

        def send(message: Any) -> None:
            sent.append(message)
            if isinstance(message, Report):
                live.acknowledge(message.index)
            if isinstance(message, NeedsWorld):
                # A rank stops waiting when the number of the world is higher than that of the one it left.
                live.join_world(
                    world,
                    number=live.world_number + 1,
                    reports=live.reports,
                    resources=live.request.resources,
                )

        places = str(tmp_path), str(tmp_path)
        config, pickled = cloudpickle.dumps({}), cloudpickle.dumps(function)
        request = TrialRequest("t", "t", *places, "e", config, pickled, is_elastic=is_elastic)
        live = Session(
            request,
            world,
            send=send,
            fetch=lambda place: pytest.fail("there is no checkpoint"),
            committed=CommittedState(Alone(), States()),
            describe_failure=describe_failure,
        )
        training = Training(live, host="here", send=send, load=lambda: None)
        assert training.run() == isinstance(sent[-1], Failed), "the exit status"
        return sent

    return run_it


class Breaks:
    """A training function whose first call runs ``first`` and then fails with the world."""

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


def hear_of_another_ranks_report() -> None:
    live = current()
    assert live is not None
    live.acknowledge(1)


def keep() -> None:
    commit({"epoch": 1})


def keep_in(committed: CommittedState) -> None:
    committed.commit({"epoch": 1})


def look_up() -> None:
    assert get_state() is None


@pytest.mark.parametrize("first", [(), (keep,), (say, keep), (look_up, say)])
def test_it_is_called_again_if_it_saves_state_or_has_not_reported(run: Any, first: Any) -> None:
    sent = run(Breaks(*first), is_elastic=True)
    assert [message for message in sent if not isinstance(message, Report)] == [
        NeedsWorld(0, "WorldBroken: a rank is gone"),
        Finished(0),
    ]


def test_it_is_called_again_after_a_stall(run: Any) -> None:
    left, ending = run(Breaks(keep, error=Stalled), is_elastic=True)
    assert isinstance(left, NeedsWorld) and ending == Finished(0)
    assert left.error == "Stalled: a rank is gone"
    assert left.stalled.startswith("Traceback") and left.stalled.endswith("Missing ranks: 1")


def like_horovods_run_fn(function: Any, reset: Any) -> Any:
    def wrapper(*args: Any) -> Any:
        while True:
            try:
                return function(*args)
            except (Stalled, WorldBroken, ArithmeticError):
                reset()

    return wrapper


@pytest.mark.parametrize("error", [WorldBroken, Stalled, "HostsUpdatedInterrupt"])
def test_a_function_in_hvd_elastic_run_says_why_it_leaves(
    run: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exceptions = pytest.importorskip("horovod.common.exceptions")
    is_asked = error == "HostsUpdatedInterrupt"
    if is_asked:
        error = type(error, (exceptions.HostsUpdatedInterrupt, WorldBroken), {})
    monkeypatch.setattr(horovod_elastic, "reset", lambda *reason: current().wait_for_world(*reason))

    def train(config: dict[str, Any]) -> None:
        horovod_elastic.run_and_report(like_horovods_run_fn, Breaks(say, error=error), None)(config)

    left, ending = run(train, is_elastic=True)[1:]
    assert left.error == ("" if is_asked else f"{error.__name__}: a rank is gone")
    assert ending == Finished(0)
    assert left.stalled.endswith("Missing ranks: 1") is (error is Stalled)


def test_a_function_in_hvd_elastic_run_is_not_called_again_after_an_error_of_its_own(run: Any) -> None:
    function = Breaks(keep, error=ArithmeticError)

    def train(config: dict[str, Any]) -> None:
        horovod_elastic.run_and_report(like_horovods_run_fn, function, None)(config)

    (ending,) = run(train, is_elastic=True)
    assert isinstance(ending, Failed) and ending.kind is FailureKind.RAISED


@pytest.mark.parametrize("first", [say, hear_of_another_ranks_report])
def test_it_fails_if_the_trial_has_reported_but_saves_no_state(run: Any, first: Any) -> None:
    ending = run(Breaks(first), is_elastic=True)[-1]
    assert isinstance(ending, Failed) and ending.kind is FailureKind.DISCONNECTED


def test_it_is_not_called_again_after_another_exception(run: Any) -> None:
    (ending,) = run(Breaks(error=ArithmeticError), is_elastic=True)
    assert isinstance(ending, Failed) and ending.kind is FailureKind.RAISED


class BadName(Exception):
    """An error with a file name in its text that is not UTF-8."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: caf\udce9.txt")


class WorldBrokenOverBadName(WorldBroken, BadName):
    pass


class StalledOverBadName(Stalled, BadName):
    pass


def test_texts_of_errors_that_are_not_utf_8_are_escaped(run: Any) -> None:
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
def test_a_failure_is_sent_for_exceptions_without_a_text_or_with_a_cyclic_cause(run: Any, fail: Any) -> None:
    (ending,) = run(Breaks(fail), is_elastic=False)
    assert isinstance(ending, Failed) and f"in {fail.__name__}" in ending.traceback


@pytest.mark.parametrize(("call", "name"), [(CommittedState.get, "get_state"), (keep_in, "commit")])
def test_before_init_nothing_can_be_committed(call: Callable[[CommittedState], Any], name: str) -> None:
    committed = CommittedState(Alone(is_ready=False), States())
    with pytest.raises(NotInitialized, match=rf"call hvd\.init\(\) before {name}\(\)"):
        call(committed)
    assert not committed.can_restore


def test_it_has_not_finished_if_a_collective_failed_unnoticed(run: Any) -> None:
    """Its result may come from an invalid tensor."""

    def ends_in_a_broken_world(config: dict[str, Any]) -> None:
        live = current()
        assert live is not None
        live.break_world(was_unnoticed=True)

    (failed,) = run(ends_in_a_broken_world, is_elastic=False)
    assert failed.kind is FailureKind.DISCONNECTED
    assert "a collective failed before the training function returned" in failed.traceback


def test_in_a_trial_of_a_fixed_size_it_is_called_once(run: Any) -> None:
    (ending,) = run(Breaks(), is_elastic=False)
    assert isinstance(ending, Failed)
