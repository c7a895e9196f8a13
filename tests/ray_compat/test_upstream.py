"""The tests in `upstream/`, for Ray's own repository, fail on plain Ray and pass with our patches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

HERE = Path(__file__).resolve().parent
PATCH = """
from horovod_tune.ray_compat.patches import failures, paused_trials, stored_state
failures.explain_failures(lambda trainable: True)
paused_trials.mend_paused_trials()
stored_state.replace_stored_files()
"""


def outcomes(path: Path, patch: str) -> dict[str, str]:
    """Run the tests of a file in a process of their own; return how each ended."""
    program = f"{patch}\nimport sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-p", "no:cacheprovider", "-q", "-rA", "--noconftest", "-o", "addopts=", str(path)]
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", ran.stdout, re.M)}
    assert found, ran.stdout + ran.stderr
    return found


@pytest.mark.parametrize("path", sorted((HERE / "upstream").glob("*.py")), ids=lambda path: path.stem)
def test_each_fault_is_in_plain_ray_and_not_with_its_patch(path: Path) -> None:
    tests = re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    assert outcomes(path, "") == dict.fromkeys(tests, "FAILED")
    assert outcomes(path, PATCH) == dict.fromkeys(tests, "PASSED")
