"""The texts of failures are cut to what is read, and docs/troubleshooting.md has an entry for every error."""

from __future__ import annotations

import ast
import builtins
import re
import traceback
from pathlib import Path

import pytest
from ray import tune

from horovod_tune import errors as error_text
from horovod_tune.coordinator.failures import VERBS
from horovod_tune.messages import FailureKind

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()


# Exceptions that never leave the package, and what catches each.
KEPT_INSIDE = {
    "StopTraining": "unwinds the function of a trial that Tune has stopped",
    "WorldChanges": "unwinds the function of an elastic trial, which is then called again",
    "WorldBroken": "a Horovod rank raises Horovod's own error in its place",
    "UnusableFile": "one of an analysis's `problems`",
}


def below(found: set[str]) -> set[str]:
    """Return the names of the package's classes that derive from those in ``found``, and these."""
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "horovod_tune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(each).rpartition(".")[2] for each in node.bases}
                bases.setdefault(node.name, set()).update(names)
    while more := {name for name, own in bases.items() if own & found} - found:
        found = found | more
    return found


OURS = below({"HorovodTuneError"})


def test_catching_our_errors_catches_every_one_that_a_caller_meets():
    kinds = {name: each for name, each in vars(builtins).items() if isinstance(each, type)}
    builtin = {name for name, each in kinds.items() if issubclass(each, BaseException)}
    assert below(builtin) - builtin - OURS == set(KEPT_INSIDE)


def test_rays_error_for_a_bound_that_is_text_has_an_entry():
    with pytest.raises(TypeError) as raised:
        tune.loguniform("1e-3", 1)
    assert f'### "{raised.value}"\n' in TEXT


def test_every_error_has_its_entry():
    entries = {name.strip() for line in re.findall(r"^### (.+)$", TEXT, re.M) for name in line.split(",")}
    assert {name for name in entries if name.isidentifier()} == OURS


def test_every_way_in_which_a_rank_can_be_lost_is_explained():
    assert set(VERBS) == set(FailureKind)
    for words in VERBS.values():
        assert f"| `{words}` |" in TEXT


def test_huge_messages_are_cut_with_their_two_ends_and_the_chain_around_them_kept():
    with pytest.raises(ValueError, match="the start") as raised:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise ValueError("the start " + "x" * (5 << 20) + " the end") from cause
    text = error_text.traceback_text(traceback.format_exception(raised.value))
    assert len(text) < 2 * error_text.MAX_TEXT
    for kept in ("KeyError: 'the cause'", "direct cause", "ValueError: the start", "left out", "the end"):
        assert kept in text
    text = error_text.traceback_text(["first\n", *["y" * (1 << 20)] * 20, "last\n"])  # a long chain
    assert len(text) < error_text.MAX_TRACEBACK + 100
    assert text.startswith("first") and text.endswith("last\n")
