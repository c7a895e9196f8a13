"""Finds out which of several lost ranks is the cause, and writes the error. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_tune.messages import Failed, FailureKind

_CONSEQUENCES = (FailureKind.DISCONNECTED,)


def needs_cause(failures: Sequence[Failed]) -> bool:
    """Whether all that is known so far is that ranks lost each other."""
    return all(failure.kind in _CONSEQUENCES for failure in failures)


def explain(failures: Sequence[Failed], *, world_size: int) -> str:
    """Return the error's text: the cause first, with its own traceback, then who went with it.

    >>> lost = Failed(0, "a", FailureKind.DISCONNECTED, "HorovodInternalError")
    >>> died = Failed(1, "b", FailureKind.DIED, "process 7: killed")
    >>> print(explain([lost, died], world_size=2))
    rank 1 of 2 on b died:
    process 7: killed
    (rank 0 on a lost contact with the others)
    """
    ordered = sorted(failures, key=lambda failure: (failure.kind.value, failure.rank))
    cause, rest = ordered[0], ordered[1:]
    lines = [
        f"rank {cause.rank} of {world_size} on {cause.host} {_VERBS[cause.kind]}:",
        cause.traceback.rstrip(),
    ]
    lines += [
        f"(rank {each.rank} on {each.host} {_VERBS[each.kind]})" for each in rest if each.rank != cause.rank
    ]
    return "\n".join(lines)


def verb_of(kind: FailureKind) -> str:
    """Return what is said of a rank that was lost in this way: "died", "fell silent"."""
    return _VERBS[kind]


_VERBS = {
    FailureKind.RAISED: "failed",
    FailureKind.DIED: "died",
    FailureKind.SILENT: "fell silent",
    FailureKind.STALLED: "waited in a collective that not all ranks entered",
    FailureKind.HUNG: "hung",
    FailureKind.DISCONNECTED: "lost contact with the others",
}
