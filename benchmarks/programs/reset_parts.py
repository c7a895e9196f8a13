"""What each part of a process's reset between two trials costs, in ms of CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.programs import trials

RESETS = 50


def cost_ms(part: Callable[[], object]) -> float:
    part()
    began = time.process_time()
    for _ in range(RESETS):
        part()
    return (time.process_time() - began) / RESETS * 1000


if __name__ == "__main__":
    import horovod.torch  # noqa: F401

    from horovod_tune.rank.reset.baseline import Baseline

    baseline = Baseline()
    costs = {
        "all": cost_ms(baseline.restore),
        "what modules hold": cost_ms(baseline._watch.restore),
        "imported modules": cost_ms(baseline._imports.forget),
        "settings": cost_ms(baseline._settings.restore),
    }
    trials.publish(costs)
