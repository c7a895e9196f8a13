"""A job is followed through lost connections: nothing twice, nothing missing, and never an end by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from horovod_tune.launch import following
from horovod_tune.launch.head_shell import Unreachable
from horovod_tune.launch.values import LaunchError

OUTPUT = "".join(f"line {number}\n" for number in range(40))
OVER = {"status": "SUCCEEDED", "exit_code": 0}


class Head:
    """Gives the output from an offset on, and breaks after each message of its list."""

    def __init__(self, breaks: list[int]) -> None:
        self.breaks, self.asked = breaks, []

    def connect(self, offset: int) -> Iterator[dict[str, Any]]:
        self.asked.append(offset)
        left = self.breaks.pop(0) if self.breaks else None
        for start in range(offset, len(OUTPUT), 10):
            if left == 0:
                raise Unreachable("Connection timed out")
            left = None if left is None else left - 1
            end = min(start + 10, len(OUTPUT))
            yield {"log": OUTPUT[start:end], "offset": end}
        yield {"ended": OVER}


def test_lost_connections_are_events(capsys: pytest.CaptureFixture[str]) -> None:
    head, waits, noted = Head([3, 0, 0, 5, 1]), [], []
    assert following.follow(head.connect, note=noted.append, sleep=waits.append) == OVER
    shown = capsys.readouterr()
    assert shown.out == OUTPUT
    # Five losses, three of them in a row: told once each time that it went on before.
    assert shown.err.count("reconnecting") == shown.err.count("connected again") == 3
    assert len(waits) == 5 and max(waits) <= following.LONGEST_WAIT_S
    assert noted[-1] == len(OUTPUT) and noted == sorted(noted)


def test_a_later_terminal_goes_on_where_the_first_one_was(capsys: pytest.CaptureFixture[str]) -> None:
    following.follow(Head([]).connect, offset=100, sleep=lambda _: None)
    assert capsys.readouterr().out == OUTPUT[100:]


def test_a_head_that_cannot_tell_is_an_error_in_the_end() -> None:
    asked = []

    def connect(offset: int) -> Iterator[dict[str, Any]]:
        asked.append(offset)
        raise LaunchError("on n1: No module named horovod_tune")
        yield {}

    with pytest.raises(LaunchError, match="No module named"):
        following.follow(connect, sleep=lambda _: None)
    assert len(asked) == following.REFUSALS


def test_an_interrupt_is_the_callers(capsys: pytest.CaptureFixture[str]) -> None:
    def connect(offset: int) -> Iterator[dict[str, Any]]:
        yield {"log": "a", "offset": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        following.follow(connect, sleep=lambda _: None)
