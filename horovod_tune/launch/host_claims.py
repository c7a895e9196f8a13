"""Machines of one's own: which are free, and whose the others are. Two launches never share a machine."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horovod_tune.launch.head_shell import HeadShell, Unreachable
from horovod_tune.launch.launch_record import age
from horovod_tune.launch.values import LaunchError

CLAIM = "~/.horovod-tune/claim.json"
# A claim without a Ray, this old, is of a launch that did not come so far as to start one.
FORGOTTEN_S = 3600.0
# Prints what a machine is used for; needs nothing there but a shell.
LOOK = f"""
echo "claim $(tr -d '\\n' < {CLAIM} 2>/dev/null)"
ps -eo user=,etimes=,pid=,args= | awk '$4 ~ /raylet$/ {{print "raylet", $1, $2, $3}}'
command -v rsync >/dev/null || echo missing rsync
python3 -c 'import sys; print("python", *sys.version_info[:2])' 2>/dev/null || echo missing python3
"""


def problem_of(host: str, said: str, *, name: str, now_s: float) -> str | None:
    """Return why a machine cannot be used, from what `LOOK` printed there, or None. Pure.

    >>> problem_of("n1", "claim \\nraylet bob 7200 4711\\npython 3 11", name="mine", now_s=0.0)
    'n1 already runs a Ray of user bob: process 4711, started 2 h 0 min ago'
    """
    raylets = re.findall(r"^raylet (\S+) (\d+) (\d+)$", said, re.M)
    claim = re.search(r"^claim (\{.*\})$", said, re.M)
    if claim is not None:
        held = json.loads(claim[1])
        held_s = now_s - held["since_s"]
        if held["name"] != name and (raylets or held_s < FORGOTTEN_S):
            return (
                f"{host} is in use by the launch {held['name']} ({held['command']}) of {held['by']}, for "
                f"{age(held_s)}. End that one: horovod-tune down {held['name']}"
            )
    if raylets:
        user, seconds, process = raylets[0]
        return f"{host} already runs a Ray of user {user}: process {process}, started {age(int(seconds))} ago"
    missing = re.findall(r"^missing (\w+)$", said, re.M)
    if missing:
        return f"{host} has no {' and no '.join(missing)}"
    version = re.search(r"^python (\d+) (\d+)$", said, re.M)
    if version is None or (int(version[1]), int(version[2])) < (3, 10):
        return f"{host} has {version[0] if version else 'no Python'}, 3.10 or newer is needed as python3"
    return None


def claim_line(name: str, command: str, by: str, *, now_s: float) -> str:
    """Return the shell line that makes a machine this launch's, which fails where another was quicker."""
    text = shlex.quote(json.dumps({"name": name, "command": command, "by": by, "since_s": int(now_s)}))
    mine = shlex.quote(json.dumps(name))
    return (
        f"mkdir -p -m 700 ~/.horovod-tune && f={CLAIM} && "
        f'if [ -e $f ] && [ -n "$(find $f -mmin +{FORGOTTEN_S / 60:.0f})" ]; then rm -f $f; fi; '
        f"(set -C; printf '%s\\n' {text} > $f) 2>/dev/null || grep -q {mine} $f"
    )


def release_line(name: str) -> str:
    """Return the shell line that gives a machine back, if it is this launch's."""
    return f"if grep -q {shlex.quote(json.dumps(name))} {CLAIM} 2>/dev/null; then rm -f {CLAIM}; fi"


def on_all(shells: Sequence[HeadShell], line: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """Run a shell line on each machine at once; return what each said, or the error that it gave."""

    def one(shell: HeadShell) -> Any:
        try:
            return shell.run(line, timeout_s=timeout_s)
        except (Unreachable, LaunchError) as error:
            return error

    with ThreadPoolExecutor(max_workers=min(32, len(shells))) as pool:
        return dict(zip((shell.host for shell in shells), pool.map(one, shells), strict=True))


def claim(
    shells: Sequence[HeadShell], name: str, command: str, by: str, *, clock: Callable[[], float] = time.time
) -> None:
    """Make all machines this launch's, or none.

    Raises:
        LaunchError: machines are in use, cannot be reached or lack something; each is named.
    """
    looks = on_all(shells, LOOK)
    problems = [
        f"{host} cannot be reached by ssh: {said}"
        if isinstance(said, Exception)
        else problem_of(host, said, name=name, now_s=clock())
        for host, said in looks.items()
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise LaunchError("\n".join(found))
    claimed = on_all(shells, claim_line(name, command, by, now_s=clock()))
    lost = [host for host, said in claimed.items() if isinstance(said, Exception)]
    if lost:
        release(shells, name)
        raise LaunchError(f"{' '.join(lost)}: another launch took it at the same moment")


def release(shells: Sequence[HeadShell], name: str) -> None:
    """Give back those machines that are this launch's and can be reached."""
    on_all(shells, release_line(name))
