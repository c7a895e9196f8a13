"""What a patch is: an exact text that must be found exactly once, and what takes its place.

A text that is not found means that this is another Horovod than the one the change was written for. That
is an error: a build without its patches would fail later, or worse, run and misbehave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.horovod_build import BuildError


@dataclass(frozen=True)
class Patch:
    """One replacement in one file of Horovod's source tree."""

    name: str
    why: str
    path: str
    before: str
    after: str

    def applied_to(self, text: str) -> str:
        """Return `text` with the replacement made.

        Raises:
            BuildError: `before` is not there, or more than once.
        """
        found = text.count(self.before)
        if found != 1:
            raise BuildError(
                f"The patch {self.name!r} expects this text once in Horovod's {self.path}, "
                f"found it {found} times:\n"
                f"{self.before.rstrip()}\n"
                "The patches were written for Horovod 0.28.1: leave out --horovod-version, or give 0.28.1."
            )
        return text.replace(self.before, self.after)


def apply(patches: Iterable[Patch], source: Path) -> None:
    """Change the files under `source`: all of them, or none where one does not match."""
    changed: dict[Path, str] = {}
    for patch in patches:
        path = source / patch.path
        if path not in changed:
            if not path.is_file():
                raise BuildError(
                    f"The patch {patch.name!r} is for {patch.path}, which Horovod's source lacks."
                )
            changed[path] = path.read_text()
        changed[path] = patch.applied_to(changed[path])
    for path, text in changed.items():
        path.write_text(text)
