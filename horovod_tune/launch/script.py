"""What can be told of the user's command before anything is rented: the script is read, not run. Pure.

`python -m horovod_tune.launch.script SCRIPT` says by its exit status whether the script resumes.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.launch.values import LaunchError

# Names that a script uses which can go on where an experiment was.
RESUMING = {"resume_or_start", "restore", "can_restore"}


@dataclass(frozen=True)
class Script:
    """The command after ``--``: ``python SCRIPT.py ARGUMENTS…``."""

    python: str
    path: Path
    arguments: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The script's folder, which is the job's working directory."""
        return self.path.resolve().parent

    @property
    def command(self) -> list[str]:
        """The command as it runs in the working directory."""
        return [self.python, self.path.name, *self.arguments]


def read_command(command: Sequence[str], *, launch_options: Iterable[str] = ()) -> Script:
    """Return the script that `command` names, checked as far as reading it allows.

    Raises:
        LaunchError: it is not a Python script on this machine, does not compile, or lacks an option given.
    """
    if len(command) < 2 or Path(command[0]).name not in ("python", "python3") or command[1].startswith("-"):
        raise LaunchError(f"after -- there must be `python SCRIPT.py …`, got {shlex.join(command)!r}")
    script = Script(Path(command[0]).name, Path(command[1]), tuple(command[2:]))
    if not script.path.is_file():
        raise LaunchError(f"after -- there must be a script, got {command[1]!r}: no such file")
    try:
        tree = ast.parse(script.path.read_bytes(), filename=str(script.path))
    except SyntaxError as error:
        raise LaunchError(f"{script.path} does not compile: line {error.lineno}: {error.msg}") from None
    known = argparse_options(tree)
    unknown = unknown_options(script.arguments, known) if known is not None else []
    if unknown:
        cure = (
            f"{unknown[0]} is an option of horovod-tune launch: give it before --"
            if unknown[0] in set(launch_options)
            else f"its options are {' '.join(sorted(known or ()))}"
        )
        raise LaunchError(f"{script.path} has no option {unknown[0]}; {cure}")
    return script


def argparse_options(tree: ast.AST) -> set[str] | None:
    """Return the options that a script's one argparse parser takes, or None where reading cannot tell.

    >>> script = "p = argparse.ArgumentParser(); p.add_argument('--lr', type=float); p.parse_args()"
    >>> sorted(argparse_options(ast.parse(script)))
    ['--help', '--lr', '-h']
    """
    parsers, options = 0, {"-h", "--help"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "ArgumentParser":
            parsers += 1
            if any(
                word.arg in ("parents", "prefix_chars", "fromfile_prefix_chars") for word in node.keywords
            ):
                return None
        elif name in ("parse_known_args", "add_subparsers", "parse_known_intermixed_args"):
            return None
        elif name == "add_argument":
            for word in node.args:
                if not (isinstance(word, ast.Constant) and isinstance(word.value, str)):
                    return None
                options.add(word.value)
            if any("BooleanOptionalAction" in ast.dump(word.value) for word in node.keywords):
                options |= {"--no-" + option[2:] for option in options if option.startswith("--")}
            if any("REMAINDER" in ast.dump(word.value) for word in node.keywords):
                return None
    return {option for option in options if option.startswith("-")} if parsers == 1 else None


def unknown_options(arguments: Sequence[str], known: set[str]) -> list[str]:
    """Return the options among `arguments` that are not `known`; argparse takes beginnings as well.

    >>> unknown_options(["--num-samp=3", "--epoch", "2", "--nope", "-1.5"], {"--num-samples", "--epochs"})
    ['--nope']
    """
    found = []
    for argument in arguments:
        if argument == "--":
            break
        option = argument.partition("=")[0]
        if option.startswith("--") and not any(name.startswith(option) for name in known):
            found.append(option)
    return found


def can_resume(path: Path) -> bool:
    """Tell whether a script, by the names that it uses, continues an experiment when it runs again.

    Raises:
        OSError: it cannot be read.
        SyntaxError: it does not compile.
    """
    tree = ast.parse(path.read_bytes(), filename=str(path))
    names = {
        getattr(node, "id", getattr(node, "attr", getattr(node, "name", "")))
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute, ast.alias))
    }
    return bool(names & RESUMING)


if __name__ == "__main__":
    raise SystemExit(0 if can_resume(Path(sys.argv[1])) else 1)
