"""The texts of failures, in ranks and in the coordinator: shortened, and what Ray knows of a death."""

from __future__ import annotations

from collections.abc import Sequence

# The most characters of one line of a traceback; an exception's message is one.
MAX_TEXT = 50_000


MAX_TRACEBACK = 200_000


def shorten(text: str, limit: int) -> str:
    """Return a text, or only its two ends if it is longer than ``limit`` characters.

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


def encodable(text: str) -> str:
    r"""Return a text with its lone surrogates escaped, which Python makes of file names that are not UTF-8.

    Ray ends the process that raises an error with one in its text, and msgpack refuses it.

    >>> encodable("caf\udce9.txt, é")
    'caf\\udce9.txt, é'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def death_text(error: BaseException) -> str:
    r"""Return what Ray knows of an actor's death, without the lines that only name the actor.

    >>> death_text(RuntimeError("The actor died.\n\tclass_name: A\n\tpid: 7"))
    'The actor died. pid: 7'
    """
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [
        line for line in lines if line and not line.startswith(("class_name", "actor_id", "namespace"))
    ]
    return " ".join(telling)
