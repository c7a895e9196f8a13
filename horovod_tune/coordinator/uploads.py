"""Runs in the coordinator: brings a checkpoint to the trial's storage while the ranks train on."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_tune.files import directories
from horovod_tune.messages import CheckpointPlace

if TYPE_CHECKING:
    from ray.tune import Checkpoint

logger = logging.getLogger(__name__)


class Upload:
    """A checkpoint on its way to the trial's storage, from a copy: the function may change its directory.

    Args:
        directory: rank 0's, on this host.
        copy: where the copy lies until the upload is over.
        send: brings a directory of this host to the storage.
        checkpoint: what it will be there.
        place: where ranks will find it.
        timeout_s: how long it may take from when it is waited for.
    """

    def __init__(
        self,
        directory: str,
        copy: Path,
        send: Callable[[str], None],
        checkpoint: Checkpoint,
        place: CheckpointPlace,
        *,
        timeout_s: float,
    ) -> None:
        self.checkpoint, self.place = checkpoint, place
        self._timeout_s = timeout_s
        self._copy, self._send = copy, send
        self._error: BaseException | None = None
        copy.parent.mkdir(parents=True, exist_ok=True)
        directories.copy(directory, str(copy))
        # A daemon: a storage that never answers must not keep a process that is to end.
        self._thread = threading.Thread(target=self._run, name="checkpoint upload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._send(str(self._copy))
        except BaseException as error:  # any: `wait` raises it again, in the trial's own thread
            self._error = error
        finally:
            shutil.rmtree(self._copy, ignore_errors=True)

    @property
    def is_over(self) -> bool:
        """Whether it has arrived, or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when it has arrived.

        Raises:
            TimeoutError: it took too long.
            Exception: what the storage raised.
        """
        error = self._error_in_time()
        if error is not None:
            raise error

    def wait_at_end(self) -> None:
        """Return when it is over; the trial has ended, so that a failure is only logged."""
        error = self._error_in_time()
        if error is not None:
            logger.warning(
                "The checkpoint %s of a trial that has ended did not arrive: %r",
                self.place.path,
                error,
            )

    def _error_in_time(self) -> BaseException | None:
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            return TimeoutError(f"the storage has not taken {self.place.path} after {self._timeout_s:g} s")
        return self._error
