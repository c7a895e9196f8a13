"""`preload=` in trials: what is imported once per host, and what the user is told of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from processes import run_python

pytestmark = [pytest.mark.processes]

DRIVER = Path(__file__).with_name("drivers") / "preloading.py"
SLOW = "import time; time.sleep(1.2)"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


@pytest.mark.slow
def test_modules_are_imported_once_and_the_user_is_told_which_could_be(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "slow_module.py").write_text(SLOW)
    (folder / "starts_a_thread.py").write_text(THREAD)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "RAY_DEDUP_LOGS": "0"}
    ran = run_python(DRIVER, tmp_path, env=environment, timeout_s=280)
    output = ran.stdout + ran.stderr
    lines = output.splitlines()

    (error,) = tmp_path.glob("missing/*/error.txt")
    said = "failed to start: the module 'no_such_module' of preload= cannot be imported: ModuleNotFoundError"
    assert f"StartFailed: a training actor that has not started {said}" in error.read_text()
    assert "missing: ERROR [None, None]" in lines

    assert "threads: TERMINATED [True, 'rank']" in lines
    said = "the import of starts_a_thread has started a thread (Thread-1 (sleep)): each rank starts as a new"
    assert any(said in line for line in lines), output

    assert lines.count("not_preloaded: TERMINATED [False, 'horovod_tune_template']") == 4
    advice = [line for line in lines if "each trial imports" in line]
    assert len(advice) == 1, "once per search, although two trials run at a time"
    text = r"each trial imports slow_module \(\d+(\.\d)? s\): preload=\['slow_module'\]$"
    assert re.search(text, advice[0]), advice

    assert lines.count("preloaded: TERMINATED [True, 'horovod_tune_template']") == 2
