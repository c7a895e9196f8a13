"""The parent of one host's ranks: imports everything once, forks a process per chip, reports how they ended.

A separate process between the host actor and the ranks: it touches no device, and can fork safely, which an
actor with Ray's threads cannot.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing.process
import os
import pickle
import socket
import traceback
import warnings

from horovod_tune.ray_compat import tune_session
from horovod_tune.xla import rank
from horovod_tune.xla.topology import LaunchPlan

_MAX_PLAN_BYTES = 1 << 17
# Variables in which Ray names all chips of an actor. A rank has one chip: torch_xla or `LaunchPlan` names it.
_SET_BY_RAY = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")
_started: list[multiprocessing.process.BaseProcess] = []


def main(registry_fd: int, runtime_path: str, actor_pid: int, heartbeat_s: float) -> None:
    """Import, wait for the plan, launch; return when every rank has ended.

    ``runtime_path`` names the ranks' runtime, such as `TorchXla`, as ``module:Class``.
    """
    rank.die_with_parent(actor_pid)
    own_pid = os.getpid()
    registry = socket.socket(fileno=registry_fd)
    error = ""
    try:
        module, _, name = runtime_path.partition(":")
        runtime_class = getattr(importlib.import_module(module), name)
        tune_session.prepare_rank_process()
        data = registry.recv(_MAX_PLAN_BYTES)
        if not data:
            os._exit(0)  # the actor ended before it sent a plan
        # From the actor that started us, over a socket that only it has.
        plan: LaunchPlan = pickle.loads(data)
        for name in _SET_BY_RAY:
            os.environ.pop(name, None)
        os.environ.update(plan.environment)
        _remember_started_processes()
        # Runs before any code of torch_xla, which may wait for other hosts; skipped in a rank's own forks.
        os.register_at_fork(
            after_in_child=lambda: rank.die_with_parent(own_pid) if os.getppid() == own_pid else None
        )
        # Since 3.12 Python warns of forking with threads; the only threads here are idle, left by imports.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
        abort = functools.partial(rank.abort, registry_fd)
        arguments = (registry_fd, runtime_class, own_pid, heartbeat_s)
        runtime_class().launch(rank.serve, plan, arguments, abort)
    except Exception:  # any: sent to the host actor, which raises it
        error = traceback.format_exc(limit=-12)
    exits = {process.pid: process.exitcode for process in _started if process.pid is not None}
    registry.send(json.dumps({"kind": "ended", "exits": exits, "error": error[-20000:]}).encode())


def _remember_started_processes() -> None:
    """Record every process that multiprocessing starts: a broken pool does not report which one died."""
    start = multiprocessing.process.BaseProcess.start

    def start_and_record(process: multiprocessing.process.BaseProcess) -> None:
        start(process)
        _started.append(process)

    multiprocessing.process.BaseProcess.start = start_and_record  # type: ignore
