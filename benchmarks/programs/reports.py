"""Reports per second of a plain Tune function, and of a Horovod function of N ranks that all report."""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from ray import tune

from benchmarks.programs import trials


def plain(config: dict[str, Any]) -> None:
    for _ in range(config["reports"]):
        tune.report({"x": 1.0, "time": time.time()})


def distributed(config: dict[str, Any]) -> None:
    import horovod.torch as hvd

    from horovod_tune import report

    hvd.init()
    for _ in range(config["reports"]):
        report(x=1.0, time=time.time())


class Times(tune.Callback):
    """Records when Tune receives each result."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any) -> None:
        self.times.append(time.monotonic())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["plain", "ours"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reports", type=int, default=300)
    options = parser.parse_args()
    trials.start_ray(num_cpus=max(4, options.ranks))
    trainable: Any = plain
    if options.way == "ours":
        from horovod_tune import DistributedTrainableCreator

        trainable = DistributedTrainableCreator(distributed, num_slots=options.ranks, timeout_s=120)
    times = Times()
    with tempfile.TemporaryDirectory() as storage:
        config = {"reports": options.reports}
        tune.run(trainable, config=config, storage_path=storage, callbacks=[times], verbose=0)
    assert len(times.times) == options.reports
    skipped = options.reports // 10
    gaps = times.times[-1] - times.times[skipped]
    trials.publish({"reports_per_s": (options.reports - 1 - skipped) / gaps})
