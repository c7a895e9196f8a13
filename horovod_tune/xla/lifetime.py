"""Ends each rank with its parent, and the parent with its host actor: an orphan would lock the chip."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1

_USUAL_CAUSES = {
    signal.SIGSEGV: " (segmentation fault). On a TPU host the usual cause is a lack of memory: let the "
    "ranks load less, or share one model (horovod_tune.with_parameters).",
    signal.SIGKILL: ". The kernel killed it since memory ran out (`dmesg` shows it), or another process did.",
}


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send ``how`` to this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent had already ended


def describe_exit(code: int | None) -> str:
    """Return how a process ended, and the usual cause.

    >>> describe_exit(3)
    'it exited with status 3'
    >>> describe_exit(-15)
    'it was ended by SIGTERM'
    >>> describe_exit(-11)[:52]
    'it was ended by SIGSEGV (segmentation fault). On a T'
    >>> describe_exit(-9)[:53]
    'it was ended by SIGKILL. The kernel killed it since m'
    """
    if code is None:
        return "it ended in an unknown way"
    if code >= 0:
        return f"it exited with status {code}"
    number = signal.Signals(-code)
    return f"it was ended by {number.name}{_USUAL_CAUSES.get(number, '')}"


def first_to_die(exits: Mapping[int, int | None]) -> set[int]:
    """Return the pids of processes that ended by themselves; a pool then ends the others with SIGTERM.

    >>> first_to_die({10: -15, 11: -11, 12: -15})
    {11}
    >>> first_to_die({10: -15, 11: 0})  # os._exit(0) in the training function
    {11}
    >>> first_to_die({10: 0, 11: 7})
    {11}
    >>> first_to_die({10: -15}), first_to_die({10: None})
    ({10}, {10})
    """
    own = {pid for pid, code in exits.items() if code not in (0, None, -signal.SIGTERM)}
    left = {pid for pid, code in exits.items() if code == 0}
    return own or left or set(exits)
