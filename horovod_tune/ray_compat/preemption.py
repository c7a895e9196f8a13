"""The error of a trial whose machine was taken away by its cloud, which Tune does not count as a failure.

Tune (2.60) does not count a failure against `max_failures` when what ends the trial's step is a
`RayActorError` whose `preempted` is true; this holds for one that the trainable raises as well.
"""

from __future__ import annotations

from ray.exceptions import RayActorError

from horovod_tune.errors import TrainingFailed


class HostPreempted(TrainingFailed, RayActorError):
    """A rank's host was preempted: Tune starts the trial again without counting this as a failure."""

    def __init__(self, message: str) -> None:
        RayActorError.__init__(self, error_msg=message, preempted=True)
        self.args = (message,)

    def __str__(self) -> str:
        return str(self.args[0])
