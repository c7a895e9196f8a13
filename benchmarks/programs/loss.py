"""One of 3 ranks is killed: seconds from its death to the next step of a trial with 10 MB of state.

``elastic``: the others continue; ``fixed``: the trial starts again from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ray import tune

from benchmarks.programs import trials

MEGABYTES = 10
RANKS = 3
# The number of steps that a world of all ranks makes before it loses one.
STEPS_BEFORE_A_LOSS = 5


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    from horovod_tune import commit, get_checkpoint, get_state, report

    hvd.init()
    deaths = Path(config["deaths"])
    state = get_state() or {"step": 0, "weights": torch.zeros(MEGABYTES << 18)}
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        state = torch.load(Path(checkpoint.path, "state.pt"))
    here = 0
    while True:
        lost = hvd.broadcast_object(len(list(deaths.iterdir())), 0)
        if here == STEPS_BEFORE_A_LOSS and hvd.size() == RANKS:
            if lost == config["losses"]:
                return
            if hvd.rank() == 1:
                (deaths / str(lost)).write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1), name="step")
        state["step"] += 1
        here += 1
        with tempfile.TemporaryDirectory() as folder:
            if config["fixed"] and hvd.rank() == 0:
                torch.save(state, Path(folder, "state.pt"))
            place = folder if config["fixed"] else None
            report(step=state["step"], size=hvd.size(), time=time.time(), checkpoint=place)
        if not config["fixed"]:
            commit(state)


def seconds_after(deaths: list[float], steps: list[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """Return the seconds from each death to the next step, and to the next one of all ranks.

    >>> seconds_after([10.0], [(9.0, 3), (11.0, 2), (14.0, 3)])
    ([1.0], [4.0])
    """
    to_next = [min(at for at, _ in steps if at > death) - death for death in deaths]
    to_all = [min(at for at, size in steps if at > death and size == RANKS) - death for death in deaths]
    return to_next, to_all


if __name__ == "__main__":
    from horovod_tune import DistributedTrainableCreator

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["elastic", "fixed"])
    parser.add_argument("--losses", type=int, default=3)
    options = parser.parse_args()
    is_fixed = options.kind == "fixed"
    trials.start_ray(num_cpus=4)
    with tempfile.TemporaryDirectory() as storage:
        folder = Path(storage, "deaths")
        folder.mkdir()
        analysis = tune.run(
            DistributedTrainableCreator(train, num_slots=RANKS, min_workers=None if is_fixed else 2),
            config={"deaths": str(folder), "losses": options.losses, "fixed": is_fixed},
            max_failures=options.losses if is_fixed else 0,
            storage_path=storage,
            verbose=0,
        )
        deaths = sorted(float(path.read_text()) for path in folder.iterdir())
        (frame,) = analysis.trial_dataframes.values()
    assert len(deaths) == options.losses
    to_next, to_all = seconds_after(deaths, list(zip(frame["time"], frame["size"], strict=True)))
    trials.publish({"loss_s": statistics.median(to_next), "all_again_s": statistics.median(to_all)})
