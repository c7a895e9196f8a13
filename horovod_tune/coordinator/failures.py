"""Finds which of several lost ranks is the cause, and writes the error. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from horovod_tune.errors import encodable
from horovod_tune.messages import Failed, FailureKind

# An error names at most this many lost ranks besides the cause, which hundreds of names would hide.
_MAX_NAMED = 3
VERBS = {
    FailureKind.RAISED: "failed",
    FailureKind.DIED: "died",
    FailureKind.UNRESPONSIVE: "stopped responding",
    FailureKind.RETURNED: "returned from the training function, while others wait for it in a collective",
    FailureKind.AHEAD: "reports more often than rank 0",
    FailureKind.STALLED: "waited in a collective that not all ranks entered",
    FailureKind.HUNG: "hung",
    FailureKind.DISCONNECTED: "lost contact with the others",
}


def needs_cause(failures: Sequence[Failed]) -> bool:
    """Return True if all that is known is that ranks lost contact with each other."""
    return all(failure.kind is FailureKind.DISCONNECTED for failure in failures)


def explain(failures: Sequence[Failed], *, world_size: int) -> str:
    """Return the error's text: the cause, the other lost ranks, and the cause's traceback.

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
        f"rank {each.rank} on {each.host} {VERBS[each.kind]}" for each in rest if each.rank != cause.rank
    ]
    if len(others) > _MAX_NAMED:
        others[_MAX_NAMED:] = [f"{len(others) - _MAX_NAMED} more ranks were lost"]
    lines = [f"rank {cause.rank} of {world_size} on {cause.host} {VERBS[cause.kind]}:"]
    if others:
        lines.append(f"({'; '.join(others)})")
    lines.append(cause.traceback.rstrip())
    return encodable("\n".join(lines))


def add_awaited_ranks(
    failures: Sequence[Failed],
    awaited: Mapping[int, str],
    hosts: Mapping[int, str],
    *,
    running: Container[int],
    returned: Container[int] = (),
    stacks: Mapping[int, str],
) -> list[Failed]:
    """Return ``failures``, and the failures of ranks that a stalled rank waited for.

    The others are by rank: the collectives in which others wait for it, its host, and the stack of its
    training function, which is ``running`` or has ``returned``.

    >>> stalled = Failed(0, "a", FailureKind.STALLED, "HorovodInternalError")
    >>> hosts, stacks = {0: "a", 1: "b"}, {1: "  line 3, in train\\n"}
    >>> _, hung = add_awaited_ranks([stalled], {1: "gradient.7"}, hosts, running={1}, stacks=stacks)
    >>> print(explain([stalled, hung], world_size=2))
    rank 1 of 2 on b hung:
    (rank 0 on a waited in a collective that not all ranks entered)
    Its training function is at:
      line 3, in train
    it did not enter gradient.7, in which the others waited
    >>> add_awaited_ranks([stalled], {1: "gradient.7"}, hosts, running={}, returned={1}, stacks={})[1].kind
    <FailureKind.RETURNED: 4>
    >>> add_awaited_ranks([stalled], {1: "gradient.7"}, hosts, running={}, stacks={})[0].traceback
    'HorovodInternalError\\nrank 1 did not enter gradient.7'
    """
    found = list(failures)
    stalled = next((n for n, each in enumerate(found) if each.kind is FailureKind.STALLED), None)
    if stalled is None:
        return found
    for rank, collectives in awaited.items():
        if rank not in hosts:
            continue
        if rank in running:
            where = f"Its training function is at:\n{stacks[rank]}" if stacks.get(rank) else ""
            text = f"{where}it did not enter {collectives}, in which the others waited"
            found.append(Failed(rank, hosts[rank], FailureKind.HUNG, text))
        elif rank in returned:
            found.append(returned_early(rank, hosts[rank], collectives))
    if len(found) == len(failures) and awaited:  # all ranks wait, in different collectives
        missing = "; ".join(f"rank {rank} did not enter {each}" for rank, each in awaited.items())
        found[stalled] = replace(found[stalled], traceback=f"{found[stalled].traceback.rstrip()}\n{missing}")
    return found


def returned_early(rank: int, host: str, collectives: str, waiting: Sequence[Failed] = ()) -> Failed:
    """Return the failure of a rank that returned while others wait for it in ``collectives``.

    ``waiting`` are the failures of the others; the first one's traceback shows where it waited.
    """
    text = f"the others wait for rank {rank} in {collectives}: every rank has to call the same collectives"
    for each in waiting[:1]:
        text += f"\nrank {each.rank} waited at:\n{each.traceback}"
    return Failed(rank, host, FailureKind.RETURNED, text)
