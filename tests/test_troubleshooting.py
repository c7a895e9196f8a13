"""docs/troubleshooting.md has an entry for every error that this package raises, and for nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from horovod_tune.coordinator.failures import _VERBS
from horovod_tune.messages import FailureKind

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()


def our_errors() -> set[str]:
    """Return the names of the package's classes that derive from HorovodTuneError, and of that itself."""
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "horovod_tune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {
                    each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")
                    for each in node.bases
                }
                bases.setdefault(node.name, set()).update(names)
    found = {"HorovodTuneError"}
    while more := {name for name, own in bases.items() if own & found} - found:
        found |= more
    return found


def test_every_error_has_its_entry():
    entries = {name.strip() for line in re.findall(r"^### (.+)$", TEXT, re.M) for name in line.split(",")}
    assert our_errors() == {name for name in entries if name.isidentifier()}


def test_every_way_in_which_a_rank_can_be_lost_is_explained():
    assert set(_VERBS) == set(FailureKind)
    for words in _VERBS.values():
        assert f"| `{words}` |" in TEXT
