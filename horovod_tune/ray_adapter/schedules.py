"""What Tune's schedulers say of a whole training, which they tell nobody."""

from __future__ import annotations

import math
from typing import Any

from horovod_tune.private_parts import Patch, part

_SCHEDULES = Patch(
    "schedules",
    "BayesOptSearch knows the end of a training, and a time_attr other than training_iteration, by its own "
    "arguments alone",
    (
        part("ray.tune.schedulers:ASHAScheduler", uses="_time_attr _max_t"),
        part("ray.tune.schedulers:HyperBandScheduler", uses="_time_attr _max_t_attr"),
        part("ray.tune.schedulers:ResourceChangingScheduler", uses="_base_scheduler"),
    ),
)


def whole_training(scheduler: Any) -> tuple[str, float] | None:
    """Return what a scheduler goes by and where a training ends in it; None where it does not say.

    Those that know no end, as median stopping and population based training, measure seconds unless they are
    told otherwise, which says little of a curve.
    """
    if not _SCHEDULES.fits:
        return None
    scheduler = getattr(scheduler, "_base_scheduler", scheduler)
    time_attr = getattr(scheduler, "_time_attr", None)
    end = getattr(scheduler, "_max_t", None) or getattr(scheduler, "_max_t_attr", None)
    is_number = isinstance(end, (int, float)) and 0 < end < math.inf
    return (time_attr, float(end)) if isinstance(time_attr, str) and end and is_number else None
