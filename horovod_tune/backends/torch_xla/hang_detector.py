"""Runs in the host actor: decides if its ranks hang, from their activity, and writes the error. Pure.

Nothing on a TPU reports that a collective waits for a rank that never enters it. From outside, only
inactivity can be observed: no report, no torch_xla operation, no computation on the host. A compilation
computes, and a step on the device is an operation, so a slow start is not a hang.
"""

from __future__ import annotations

from collections.abc import Mapping

from horovod_tune.session import session

# How often the activity is compared; more often if the limit is short. A rank that computes for one second
# every few minutes still counts as active.
CHECK_INTERVAL_S = 60.0
# The share of one CPU, and the CPU time, that all ranks of a host together may use and still be inactive:
# heartbeats take some, and the kernel counts in units of 0.01 s.
BUSY_SHARE = 0.01
LEAST_CPU_S = 0.1


class Inactivity:
    """Measures for how long the ranks of a host have done nothing."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # Seconds that the coordinator has listened since the last update. It does not listen while Tune
        # handles a report: ranks that wait for Tune do not hang.
        self.listened_s = 0.0
        self._before: tuple[int, float] | None = None
        self._inactive_s = 0.0

    def restart(self) -> None:
        """Start counting again: a rank has sent something, or Tune has answered a report."""
        self._before, self.listened_s = None, 0.0

    def update(self, operations: int, cpu_s: float) -> bool:
        """Record the activity so far; return True if the ranks have been inactive for the whole limit.

        Args:
            operations: torch_xla's count.
            cpu_s: the CPU time of the ranks and of their child processes.
        """
        before, self._before = self._before, (operations, cpu_s)  # another thread may call `restart`
        listened_s, self.listened_s = self.listened_s, 0.0
        # A decrease is activity too: a child process of a rank has ended.
        if (
            before is None
            or operations != before[0]
            or abs(cpu_s - before[1]) > max(LEAST_CPU_S, BUSY_SHARE * listened_s)
        ):
            self._inactive_s = 0.0
            return False
        self._inactive_s += listened_s
        return self._inactive_s >= self._limit_s


def waits_in_report(stack: str) -> bool:
    """Return True if a training function's stack shows that it waits in `report`."""
    return any(f'File "{session.__file__}"' in line and ", in report" in line for line in stack.splitlines())


def explain(stacks: Mapping[int, str | None], limit_s: float) -> tuple[int, str] | None:
    """Return which rank hangs and the error's text, or None if every rank waits in its report.

    A rank that waits in its report waits for rank 0 on another host, or for Tune. The error names one of the
    other ranks, at the least common place in the code: usually the rest wait for it.

    Args:
        stacks: the stack of each rank's training function; None for a rank that sent none in time.
        limit_s: how long the ranks have been inactive.

    >>> rank, text = explain({0: "sync()", 1: "sync()", 2: "queue.get()"}, 1800)
    >>> print(rank, text)
    2 nothing happened for stall_timeout_s=1800 s: no report, no torch_xla operation, no computation.
    rank 2 is at:
    queue.get()
    ranks 0, 1 are at:
    sync()
    """
    groups: dict[str | None, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank], []).append(rank)
    ordered = sorted(groups, key=lambda at: (waits_in_report(at or ""), len(groups[at]), groups[at]))
    if not ordered or waits_in_report(ordered[0] or ""):
        return None
    nothing = "no report, no torch_xla operation, no computation."
    lines = [f"nothing happened for stall_timeout_s={limit_s:g} s: {nothing}"]
    for at in ordered:
        noun, verb = ("rank", "is") if len(groups[at]) == 1 else ("ranks", "are")
        who = f"{noun} {', '.join(map(str, groups[at]))}"
        lines.append(f"{who} did not send a stack" if at is None else f"{who} {verb} at:\n{at.rstrip()}")
    return groups[ordered[0]][0], "\n".join(lines)
