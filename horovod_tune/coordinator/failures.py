"""Finds out which of several lost ranks is the cause, and writes the error. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from horovod_tune.errors import encodable
from horovod_tune.messages import Failed, FailureKind

_CONSEQUENCES = (FailureKind.DISCONNECTED,)
# More names would hide the cause when a world of 512 ranks breaks.
_NAMED = 3


def needs_cause(failures: Sequence[Failed]) -> bool:
    """Return True if so far ranks are only known to have lost each other."""
    return all(failure.kind in _CONSEQUENCES for failure in failures)


def explain(failures: Sequence[Failed], *, world_size: int) -> str:
    """Return the error's text: the cause, other lost ranks, the cause's own traceback with its last line.

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
    # Not every text has a traceback: a process that could not begin has only a message.
    return encodable("\n".join(lines))


def add_awaited_ranks(
    failures: Sequence[Failed],
    awaited: Mapping[int, str],
    hosts: Sequence[str],
    *,
    running: Container[int],
    returned: Container[int] = (),
    stacks: Mapping[int, str] | None = None,
) -> list[Failed]:
    """Add to ranks that gave up waiting in a collective which ranks they have waited for.

    Args:
        failures: what is known.
        awaited: by rank, the collectives in which others wait for it.
        hosts: of each rank, by rank.
        running: the ranks whose training function still runs.
        returned: those whose training function has returned.
        stacks: where the training function of a running rank is, by rank.

    >>> stalled = Failed(0, "a", FailureKind.STALLED, "HorovodInternalError")
    >>> _, hung = add_awaited_ranks(
    ...     [stalled], {1: "gradient.7"}, ["a", "b"], running={1}, stacks={1: "  line 3, in train\\n"}
    ... )
    >>> print(explain([stalled, hung], world_size=2))
    rank 1 of 2 on b hung:
    (rank 0 on a waited in a collective that not all ranks entered)
    Its training function is at:
      line 3, in train
    it did not enter gradient.7, in which the others waited
    >>> add_awaited_ranks([stalled], {1: "gradient.7"}, ["a", "b"], running={}, returned={1})[1].kind.name
    'RETURNED'
    >>> add_awaited_ranks([stalled], {1: "gradient.7"}, ["a", "b"], running={})[0].traceback
    'HorovodInternalError\\nrank 1 did not enter gradient.7'
    """
    found = list(failures)
    stalled = next((n for n, each in enumerate(found) if each.kind is FailureKind.STALLED), None)
    if stalled is None:
        return found
    for rank, collectives in awaited.items():
        if rank in running:
            stack = (stacks or {}).get(rank)
            where = f"Its training function is at:\n{stack}" if stack else ""
            text = f"{where}it did not enter {collectives}, in which the others waited"
            found.append(Failed(rank, hosts[rank], FailureKind.HUNG, text))
        elif rank in returned and rank < len(hosts):
            found.append(returned_early(rank, hosts[rank], collectives))
    if len(found) == len(failures) and awaited:  # they all wait: in different collectives
        missing = "; ".join(f"rank {rank} did not enter {each}" for rank, each in awaited.items())
        found[stalled] = replace(found[stalled], traceback=f"{found[stalled].traceback.rstrip()}\n{missing}")
    return found


def returned_early(rank: int, host: str, collectives: str) -> Failed:
    """Return the failure of a rank that has returned while others wait for it in ``collectives``."""
    text = f"the others wait for rank {rank} in {collectives}: every rank has to call the same collectives"
    return Failed(rank, host, FailureKind.RETURNED, text)


def failure_verb(kind: FailureKind) -> str:
    """Return the verb for a rank that was lost in this way: "died", "stopped responding"."""
    return _VERBS[kind]


_VERBS = {
    FailureKind.RAISED: "failed",
    FailureKind.DIED: "died",
    FailureKind.UNRESPONSIVE: "stopped responding",
    FailureKind.RETURNED: "returned from the training function, while others wait in a collective for it",
    FailureKind.STALLED: "waited in a collective that not all ranks entered",
    FailureKind.HUNG: "hung",
    FailureKind.DISCONNECTED: "lost contact with the others",
}
