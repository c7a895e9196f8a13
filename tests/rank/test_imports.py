"""How long a training function's imports take, and which of them a line on the screen names."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod_tune.rank import imports
from horovod_tune.rank.imports import ImportTimes


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, whose modules are imported anew in each test."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(imports, "LEAST_S", 0.2)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_of_slow_packages_the_modules_to_preload_are_named(site: Path) -> None:
    write(site, "slow_one/__init__.py", "")
    write(site, "slow_one/part.py", "import time, slow_below; time.sleep(0.15)")
    write(site, "slow_below.py", "import time; time.sleep(0.15)")
    write(site, "quick.py", "")
    times = ImportTimes()
    for name in ("quick", "slow_one.part"):
        importlib.import_module(name)
    found = times.stop()
    assert list(found) == ["slow_one.part"], "what it imports itself counts for it"
    assert found["slow_one.part"] >= 0.3
    assert times not in sys.meta_path and times.stop() == found


def test_the_modules_of_a_package_add_up_and_those_of_others_do_not(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(sys, "clock_of_imports", clock, raising=False)
    monkeypatch.setattr(imports, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(imports, "LEAST_S", 1.0)
    took = {
        "one/__init__": 0.0,
        "one/first": 0.6,
        "one/second": 0.5,
        "one/short": 0.05,
        "other/__init__": 0.0,
        "other/part": 0.9,
    }
    for name, seconds in took.items():
        write(site, f"{name}.py", f"import sys\nsys.clock_of_imports.now += {seconds}")
    times = ImportTimes()
    for name in ("one.first", "other.part", "one.second", "one.short"):
        importlib.import_module(name)
    assert times.stop() == {"one.first": 0.6, "one.second": 0.5}


def test_modules_of_the_script_and_of_other_threads_are_not_measured(site: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine", "of_the_script.py", "import time; time.sleep(0.25)")
    write(site, "in_a_thread.py", "import time; time.sleep(0.25)")
    sys.path.insert(0, str(tmp_path / "mine"))
    times = ImportTimes()
    try:
        importlib.import_module("of_the_script")
        thread = threading.Thread(target=importlib.import_module, args=("in_a_thread",))
        thread.start()
        thread.join()
        assert times.stop() == {}
    finally:
        times.stop()
        sys.path.remove(str(tmp_path / "mine"))


def test_a_module_that_fails_raises_its_own_error(site: Path) -> None:
    write(site, "failing.py", "raise ValueError('its own')")
    times = ImportTimes()
    try:
        with pytest.raises(ValueError, match="its own"):
            importlib.import_module("failing")
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            importlib.import_module("no_such_module")
    finally:
        times.stop()
