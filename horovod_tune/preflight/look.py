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

from horovod_tune.doctor import NodeFacts, gather_facts

# In a process of its own: an import can be final, and one that crashes would take the actor with it.
_IMPORT_EACH = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(failed))
"""


class Look:
    """The eyes and ears of a preflight on one machine. Plain: `check` makes a Ray actor of it."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def clock_s(self) -> float:
        """Return this machine's time, in seconds since 1970."""
        return time.time()

    def facts(self) -> NodeFacts:
        """Return what the doctor sees here. Takes some seconds."""
        return gather_facts()

    def failed_imports(self, modules: Sequence[str], timeout_s: float) -> dict[str, str]:
        """Return which of `modules` cannot be imported here, and why."""
        if not modules:
            return {}
        # What Ray put on this process's path (the driver's folder, py_modules) counts for the ranks too.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            ran = subprocess.run(
                [sys.executable, "-c", _IMPORT_EACH, *modules],
                env=environment,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return {" ".join(modules): f"not imported after {timeout_s:.0f} s"}
        if ran.returncode:
            why = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
            return {" ".join(modules): why}
        return dict(json.loads(ran.stdout.splitlines()[-1]))

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
