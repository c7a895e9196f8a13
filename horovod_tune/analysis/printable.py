"""Text from an experiment's files on its way to a terminal: what would steer the terminal is made visible."""

from __future__ import annotations

import re

# Control characters (an escape sequence can clear the screen, set the clipboard, hide a line), and those that
# turn the direction of text round, so that a line reads as another one.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile("[\t\n]")


def printable(text: str) -> str:
    r"""Return a text of any number of lines with its control characters written out.

    >>> print(printable("\x1b[2J" + "gone"))
    \x1b[2Jgone
    """
    return _STEERING.sub(_written_out, text)


def one_line(text: str) -> str:
    r"""Return a text that stays within its line.

    >>> print(one_line("a" + chr(10) + "b"))
    a\nb
    """
    return _BREAKS.sub(_written_out, printable(text))


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
