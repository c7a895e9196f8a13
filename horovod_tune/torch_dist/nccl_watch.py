"""Runs in each rank with a GPU: ends waits for NCCL collectives that cannot complete.

If another rank dies or never enters a collective, this rank would wait for its GPU until torch's watchdog
kills the process. Instead, the groups are aborted immediately. That ends the wait without an
error: the function continues with invalid data up to its next collective, report or commit, which raises.

Checked against torch 2.11 and NCCL 2.28: `get_error` of ProcessGroupNCCL, which torch 2.7 and later have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {
    # torch's watchdog records errors, and does not kill the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Nor does it wait a minute for other ranks' dumps before a group can be destroyed.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
POLL_INTERVAL_S = 0.2
JOIN_TIMEOUT_S = 30.0


class NcclWatch:
    """Calls ``on_failure(has_timed_out)`` once, when a collective of one of ``groups()`` has failed."""

    def __init__(self, groups: Callable[[], list[Any]], on_failure: Callable[[bool], None]) -> None:
        self._groups, self._on_failure = groups, on_failure
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nccl_watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, so that ``on_failure`` is not called any more."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._over.wait(POLL_INTERVAL_S):
            for error in map(_error, self._groups()):
                if error not in ("", "SUCCESS"):
                    self._on_failure(error == "TIMEOUT")
                    return


def _error(group: Any) -> str:
    """Return the name of the error that torch's watchdog has recorded; "" for a group without NCCL."""
    import torch

    try:
        return str(group._get_backend(torch.device("cuda")).get_error().name)
    except (RuntimeError, AttributeError):
        return ""
