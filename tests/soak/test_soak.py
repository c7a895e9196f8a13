"""Searches under random harm, in a form that CI bears; `make soak` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")
SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_every_trial_of_a_harmed_search_is_accounted_for(kind: str, tmp_path: Path) -> None:
    size = ["--trials", "4", "--epochs", "5", "--seconds", "60", "--every-s", "6", "--seed", "7"]
    ran = subprocess.run(
        [sys.executable, str(SOAK), kind, *size], capture_output=True, text=True, timeout=840, cwd=tmp_path
    )
    assert "{" in ran.stdout, ran.stderr[-3000:]
    summary = json.loads(ran.stdout[ran.stdout.index("{\n") :])
    assert summary["problems"] == [], summary
    assert sum(summary["trials"].values()) == 4 and summary["harmed"], summary
