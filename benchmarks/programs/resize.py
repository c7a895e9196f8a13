"""A trial with 10 MB of state gets 4 ranks instead of 2: from the decision to the first report of all."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler

from benchmarks.programs import exploit, trials

SETTLED_S = 15.0


def train_and_commit(config: dict[str, Any]) -> None:
    import horovod.torch as hvd

    from horovod_tune import commit, get_state, report

    hvd.init()
    state = get_state() or {"step": 0}
    while state["step"] < config["steps"]:
        step = state["step"] + 1
        report(score=config["x"], step=step)
        state = {"step": step, "weights": os.urandom(exploit.MEGABYTES << 20)}
        commit(state)


class Resizes:
    """Gives the trial 4 and 2 CPUs alternately, and records how long each resize took."""

    def __init__(self) -> None:
        self._decided = 0.0
        self._wanted: int | None = None
        self._settled_at = 0
        self.seconds: list[float] = []

    def __call__(self, controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
        iteration, size = result["training_iteration"], result["world_size"]
        if iteration == 1 and not self.seconds:
            # Trials are usually resized after minutes, not right after their start.
            time.sleep(SETTLED_S)
        if self._wanted is not None:
            if size == self._wanted:
                self.seconds.append(time.monotonic() - self._decided)
                self._wanted, self._settled_at = None, iteration
            return None
        if iteration < self._settled_at + 3:
            return None
        self._decided, self._wanted = time.monotonic(), 6 - size
        return {"CPU": self._wanted}


if __name__ == "__main__":
    from horovod_tune import DistributedTrainableCreator

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trial", choices=["elastic", "fixed"])
    parser.add_argument("--resizes", type=int, default=6)
    options = parser.parse_args()
    trials.start_ray(num_cpus=4)
    resizes = Resizes()
    is_elastic = options.trial == "elastic"
    trainable = DistributedTrainableCreator(
        train_and_commit if is_elastic else exploit.train, num_slots=2, min_workers=1 if is_elastic else None
    )
    with tempfile.TemporaryDirectory() as storage:
        tune.run(
            trainable,
            config={"x": 1.0, "steps": 100_000},
            scheduler=ResourceChangingScheduler(FIFOScheduler(), resizes),
            stop=lambda trial_id, result: len(resizes.seconds) >= options.resizes,
            storage_path=storage,
            verbose=0,
        )
    # Every other one is a growth from 2 to 4.
    trials.publish(
        {
            "resize_s": statistics.median(resizes.seconds[::2]),
            "shrink_s": statistics.median(resizes.seconds[1::2]),
            "resizes": len(resizes.seconds),
        }
    )
