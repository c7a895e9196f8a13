"""Runs in the coordinator: writes one trial's rank logs to its storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from horovod_tune.files import log_files
from horovod_tune.transfer import node_transfer

# The trial waits for this: a log is not worth more.
SEND_TIMEOUT_S = 30.0


class TrialLogs(Protocol):
    """One log per rank. Both methods raise what the storage raises."""

    def append(self, rank: int, text: bytes) -> None:
        """Append a rank's output."""

    def publish(self, *, at_end: bool) -> None:
        """Copy new output to the storage; ``at_end`` is True when the trial has ended."""


class LocalLogs:
    """Logs in a directory that this host can write to."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def append(self, rank: int, text: bytes) -> None:
        log_files.append(self._directory / _name(rank), text)

    def publish(self, *, at_end: bool) -> None:
        """Do nothing: appended output is in the storage already."""


class NodeLogs:
    """Logs on another node's disk, sent to that node."""

    def __init__(self, node: str, directory: str) -> None:
        self._node, self._directory = node, Path(directory)
        self._new: dict[int, bytes] = {}

    def append(self, rank: int, text: bytes) -> None:
        self._new[rank] = log_files.shorten(self._new.get(rank, b"") + text, log_files.LOG_BYTES // 2)
        if sum(map(len, self._new.values())) > log_files.LOG_BYTES:
            self.publish(at_end=False)

    def publish(self, *, at_end: bool) -> None:
        new, self._new = self._new, {}
        for rank, text in new.items():
            path = self._directory / _name(rank)
            node_transfer.append_to_log(self._node, str(path), text, timeout_s=SEND_TIMEOUT_S)


class FilesystemLogs:
    """Logs in cloud storage, which accepts only whole files: written here, then uploaded.

    Before the trial ends, a log is uploaded when it has grown by a quarter.
    """

    def __init__(self, filesystem: Any, directory: str, scratch: Path) -> None:
        self._filesystem, self._directory, self._scratch = filesystem, directory, scratch
        self._sizes: dict[int, int] = {}
        self._uploaded: dict[int, int] = {}

    def append(self, rank: int, text: bytes) -> None:
        path = self._scratch / _name(rank)
        if rank not in self._sizes:
            self._begin(rank, path)
        log_files.append(path, text)
        self._sizes[rank] += len(text)

    def _begin(self, rank: int, path: Path) -> None:
        """Continue the log of the trial's earlier attempt, if there was one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        source = f"{self._directory}/{_name(rank)}"
        self._sizes[rank] = 0
        if self._filesystem.get_file_info(source).is_file:
            with self._filesystem.open_input_stream(source) as stream:
                path.write_bytes(stream.read())

    def publish(self, *, at_end: bool) -> None:
        for rank, size in self._sizes.items():
            before = self._uploaded.get(rank, 0)
            if size > before and (at_end or size - before >= before / 4):
                # Recorded first, so that an upload that fails is not repeated.
                self._uploaded[rank] = size
                self._filesystem.create_dir(self._directory)
                with self._filesystem.open_output_stream(f"{self._directory}/{_name(rank)}") as stream:
                    stream.write((self._scratch / _name(rank)).read_bytes())


def _name(rank: int) -> str:
    return f"rank_{rank}.log"
