"""Runs in the coordinator: ends the processes of training actors and waits until they have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod_tune.files.process_start import process_start
from horovod_tune.messages import WorkerInfo

if TYPE_CHECKING:
    from horovod_tune.coordinator.workers import Worker

# How long a killed actor's process may take to end before it is killed by its pid.
EXIT_TIMEOUT_S = 3.0
REMOTE_EXIT_TIMEOUT_S = 10.0  # how long to wait until another node has done this
LOST_NODE_TIMEOUT_S = 2.0  # the same for a node that may be down


def end_workers(
    workers: Sequence[Worker],
    *,
    below: Sequence[WorkerInfo] = (),
    lost_nodes: Collection[str] = (),
    wait: bool = True,
) -> None:
    """Kill the workers' actors; wait until their processes and those that they started (``below``) are gone.

    Ray's request to exit does not end a stopped process (SIGSTOP), so processes that remain are killed by
    pid, on their own node. The wait for a node in ``lost_nodes`` is only LOST_NODE_TIMEOUT_S: it may be down
    before Ray marks it as dead. Without ``wait``, only this node's processes are waited for.
    """
    for worker in workers:
        ray.kill(worker.actor, no_restart=True)
    infos = [*(worker.info for worker in workers if worker.info is not None), *below]
    here = ray.get_runtime_context().get_node_id() if infos else ""
    targets: dict[str, list[tuple[int, float]]] = {}
    for info in infos:
        targets.setdefault(info.node_id, []).append((info.pid, info.process_started))
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if set(targets) - {here} else set()
    pending = []
    for node, processes in targets.items():
        if node != here and node in alive:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            task = ray.remote(num_cpus=0, max_retries=0)(end_processes).options(scheduling_strategy=strategy)
            pending.append(
                (LOST_NODE_TIMEOUT_S if node in lost_nodes else REMOTE_EXIT_TIMEOUT_S, task.remote(processes))
            )
    if here in targets:
        end_processes(targets[here])
    began = time.monotonic()
    for wait_s, ref in pending if wait else ():
        try:
            ray.get(ref, timeout=max(0.0, began + wait_s - time.monotonic()))
        except RayError:
            # If the node went down, its processes have ended too; Ray logs that.
            continue


def end_processes(processes: Sequence[tuple[int, float]]) -> None:
    """Wait until these local processes, as (pid, `process_start`), are gone; kill those that remain."""
    end = time.monotonic() + EXIT_TIMEOUT_S
    waiting = []
    for pid, started in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            # Pids are reused: another start time means another process.
            if abs(process_start(pid) - started) < 1.0:
                waiting.append(process)
                if process.status() == psutil.STATUS_STOPPED:
                    _kill(process)
    _, left = psutil.wait_procs(waiting, timeout=max(0.0, end - time.monotonic()))
    for process in left:
        _kill(process)
    psutil.wait_procs(left, timeout=1.0)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
