"""What ranks print in real trials is kept to the last line."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest

from horovod_tune import DistributedTrainableCreator

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("ray_session")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def print_much(config):
    """Print 3.5 MB, report, and then finish or raise."""
    import horovod.torch as hvd

    from horovod_tune import report

    hvd.init()
    for number in range(35_000):
        print(f"rank {hvd.rank()} line {number} {'x' * 80}")
    print("BEFORE", flush=True)
    report(loss=1.0)
    print("AFTER", flush=True)
    print("y" * 99 + "\n", end="", file=sys.stderr)
    hvd.barrier()
    if config["fails"]:
        raise RuntimeError(f"rank {hvd.rank()} gives up")


def test_a_long_log_is_kept_to_its_last_line(tune_run):
    from ray import tune

    analysis = tune_run(
        DistributedTrainableCreator(print_much, num_slots=2),
        config={"fails": tune.grid_search([False, True])},
        max_concurrent_trials=1,
        raise_on_failed_trial=False,
    )
    assert sorted(trial.status for trial in analysis.trials) == ["ERROR", "TERMINATED"]
    for trial in analysis.trials:
        # A rank that is killed after the other's failure may not reach its last lines.
        whole = 0
        # On a busy machine its output may come after the timeout.
        for path in Path(trial.path).glob("rank_*.log"):
            rank, text = path.stem[-1], path.read_text()
            assert text.startswith(f"rank {rank} line 0 x")
            assert f"rank {rank} line 34999 {'x' * 80}\nBEFORE\n" in text
            whole += "\nAFTER\n" in text and "y" * 99 in text
        assert whole == 2 if trial.status == "TERMINATED" else whole >= 1
