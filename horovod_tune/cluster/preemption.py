"""Tells a machine that was taken away by its cloud from a trial that failed, and tells Tune so.

Tune (2.60) does not count a failure against `max_failures` when what ends the trial's step is a
`RayActorError` whose `preempted` is true; this holds for one that the trainable raises as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray.exceptions import RayActorError

from horovod_tune.errors import TrainingFailed


class HostPreempted(TrainingFailed, RayActorError):
    """A rank's host was pre-empted: Tune starts the trial again without counting this as a failure."""

    def __init__(self, message: str) -> None:
        RayActorError.__init__(self, error_msg=message, preempted=True)
        self.args = (message,)

    def __str__(self) -> str:
        return str(self.args[0])


def is_preempted(errors: Iterable[BaseException], node_ids: Iterable[str]) -> bool:
    """Return whether the loss of ranks is a pre-emption; asked right when they were lost.

    Args:
        errors: what Ray raised for the lost actors.
        node_ids: the nodes that the lost actors were on.
    """
    if any(getattr(error, "preempted", False) for error in errors):
        return True
    # Ray calls an actor unavailable before it calls its node dead, and only then pre-empted.
    from ray._private.state import state  # private, checked against 2.60.0

    draining = state.get_draining_nodes()
    return any(node_id in draining for node_id in node_ids)
