"""The first rank of a host hands on to the others what the coordinator on another host has sent it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from horovod_tune.channel.listener import ChannelToken
from horovod_tune.channel.remote_listener import RemoteListener, listen_here
from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.messages import CheckpointPlace

# How long the other ranks of a host may take to connect.
ACCEPT_S = 30.0


class Relay:
    """Runs in the first rank of each host that is not the coordinator's.

    Args:
        tokens: of the ranks that connect to this one, by their worker's number.
    """

    def __init__(self, tokens: Mapping[int, ChannelToken]) -> None:
        self._channels: list[CoordinatorChannel] = []
        listener = listen_here(tokens)
        self._accepting = threading.Thread(target=self._accept, args=(listener,), name="relay", daemon=True)
        self._accepting.start()

    def _accept(self, listener: RemoteListener) -> None:
        self._channels = [CoordinatorChannel(end) for end in listener.accept(ACCEPT_S).values()]

    def release(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        """Let the reports of the other ranks return; one that cannot be reached hears it with its poll."""
        for channel in self._channels:
            channel.release(run, index, checkpoint)
