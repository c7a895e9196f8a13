"""Tells a machine that was taken away by its cloud from a trial that failed, and tells Tune so.

Tune (2.60) does not count a failure against `max_failures` when what ends the trial's step is a
`RayActorError` whose `preempted` is true; this holds for one that the trainable raises as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from ray.exceptions import RayActorError

from horovod_tune.errors import TrainingFailed


class HostPreempted(TrainingFailed, RayActorError):
    """A rank's host was pre-empted: Tune starts the trial again without counting this as a failure."""

    def __init__(self, message: str) -> None:
        RayActorError.__init__(self, error_msg=message, preempted=True)
        self.args = (message,)

    def __str__(self) -> str:
        return str(self.args[0])


def is_preempted(node_ids: Iterable[str]) -> bool:
    """Return whether one of these nodes was taken away, or is about to be.

    Ray calls a lost actor unavailable before it calls its node dead, so the nodes are asked about, not the
    actors' errors: one that is being drained counts as much as one that died after that.

    Private to Ray, checked against 2.60.0.
    """
    import ray
    from ray._private.state import state

    wanted = set(node_ids)
    if not wanted:
        return False
    if wanted & set(state.get_draining_nodes()):
        return True
    common_pb2: Any = importlib.import_module("ray.core.generated.common_pb2")  # compiled, without types
    taken_away = common_pb2.NodeDeathInfo.Reason.Value("AUTOSCALER_DRAIN_PREEMPTED")
    return any(
        node["NodeID"] in wanted and not node["Alive"] and node.get("DeathReason") == taken_away
        for node in ray.nodes()
    )
