"""Which of several lost ranks is the cause, and how it is told. Pure."""

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


MAX_TEXT = 50_000
"""The most characters of one line of a traceback; an exception's message is one."""
MAX_TRACEBACK = 200_000


def shorten(text: str, limit: int) -> str:
    """Return a text with its two ends where it is longer than ``limit`` characters.

    >>> shorten("the start " + "x" * 1000 + " the end", 20).splitlines()
    ['the start ', '[... 998 characters left out ...]', 'xx the end']
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def traceback_text(pieces: Sequence[str]) -> str:
    """Return a traceback in one text: each exception's message, and the whole, no longer than is read."""
    return shorten("".join(shorten(piece, MAX_TEXT) for piece in pieces), MAX_TRACEBACK)


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


def death_text(error: BaseException, status: str = "") -> str:
    """Return what Ray knows of an actor's death, without its stack, after how the process ended if known.

    >>> death_text(RuntimeError("The actor died."), "killed by SIGSEGV")
    'killed by SIGSEGV. The actor died.'
    """
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [
        line for line in lines if line and not line.startswith(("class_name", "actor_id", "namespace"))
    ]
    return " ".join([f"{status}.", *telling] if status else telling)
