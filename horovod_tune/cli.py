"""The command `horovod-tune`: each subcommand is registered and run by its own module."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

import horovod_tune
from horovod_tune.analysis.encoding import OTHER_SIGNS

# Each has `add_parsers(subparsers)`. The parsers that it adds set `run`, a function that takes the parsed
# arguments and returns an exit status. Only `run` imports more than the standard library, so that
# `horovod-tune --help` is quick, and `doctor` works where everything else is missing.
COMMAND_MODULES = (
    "horovod_tune.analysis.analysis_commands",
    "horovod_tune.doctor.command",
    "horovod_tune.horovod_build.command",
)

# The extra that installs a module.
EXTRAS = {"jinja2": "analysis", "plotly": "analysis", "rich": "analysis"}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="horovod-tune",
        description="Tune the hyperparameters of a Horovod or torch.distributed function with Ray Tune.",
    )
    parser.add_argument("--version", action="version", version=horovod_tune.__version__)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMAND_MODULES:
        importlib.import_module(name).add_parsers(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors=OTHER_SIGNS)
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ImportError as error:
        library = (error.name or "").split(".")[0]
        if library == "horovod_tune":
            raise
        cure = "Run `horovod-tune doctor`: it names all that is missing or broken, with the cures."
        if library in EXTRAS and isinstance(error, ModuleNotFoundError):
            cure = f"Run `pip install 'horovod_tune[{EXTRAS[library]}]'`."
        print(f"horovod-tune: this command cannot be run: {error}. {cure}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe: Python's flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\nhorovod-tune: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
