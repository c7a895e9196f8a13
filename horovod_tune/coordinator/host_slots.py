"""The hosts of a trial's ranks in Horovod's notation: `n1:2,n2:2` is ranks 0 and 1 on n1, 2 and 3 on n2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

_ONE = re.compile(r"([^\s:,]+):([1-9]\d{0,5})")


def write_slots(hosts: Sequence[str]) -> str:
    """Return the notation for ``hosts``, the host of each rank.

    >>> write_slots(["n1", "n1", "n2", "n2"])
    'n1:2,n2:2'
    """
    return ",".join(f"{host}:{len(list(ranks))}" for host, ranks in groupby(hosts))


def read_slots(text: str) -> list[tuple[str, int]] | None:
    """Return the hosts with their numbers of ranks, in the order of ranks; None if ``text`` is malformed.

    >>> read_slots("n1:2,n2:2")
    [('n1', 2), ('n2', 2)]
    >>> read_slots("n1"), read_slots("n1:0"), read_slots("n1:2,")
    (None, None, None)
    """
    found = [_ONE.fullmatch(each) for each in text.split(",")]
    return [(each[1], int(each[2])) for each in found if each] if all(found) else None
