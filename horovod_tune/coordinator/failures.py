"""Finds out which of several lost ranks is the cause, and writes the error. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_tune.error_text import encodable
from horovod_tune.messages import Failed, FailureKind

_CONSEQUENCES = (FailureKind.DISCONNECTED,)
# Of a world of 512 that breaks, nobody reads the names of all.
_NAMED = 3


def needs_cause(failures: Sequence[Failed]) -> bool:
    """Whether all that is known so far is that ranks lost each other."""
    return all(failure.kind in _CONSEQUENCES for failure in failures)


def explain(failures: Sequence[Failed], *, world_size: int) -> str:
    """Return the error's text: the cause, who went with it, the cause's own traceback with its last line.

    >>> lost = Failed(0, "a", FailureKind.DISCONNECTED, "HorovodInternalError")
    >>> died = Failed(1, "b", FailureKind.DIED, "process 7: killed")
    >>> print(explain([lost, died], world_size=2))
    rank 1 of 2 on b died:
    (rank 0 on a lost contact with the others)
    process 7: killed
    """
    ordered = sorted(failures, key=lambda failure: (failure.kind.value, failure.rank))
    cause, rest = ordered[0], ordered[1:]
    others = [
        f"rank {each.rank} on {each.host} {_VERBS[each.kind]}" for each in rest if each.rank != cause.rank
    ]
    if len(others) > _NAMED:
        others[_NAMED:] = [f"{len(others) - _NAMED} more ranks went with them"]
    lines = [f"rank {cause.rank} of {world_size} on {cause.host} {_VERBS[cause.kind]}:"]
    if others:
        lines.append(f"({'; '.join(others)})")
    lines.append(cause.traceback.rstrip())
    # Not every text is a training function's: a process that could not begin says why in its own words.
    return encodable("\n".join(lines))


def verb_of(kind: FailureKind) -> str:
    """Return what is said of a rank that was lost in this way: "died", "stopped responding"."""
    return _VERBS[kind]


_VERBS = {
    FailureKind.RAISED: "failed",
    FailureKind.DIED: "died",
    FailureKind.SILENT: "stopped responding",
    FailureKind.RETURNED: "returned from the training function, while others wait in a collective for it",
    FailureKind.STALLED: "waited in a collective that not all ranks entered",
    FailureKind.HUNG: "hung",
    FailureKind.DISCONNECTED: "lost contact with the others",
}
