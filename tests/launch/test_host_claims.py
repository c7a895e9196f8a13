"""Machines of one's own are for one launch at a time; the shell lines run here for real."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from horovod_tune.launch import host_claims
from horovod_tune.launch.head_shell import Unreachable
from horovod_tune.launch.values import LaunchError

NOW_S = 1_000_000.0
FREE = "claim \npython 3 11\n"


class Host:
    """A machine that is a folder of this one."""

    def __init__(self, host: str, home: Path, down: bool = False) -> None:
        self.host, self.home, self.down = host, home, down
        home.mkdir(exist_ok=True)

    def run(self, line: str, *, timeout_s: float) -> str:
        if self.down:
            raise Unreachable("No route to host")
        environment = {**os.environ, "HOME": str(self.home)}
        ran = subprocess.run(
            ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=timeout_s
        )
        if ran.returncode:
            raise LaunchError(ran.stderr)
        return ran.stdout


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    # Whatever Ray runs on this machine is not those hosts' own.
    monkeypatch.setattr(host_claims, "LOOK", host_claims.LOOK.replace("ps -eo", "true || ps -eo"))
    return [Host(name, tmp_path / name) for name in ("n1", "n2")]


def claim(hosts: list[Host], name: str, now_s: float = NOW_S) -> None:
    host_claims.claim(hosts, name, "python tune.py", "ann@laptop", clock=lambda: now_s)  # type: ignore[arg-type]


def test_a_second_launch_is_refused_with_what_uses_the_machine(hosts: list[Host]) -> None:
    claim(hosts, "first")
    with pytest.raises(LaunchError) as refused:
        claim(hosts, "second", NOW_S + 600)
    for host in ("n1", "n2"):
        said = f"{host} is in use by the launch first (python tune.py) of ann@laptop, for 10 min"
        assert said in str(refused.value)
    claim(hosts, "first")  # the same one again
    host_claims.release(hosts, "second")  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="n1 is in use"):
        claim(hosts, "third")
    host_claims.release(hosts, "first")  # type: ignore[arg-type]
    claim(hosts, "third")


def test_all_machines_are_taken_or_none(hosts: list[Host], tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="n3 cannot be reached by ssh: No route to host"):
        claim([*hosts, Host("n3", tmp_path / "n3", down=True)], "first")
    claim(hosts, "second")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (FREE, None),
        (
            "claim \nraylet bob 60 7\npython 3 11\n",
            "n1 already runs a Ray of user bob: process 7, started 1 min",
        ),
        ("claim \npython 3 8\n", "n1 has python 3 8, 3.10 or newer is needed"),
        ("claim \nmissing rsync\npython 3 11\n", "n1 has no rsync"),
        # A claim of long ago without a Ray is of a launch that came to nothing.
        ('claim {"name": "old", "command": "c", "by": "b", "since_s": 0}\npython 3 11\n', None),
        (
            'claim {"name": "old", "command": "c", "by": "b", "since_s": 0}\nraylet me 9 9\npython 3 11\n',
            "n1 is in use by the launch old",
        ),
    ],
)
def test_what_a_machine_says_is_understood(said: str, problem: str | None) -> None:
    found = host_claims.problem_of("n1", said, name="mine", now_s=NOW_S)
    assert (found is None) == (problem is None) and (problem or "") in (found or "")
