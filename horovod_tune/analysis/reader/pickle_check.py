"""Refuses a pickle that would harm the process that opens it, before it is opened.

The interpreter's unpickler makes room for the largest place of its memo that a pickle names (64 GB for ten
bytes), and the hash of a tuple within a tuple within … has no limit of depth: both end the process. No pickle
that was ever written by `pickle` or `cloudpickle` comes near these bounds.
"""

from __future__ import annotations

import pickletools

_MAX_OPCODES = 3_000_000
_MAX_TUPLES_WITHIN = 500
_MARK = -1
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_GETS = ("GET", "BINGET", "LONG_BINGET")


def refuse_harmful(data: bytes) -> None:
    """Follow a pickle's stack without making anything. Raises `ValueError` that says what is wrong."""
    stack: list[int] = []  # of each object on the unpickler's stack: how many tuples deep it is
    memo: dict[int, int] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name, place = opcode.name, argument or 0
        if count > _MAX_OPCODES:
            raise ValueError(f"more than {_MAX_OPCODES:,} opcodes")
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _PUTS:
            if place > count:
                raise ValueError(f"its memo has a place {place} after {count} opcodes")
            memo[place] = stack[-1]
        elif name in _GETS:
            stack.append(memo.get(place, 0))
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DUP":
            stack.append(stack[-1])
        elif name in _TUPLES:
            taken = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(_one_deeper(taken))
        elif name == "TUPLE":
            stack.append(_one_deeper(_down_to_mark(stack)))
        elif name in ("POP_MARK", "APPENDS", "SETITEMS", "ADDITEMS"):
            _down_to_mark(stack)
        elif name in ("LIST", "DICT", "FROZENSET", "INST", "OBJ"):
            _down_to_mark(stack)
            stack.append(0)
        else:
            for _ in opcode.stack_before:
                stack.pop()
            # What a list or an object holds is not hashed with it; APPEND and BUILD leave one of their two.
            stack.extend(0 for _ in opcode.stack_after)


def _one_deeper(taken: list[int]) -> int:
    deep = 1 + max(taken, default=0)
    if deep > _MAX_TUPLES_WITHIN:
        raise ValueError(f"more than {_MAX_TUPLES_WITHIN} tuples within each other")
    return deep


def _down_to_mark(stack: list[int]) -> list[int]:
    taken = []
    while (top := stack.pop()) != _MARK:
        taken.append(top)
    return taken
