"""Reports and their acknowledgements between the coordinator and the training actors on its own host.

Through Ray, a report and its acknowledgement take two calls, a millisecond per rank; here each is one message
on a socket. Reports from other hosts go through Ray, and so does what does not fit here: metrics of types
that msgpack does not have, reports above `MAX_REPORT_BYTES`, checkpoints on storage with a filesystem object.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from horovod_tune.channel import listener
from horovod_tune.channel.framing import Channel, frame
from horovod_tune.channel.schema import ACKS, REPORTS
from horovod_tune.errors import MetricsError
from horovod_tune.messages import CheckpointPlace, Report

# Half of what Linux buffers for a socket by default (net.core.wmem_default): a rank never waits to send it.
MAX_REPORT_BYTES = 100_000


class CoordinatorChannel:
    """The coordinator's end of the channel to one rank."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end, REPORTS, MAX_REPORT_BYTES)
        self.is_open = True

    def fileno(self) -> int:
        return self._channel.fileno()

    def acknowledge(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> bool:
        """Acknowledge reports up to ``index`` of trial ``run``; return False if it must go through Ray."""
        if not self.is_open or (checkpoint is not None and checkpoint.filesystem is not None):
            return False
        place = None if checkpoint is None else (checkpoint.path, checkpoint.node_id, checkpoint.report)
        return self._channel.send_nowait("proceed", run=run, index=index, checkpoint=place)

    def receive(self) -> list[tuple[int, Report]]:
        """Return the reports that have arrived, each with the number of its trial; does not wait.

        Raises:
            MalformedMessage: the rank sent something other than a report.
        """
        messages, is_open = self._channel.receive(0)
        if not is_open:
            self.close()
        return [
            (each["run"], Report(each["index"], each["metrics"], each["checkpoint_path"]))
            for each in messages
        ]

    def close(self) -> None:
        self.is_open = False
        self._channel.close()


class RankChannel:
    """The rank's end. Any thread may send; `listen` has a thread of its own and sleeps between messages."""

    def __init__(self, token: listener.ChannelToken) -> None:
        """Connect; raises OSError if no process listens there."""
        self._channel = Channel(listener.connect(token), ACKS)

    def report(self, run: int, report: Report) -> bool:
        """Send a report; False if it must go through Ray."""
        try:
            data = frame(
                "report",
                run=run,
                index=report.index,
                metrics=report.metrics,
                checkpoint_path=report.checkpoint_path,
            )
        except (MetricsError, ValueError, OverflowError, RecursionError):
            return False  # nested more deeply than msgpack allows, or of a type that only pickle handles
        if len(data) > MAX_REPORT_BYTES:
            return False
        try:
            self._channel.send_frame(data)
        except OSError:
            return False
        return True

    def listen(self, on_ack: Callable[[int, float, CheckpointPlace | None], None]) -> None:
        """Call ``on_ack(run, index, checkpoint)`` for each acknowledgement, until the other end closes.

        However it ends, it closes the channel: reports and acknowledgements then go through Ray.
        """
        is_open = True
        try:
            while is_open:
                messages, is_open = self._channel.receive(None)
                for each in messages:
                    on_ack(each["run"], each["index"], checkpoint_place(each["checkpoint"]))
        finally:
            self.close()

    def close(self) -> None:
        """Close the channel; `listen` returns in its thread."""
        self._channel.close()


def checkpoint_place(fields: tuple[str, str | None, int] | None) -> CheckpointPlace | None:
    """Return the place in an acknowledgement's field `checkpoint`.

    >>> checkpoint_place(("/storage/a", "node", 3))
    CheckpointPlace(path='/storage/a', filesystem=None, node_id='node', report=3)
    """
    if fields is None:
        return None
    path, node_id, report = fields
    return CheckpointPlace(path, None, node_id, report)
