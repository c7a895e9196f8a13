"""A private API of Ray or torch that has changed is left alone, with a warning of what is lost."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import eventually

from horovod_tune.compatibility import Patch, difference, wrap

HERE = __name__


class Engine:
    """Stands for another library's class."""

    def __init__(self) -> None:
        self._fuel = 1

    def run(self, speed: int, gear: int = 1) -> int:
        return sum(self._fuel for _ in range(speed)) + gear

    @property
    def level(self) -> int:
        return self._gauge  # type: ignore[attr-defined, no-any-return]


class Diesel(Engine):
    def heat(self) -> Any:
        return lambda: self._glow  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (f"{HERE}:Engine", ""),
        (f"{HERE}:Engine.run(self, speed, gear)", ""),
        (f"{HERE}:Engine.run uses _fuel range", ""),  # also inside a generator
        (f"{HERE}:Engine uses _fuel _gauge", ""),  # also in properties
        (f"{HERE}:Diesel uses _fuel _glow", ""),  # also in bases and in lambdas
        (HERE, ""),
        ("horovod_tune.no_such_module:x", "there is no horovod_tune.no_such_module.x"),
        (f"{HERE}:Engine.stop", "Engine.stop"),
        (f"{HERE}:Engine.run(self, speed)", "takes (self, speed, gear), not (self, speed)"),
        (f"{HERE}:Engine.run(self, gear, speed)", "not (self, gear, speed)"),
        (f"{HERE}:HERE(self)", "has no signature"),
        (f"{HERE}:Diesel uses _fuel {'_'.join('oil')}", "Diesel does not use"),
        (f"{HERE}:Engine.run uses gear brake", "does not use brake"),
    ],
)
def test_a_difference_is_described(expected: str, says: str) -> None:
    found = difference(expected)
    assert says in found and bool(found) is bool(says)


def test_a_function_that_we_have_wrapped_is_looked_at_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "run", Engine.run)  # undoes what `wrap` does
    wrap(Engine, "run")(lambda original, *anything: original(*anything))
    assert not difference(f"{HERE}:Engine.run(self, speed, gear) uses _fuel")


def test_a_change_is_logged_once_with_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    patch = Patch("it runs more slowly", "ray.tune.tune:run(engine)", "ray:no_such")
    with caplog.at_level(logging.WARNING):
        assert [patch.otherwise(0)(abs)(-1), patch.once(abs)(-1), patch.fits] == [0, None, False]
    (record,) = caplog.records
    assert "so it runs more slowly. (" in record.getMessage()
    assert "ray.no_such" in record.getMessage() and "not (engine)" in record.getMessage()


def test_whoever_asks_first_whether_a_patch_fits_does_not_switch_it_off() -> None:
    patch = Patch("it runs more slowly", f"{HERE}:Engine.run")
    assert patch.fits and [patch.once(abs)(-1), patch.once(abs)(-1)] == [1, None]


def test_a_patch_is_applied_once_per_process() -> None:
    patch = Patch("it runs more slowly", f"{HERE}:Engine.run")
    assert [patch.once(abs)(-1), patch.once(abs)(-1), patch.otherwise(0)(abs)(-1)] == [1, None, 1]


def test_a_patch_that_an_import_asks_for_does_not_wait_for_the_thread_that_waits_for_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = Patch("two ranks in a process hang", "asks_for_a_patch:x")
    (tmp_path / "asks_for_a_patch.py").write_text("import sys, time\nx = 1\ntime.sleep(0.5)\nsys.patch.fits")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "patch", patch, raising=False)
    monkeypatch.delitem(sys.modules, "asks_for_a_patch", raising=False)
    importing = threading.Thread(target=importlib.import_module, args=("asks_for_a_patch",), daemon=True)
    importing.start()
    eventually(lambda: "asks_for_a_patch" in sys.modules)
    asking = threading.Thread(target=lambda: patch.fits, daemon=True)
    asking.start()
    for thread in (importing, asking):
        thread.join(20)
        assert not thread.is_alive()
    assert patch.fits
