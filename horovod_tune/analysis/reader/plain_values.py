"""What Tune's files hold, as plain data of a bounded size and depth.

Tune's JSON and the pickles within may come from anywhere: nested so deep that every later step fails, with
a billion values that are one and the same list, or with texts that are no Unicode. `plain` cuts such parts
off, says so, and leaves the rest as it is.
"""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any

from horovod_tune.analysis.reader.inert_pickle import Inert, look

DEEPEST = 32
_MOST = 20_000
_LONGEST = 200_000
_NEEDS_CARE = re.compile(r"\\u[dD][89a-fA-F]|\d{300}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """Return what JSON holds, whatever its size. Raises `ValueError`, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(data: bytes) -> tuple[Any, list[str]]:
    """Return what JSON in UTF-8 holds as plain data, and what had to be cut off or replaced.

    Raises `ValueError` for anything else, and for what is nested too deeply to be read at all.
    """
    cut: list[str] = []
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        cut.append("text that is not UTF-8")
    value = parse_json(text)
    if len(text) > _LONGEST or text.count("{") + text.count("[") > DEEPEST or _NEEDS_CARE.search(text):
        value = _Plainer(cut, follow_pickles=False).plain(value)
    return value, cut


def plain(value: Any, cut: list[str] | None = None) -> Any:
    """Turn whatever a state file holds into plain data: objects become text such as `<torch.optim.Adam>`.

    What had to be cut off is told in `cut`.
    """
    return _Plainer([] if cut is None else cut, follow_pickles=True).plain(value)


def text_or_none(value: Any) -> str | None:
    """A short text that can be written out; None for anything else."""
    return _unicode(value)[:300] if isinstance(value, str) else None


def number_or_none(value: Any) -> float | None:
    """A number as a float; None for anything else, and for one that no float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def _unicode(text: str) -> str:
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _Plainer:
    def __init__(self, cut: list[str], *, follow_pickles: bool):
        self._cut = cut
        self._left = _MOST
        self._follow_pickles = follow_pickles

    def _say(self, what: str) -> str:
        if what not in self._cut:
            self._cut.append(what)
        return f"<{what}>"

    def plain(self, value: Any, depth: int = 0) -> Any:
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int):
            return value if value.bit_length() < 1000 else self._say("a number of more than 300 digits")
        if isinstance(value, (Inert, type)):
            return f"<{_name_of(value)}>"
        self._left -= 1 + (len(value) // 100 if hasattr(value, "__len__") else 0)
        if depth >= DEEPEST:
            return self._say(f"nested more than {DEEPEST} deep")
        if self._left <= 0:
            return self._say(f"more than {_MOST:,} lists and dictionaries")
        if isinstance(value, dict):
            return self._dictionary(value, depth)
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            return [self.plain(inner, depth + 1) for inner in value]
        return f"<{type(value).__name__}>"

    def _dictionary(self, value: dict[Any, Any], depth: int) -> Any:
        if self._follow_pickles and value.get("_type") == "CLOUDPICKLE_FALLBACK":
            try:
                return self.plain(look(bytes.fromhex(value.get("value", ""))), depth + 1)
            except (ValueError, TypeError):
                return self._say("not readable")
        made: dict[str, Any] = {}
        for number, (key, inner) in enumerate(value.items()):
            if number >= _MOST:
                self._say(f"more than {_MOST:,} entries of one dictionary")
                break
            name = key if isinstance(key, str) else str(self.plain(key, DEEPEST - 1))
            made[self._text(name)] = self.plain(inner, depth + 1)
        return made

    def _text(self, text: str) -> str:
        if len(text) > _LONGEST:
            self._say(f"a text of more than {_LONGEST:,} characters")
            text = text[:_LONGEST] + "…"
        if not text.isascii() and _SURROGATE.search(text):
            self._say("text that is not Unicode")
            text = _unicode(text)
        return text


def _name_of(value: Any) -> str:
    name = _unicode(str(getattr(value, "name", value)))[:300]
    if "_make_function" in name or "_make_skeleton_class" in name:
        return "function" if "function" in name else "class"
    return name.replace(":", ".")
