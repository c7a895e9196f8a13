"""Takes away each part of Ray that a patch needs, one at a time, and installs the patch; prints what fails.

Each part has a process of its own, forked from one that has imported Ray. The last line is JSON: how many
parts there are, and for each that was not met well, what happened.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import json
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from horovod_tune import ray_compat
from horovod_tune.ray_compat import compatibility, patches
from horovod_tune.ray_compat.patches.tune_run import metric_and_mode


def is_ours(trainable: type) -> bool:
    return True


def enter(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


# How the driver installs what is in each module of `patches`.
INSTALL: dict[str, list[Callable[[], object]]] = {
    "actor_reuse": [lambda: ray_compat.reuse_actors_of(is_ours)],
    "drawn_values": [lambda: ray_compat.draw_with(lambda searcher, tag: contextlib.nullcontext())],
    "failure_count": [lambda: ray_compat.count_each_death_once(is_ours)],
    "idle_processes": [lambda: ray_compat.start_in_idle_processes(is_ours)],
    "paused_trials": [
        ray_compat.end_waits_of_paused_trials,
        ray_compat.write_down_ends_of_paused_trials,
    ],
    "resized_trials": [
        lambda: ray_compat.check_resized_trials(lambda trainable, resources: resources, lambda kind: False)
    ],
    "result_files": [ray_compat.keep_longer_results],
    "tune_run": [
        lambda: ray_compat.prepare_runs(
            lambda trainable, arguments: contextlib.nullcontext(arguments), __name__
        ),
        lambda: enter(ray_compat.without_reporter()),
        lambda: ray_compat.shorten_errors(is_ours),
        lambda: ray_compat.name_missing_metric(is_ours),
        lambda: metric_and_mode({"search_alg": object(), "scheduler": object()}),
    ],
}


def patches_of(name: str) -> list[compatibility.Patch]:
    module = importlib.import_module(f"{patches.__name__}.{name}")
    return [each for each in vars(module).values() if isinstance(each, compatibility.Patch)]


def found(part: compatibility.Part) -> Any:
    try:
        return part.find()
    except (ImportError, AttributeError):
        return None


def rename(part: compatibility.Part) -> None:
    """Give the part another name where it is defined: in its module, its class or one of that one's bases."""
    module, _, names = part.path.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, last = names.split(".")
    for each in outer:
        owner = getattr(owner, each)
    if isinstance(owner, type):
        owner = next(base for base in owner.__mro__ if last in vars(base))
    value = vars(owner)[last]
    if isinstance(owner, enum.EnumMeta):
        owner._member_map_.pop(last)
        type.__delattr__(owner, last)
        return
    delattr(owner, last)
    setattr(owner, f"{last}_renamed", value)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def problem_of(name: str, patch: compatibility.Patch, part: compatibility.Part) -> str | None:
    """Rename the part, install the module's patches twice, and return what is wrong with what they did."""
    heard = Warnings()
    compatibility.logger.addHandler(heard)
    compatibility.logger.propagate = False
    rename(part)
    before = [found(each) for each in patch.parts]
    for install in INSTALL[name] * 2:
        install()
    warned = [text for text in heard.said if patch.without in text]
    if len(warned) != 1:
        return f"{len(warned)} warnings, not 1"
    if before != [found(each) for each in patch.parts]:
        return "something of Ray was changed in spite of it"
    return None


def in_a_fork(work: Callable[[], str | None]) -> str | None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            said = work()
        except BaseException:  # told to the parent, and printed
            said = traceback.format_exc()
        os.write(writing, json.dumps(said).encode()[:60000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    problem: str | None = json.loads(told) if told else "the process died"
    return problem


def cases() -> Iterator[tuple[str, compatibility.Patch, compatibility.Part]]:
    for found in pkgutil.iter_modules(patches.__path__):
        for patch in patches_of(found.name):
            for part in patch.parts:
                yield found.name, patch, part


def main() -> None:
    for _, _, part in cases():
        found(part)  # imports what the parts are in, once for all forks
    problems = {}
    count = 0
    for name, patch, part in cases():
        count += 1
        problem = in_a_fork(lambda: problem_of(name, patch, part))  # noqa: B023 - called at once
        if problem is not None:
            problems[f"{name}: {patch.name}: {part.path}"] = problem
    modules = sorted(found.name for found in pkgutil.iter_modules(patches.__path__))
    with_patches = sorted({name for name, _, _ in cases()})
    print(
        json.dumps({"modules": modules, "with_patches": with_patches, "parts": count, "problems": problems})
    )


if __name__ == "__main__":
    sys.exit(main())
