"""Runs on each machine, in an actor without resources: what it has, and which of the others it reaches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from horovod_tune.doctor import NodeInfo, gather_facts

# In a process of its own: an import can be final, and one that crashes would take the actor with it.
# A line for each module as it is done, so that one that takes long is told from one that fails.
_IMPORT_EACH = """
import importlib, json, os, sys, time
out = os.fdopen(os.dup(1), "w")
for name in sys.argv[1:]:
    start, failure = time.monotonic(), None
    try:
        importlib.import_module(name)
    except BaseException as error:  # whatever the module raises is what is asked for
        failure = f"{type(error).__name__}: {error}"
    print("\\nIMPORTED " + json.dumps([name, failure, time.monotonic() - start]), file=out, flush=True)
"""
# An import that takes longer eats most of the time that ranks have for their start.
SLOW_IMPORT_S = 30.0


class Look:
    """The eyes and ears of a preflight on one machine. Plain: `check` makes a Ray actor of it."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def clock_s(self) -> float:
        """Return this machine's time, in seconds since 1970."""
        return time.time()

    def facts(self) -> NodeInfo:
        """Return what the doctor sees here. Takes some seconds."""
        return gather_facts()

    def imports(self, modules: Sequence[str], timeout_s: float) -> tuple[dict[str, str], dict[str, float]]:
        """Return which of `modules` cannot be imported here, with why, and which are slow, with seconds.

        A module that is still being imported after `timeout_s` is slow; those behind it are not looked at.
        """
        if not modules:
            return {}, {}
        # What Ray put on this process's path (the driver's folder, py_modules) counts for the ranks too.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            [sys.executable, "-c", _IMPORT_EACH, *modules],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        try:
            said, complaint = process.communicate(timeout=timeout_s)
            late = False
        except subprocess.TimeoutExpired:
            process.kill()
            said, complaint = process.communicate()
            late = True
        done = {name: (failure, seconds) for name, failure, seconds in _imported(said)}
        failed = {name: failure for name, (failure, _) in done.items() if failure is not None}
        slow = {name: seconds for name, (_, seconds) in done.items() if seconds > SLOW_IMPORT_S}
        under_way = next((name for name in modules if name not in done), None)
        if under_way is not None and late:
            slow[under_way] = timeout_s
        elif under_way is not None:
            why = (complaint.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            failed[under_way] = f"the import ended the process: {why}"
        return failed, slow

    def listen(self, address: str) -> int:
        """Listen on a free port of `address` until this actor ends; return the port."""
        listener = socket.create_server((address, 0), backlog=1024)
        self._listener = listener

        def welcome() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=welcome, daemon=True, name="horovod-tune-preflight").start()
        return int(listener.getsockname()[1])

    def unreached(
        self, source: str, peers: Mapping[str, tuple[str, int]], timeout_s: float
    ) -> dict[str, str]:
        """Return which of `peers` (address and port by label) do not take a connection from `source`."""

        def reach(target: tuple[str, int]) -> str | None:
            try:
                socket.create_connection(target, timeout=timeout_s, source_address=(source, 0)).close()
            except OSError as error:
                return str(error)
            return None

        if not peers:
            return {}
        with ThreadPoolExecutor(max_workers=min(64, len(peers))) as pool:
            outcomes = dict(zip(peers, pool.map(reach, peers.values()), strict=True))
        return {label: why for label, why in outcomes.items() if why is not None}


def _imported(said: str) -> list[tuple[str, str | None, float]]:
    mark = "IMPORTED ["  # a list in JSON
    lines = (line.removeprefix("IMPORTED ") for line in said.splitlines() if line.startswith(mark))
    return [(name, failure, seconds) for name, failure, seconds in map(json.loads, lines)]
