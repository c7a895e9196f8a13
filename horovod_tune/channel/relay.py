"""The first rank of a host hands on to the others what the coordinator on another host has sent it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from horovod_tune.channel.listener import ChannelToken
from horovod_tune.channel.remote_listener import listen_here
from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.messages import CheckpointPlace

# How long the other ranks of a host may take to connect.
ACCEPT_S = 30.0


class Relay:
    """Runs in the first rank of each host that is not the coordinator's, as long as their world lasts.

    Args:
        tokens: of the ranks that connect to this one, by their worker's number.
    """

    def __init__(self, tokens: Mapping[int, ChannelToken]) -> None:
        self._channels: list[CoordinatorChannel] = []
        self._listener = listen_here(tokens)
        self._accepting = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        for _, end in self._listener.accept_each(ACCEPT_S):
            self._channels.append(CoordinatorChannel(end))

    def release(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        """Let the reports of the other ranks return; one that cannot be reached hears it with its poll."""
        for channel in self._channels:
            channel.release(run, index, checkpoint)

    def close(self) -> None:
        """Leave the other ranks, which are reached through Ray from now on; twice is harmless."""
        self._listener.stop()
        self._accepting.join()
        for channel in self._channels:
            channel.close()
