"""`horovod-tune install-horovod`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_tune.horovod_build import BuildError
from horovod_tune.horovod_build.build import GPU_CHOICES, HOROVOD_VERSION
from horovod_tune.horovod_build.install import Request, default_cache, install_horovod

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parsers(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `horovod-tune`."""
    parser = subparsers.add_parser(
        "install-horovod",
        help="compile Horovod for the installed torch and install it",
        description=f"Compiles Horovod {HOROVOD_VERSION} with Gloo for the torch of this environment and "
        "installs it. The wheel is cached for these versions of Horovod, torch, Python and the platform: "
        "another environment installs it in seconds. Needs a C++ compiler, make and Python's header files.",
    )
    option = parser.add_argument
    gpu = "nccl: collectives of CUDA tensors run on the GPU through NCCL; needs nvcc (default: none)"
    option("--gpu", choices=GPU_CHOICES, default="none", help=gpu)
    option("--force", action="store_true", help="compile again, even if Horovod is installed")
    jobs = "number of compilers that run at once (default: the most that CPUs and memory allow)"
    option("--jobs", "-j", type=_at_least_one, metavar="N", help=jobs)
    cache = "where wheels and the logs of failed builds are kept (default: ~/.cache/horovod_tune)"
    option(
        "--cache-dir",
        dest="cache",
        type=_absolute,
        default=default_cache(os.environ),
        metavar="DIR",
        help=cache,
    )
    option("--wheel-dir", type=Path, metavar="DIR", help="put a copy of the wheel into DIR")
    option("--no-install", dest="install", action="store_false", help="build the wheel, do not install it")
    source = "Horovod's source archive, for hosts without internet"
    option("--source", type=Path, metavar="FILE", help=source)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        install_horovod(Request(**{each.name: getattr(arguments, each.name) for each in fields(Request)}))
    except BuildError as error:
        print(f"horovod-tune install-horovod: {error}", file=sys.stderr)
        return 1
    return 0


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"the number of compilers must be an integer of at least 1, got {text}"
        )
    return int(text)
