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
    from horovod_tune.rank.reset.python_settings import SavedSettings, python_settings

    baseline = Baseline()
    assert baseline._torch is not None
    costs = {
        "all": cost_ms(baseline.restore),
        "all of torch": cost_ms(baseline._torch.restore),
        "the user's modules": cost_ms(baseline._modules.forget_users),
        "all of Python's settings": cost_ms(baseline._python.restore),
    }
    for setting in python_settings():
        costs[f"Python's {setting.name}"] = cost_ms(SavedSettings([setting]).restore)
    trials.publish(costs)
