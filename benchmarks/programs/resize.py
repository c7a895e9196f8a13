"""A trial of 2 ranks with 10 MB of state gets 4 by a scheduler: from the decision to the first report."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler

from benchmarks.programs import exploit, trials

SETTLED_S = 15.0


class Resizes:
    """Gives the trial 2 and 4 CPUs in turns, and notes when."""

    def __init__(self) -> None:
        self._decided: float | None = None
        self._has_waited = False
        self.seconds: list[float] = []

    def __call__(self, controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
        if not self._has_waited:
            # A trial is resized after minutes; of those a few will do (the fork server: LOADS_MORE_AFTER_S).
            self._has_waited = True
            time.sleep(SETTLED_S)
        if self._decided is not None:
            self.seconds.append(time.monotonic() - self._decided)
            self._decided = None
            return None
        if result["training_iteration"] % 3:
            return None
        self._decided = time.monotonic()
        return {"CPU": 6 - result["world_size"]}


if __name__ == "__main__":
    from horovod_tune import DistributedTrainableCreator

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    trials.start_ray(num_cpus=4)
    resizes = Resizes()
    with tempfile.TemporaryDirectory() as storage:
        tune.run(
            DistributedTrainableCreator(exploit.train, num_slots=2),
            config={"x": 1.0, "steps": options.steps},
            scheduler=ResourceChangingScheduler(FIFOScheduler(), resizes),
            storage_path=storage,
            verbose=0,
        )
    # Every other one is a growth from 2 to 4.
    assert len(resizes.seconds) >= 2, "the trial was not resized"
    trials.publish(
        {
            "resize_s": statistics.median(resizes.seconds[::2]),
            "shrink_s": statistics.median(resizes.seconds[1::2]),
            "resizes": len(resizes.seconds),
        }
    )
