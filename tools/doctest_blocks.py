"""For the documentation site: shows examples in docstrings (`>>> …` to the next empty line) as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.M)


class DoctestBlocks(griffe.Extension):
    """Puts doctests between fences: Markdown would read `>>>` as a quotation and `[1, 2]` as a link."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = _DOCTEST.sub(r"\n\1```pycon\n\g<0>\n\1```\n", obj.docstring.value)
