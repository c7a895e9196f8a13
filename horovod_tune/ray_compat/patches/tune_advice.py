"""What Tune logs where it is wrong for distributed trials, dropped or corrected.

Without it Tune advises `reuse_actors=True` to trials whose workers are reused anyway, and arguments that mean
nothing to them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from horovod_tune.compatibility import Patch, part

_RUN = "ray.tune.tune"
_WAITS = "ray.tune.execution.insufficient_resources_manager"
_SETUP = "ray.tune.trainable.trainable"
_PLOTS = "tensorboardX.x2num"
# What Tune logs at a search's end: where the results lie, and which trials failed.
_ON_LAST_SCREEN = ("Wrote the latest version of all result", "Trials did not complete")
# Said of each infinite metric in each report, neither of which metric nor of which trial.
_NAMELESS = "NaN or Inf found in input tensor"
_SEARCHES = Patch(
    "advice in searches",
    "Tune's advice on resources names arguments that mean nothing to distributed trials",
    (part(f"{_RUN}:logger"), part(f"{_WAITS}:logger")),
)
_TRIALS = Patch(
    "advice in trials",
    "Tune advises reuse_actors=True though workers are reused",
    (part(f"{_SETUP}:logger"),),
)


@contextmanager
def corrected_advice(instead: str, *, quiet: bool) -> Iterator[None]:
    """Let Tune log ``instead`` of its advice on resources; with ``quiet``, not what the last screen has."""

    def correct(record: logging.LogRecord) -> bool:
        if record.name == _WAITS:
            text, _, _ = record.getMessage().partition("Stop the tuning and adjust")
            record.msg, record.args = f"{text}{instead}", ()
        message = record.getMessage()
        return not (message.startswith(_NAMELESS) or (quiet and message.startswith(_ON_LAST_SCREEN)))

    loggers = [logging.getLogger(name) for name in (_RUN, _WAITS, _PLOTS)] if _SEARCHES.fits else []
    for each in loggers:
        each.addFilter(correct)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(correct)


@functools.cache
def drop_advice_on_reuse() -> None:
    """Let Tune not advise `reuse_actors=True` in this process; once a process."""
    if _TRIALS.fits:
        logging.getLogger(_SETUP).addFilter(lambda record: "reuse_actors" not in record.getMessage())
