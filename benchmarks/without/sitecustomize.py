"""Takes one trick out of horovod_tune in every process of a program, for `benchmarks.ablation`.

Python imports a module of this name when it starts, in the driver and in Ray's workers.
ABLATION names the trick. Each is taken out of the module that decides on it, right after the import.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def default_allocator(allocator: Any) -> None:
    allocator.keep_freed_memory = lambda: False


def reports_through_ray(report_channel: Any) -> None:
    report_channel.Listener.create_token = lambda self, worker: None


def reset_when_next_trial_comes(worker_group: Any) -> None:
    group = worker_group.WorkerGroup
    begin, reset = group.begin_reset, group._reset

    def begin_and_reset(self: Any) -> Any:
        begin(self)
        return reset(self)

    group.begin_reset, group._reset = lambda self: None, begin_and_reset


def new_actor_processes(actors: Any) -> None:
    actors.start_in_idle_processes = lambda is_ours: None


def new_workers(spec: Any) -> None:
    make_spec = spec.make_spec

    @functools.wraps(make_spec)
    def make(**arguments: Any) -> Any:
        return make_spec(**{**arguments, "reuse_workers": False})

    spec.make_spec = make


# By the trick's name: the module that decides on it, and the function that takes it out.
TRICKS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "allocator": ("horovod_tune.rank.allocator", default_allocator),
    "channel": ("horovod_tune.channel.report_channel", reports_through_ray),
    "early_reset": ("horovod_tune.coordinator.worker_group", reset_when_next_trial_comes),
    "idle_processes": ("horovod_tune.ray_compat.patches.actors", new_actor_processes),
    "warm_workers": ("horovod_tune.spec.trial_spec", new_workers),
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with one module as soon as the module has been imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)
            if note := os.environ.get("ABLATION_NOTE"):
                with open(note, "a") as file:
                    file.write(f"{os.getpid()}\n")

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if trick := os.environ.get("ABLATION"):
    sys.meta_path.insert(0, AfterImport(*TRICKS[trick]))
