"""The time attribute of Tune's schedulers, which they keep private."""

from __future__ import annotations

from typing import Any

from horovod_tune.compatibility import Patch, part

_SCHEDULES = Patch(
    "schedules",
    "pass time_attr to BayesOptSearch explicitly",
    (
        part("ray.tune.schedulers:ASHAScheduler", uses="_time_attr _max_t"),
        part("ray.tune.schedulers:HyperBandScheduler", uses="_time_attr _max_t_attr"),
        part("ray.tune.schedulers:ResourceChangingScheduler", uses="_base_scheduler"),
    ),
)


def time_attr_of(scheduler: Any) -> str | None:
    """Return the time attribute of a scheduler that knows where a training ends; None otherwise.

    The others, such as median stopping and population based training, measure seconds unless they are told
    otherwise, which says little of a curve.
    """
    if not _SCHEDULES.fits:
        return None
    scheduler = getattr(scheduler, "_base_scheduler", scheduler)
    knows_end = hasattr(scheduler, "_max_t") or hasattr(scheduler, "_max_t_attr")
    time_attr = getattr(scheduler, "_time_attr", None)
    return time_attr if knows_end and isinstance(time_attr, str) else None
