"""For the documentation site: an example in a docstring (`>>> …` to the next empty line) is shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.M)


class DoctestBlocks(griffe.Extension):
    """Puts doctests between fences; Markdown would take `>>>` for a quotation and `[1, 2]` for a link."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = _DOCTEST.sub(r"\n\1```pycon\n\g<0>\n\1```\n", obj.docstring.value)
