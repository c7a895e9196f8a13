"""Applies patches to Horovod's source: each text that one replaces must be found exactly once in its file.

A text that is not found means another Horovod than the one that the patches were written for. That is an
error: a build without its patches would fail later or, worse, run and misbehave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.horovod_build import BuildError


@dataclass(frozen=True)
class Hunk:
    """One replacement in one file of Horovod's source tree."""

    patch: str
    path: str
    before: str
    after: str

    def applied_to(self, text: str) -> str:
        """Return `text` with the replacement made.

        Raises:
            BuildError: `before` is not in it exactly once.
        """
        found = text.count(self.before)
        if found != 1:
            raise BuildError(
                f"{self.patch} expects this text once in Horovod's {self.path}, "
                f"found it {found} times:\n{self.before.rstrip()}\n"
                "The patches were written for Horovod 0.28.1: give --source its archive, or leave it out."
            )
        return text.replace(self.before, self.after)


def hunks(patch: Path) -> Iterator[Hunk]:
    """Yield the hunks of a unified diff; text before its first file is skipped."""
    path = ""
    lines: list[str] | None = None
    for line in [*patch.read_text().splitlines(keepends=True), "@@\n"]:
        if line.startswith(("--- ", "+++ ", "@@")) and lines:
            before, after = ("".join(part[1:] for part in lines if part[0] in kept) for kept in (" -", " +"))
            yield Hunk(patch.name, path, before, after)
            lines = None
        if line.startswith("+++ "):
            path = line.rstrip("\n").partition("/")[2]
        elif line.startswith("@@"):
            lines = []
        elif lines is not None:
            lines.append(line)


def apply(patches: Iterable[Path], source: Path) -> None:
    """Change the files under `source`: all of them, or none if one patch does not match."""
    changed: dict[Path, str] = {}
    for hunk in (hunk for patch in patches for hunk in hunks(patch)):
        path = source / hunk.path
        if path not in changed:
            if not path.is_file():
                raise BuildError(f"{hunk.patch} is for {hunk.path}, which Horovod's source lacks.")
            changed[path] = path.read_text()
        changed[path] = hunk.applied_to(changed[path])
    for path, text in changed.items():
        path.write_text(text)
