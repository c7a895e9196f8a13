"""What Ray's tests of its old Horovod integration and Horovod's of its executor claim, tried on ours.

`docs/peers.md` has the list; claims that other tests cover already are not repeated here.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import eventually
from ray import tune
from ray.tune import Checkpoint

from horovod_tune import DistributedTrainableCreator

pytestmark = pytest.mark.usefixtures("ray_session")
pytest.importorskip("horovod")


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """The ranks cannot import this file, so its functions travel as code."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def count(config: dict[str, Any]) -> None:
    """Train without an end, with a checkpoint an epoch where that is wanted."""
    import horovod.torch as hvd

    from horovod_tune import report

    hvd.init()
    epoch = 0
    while True:
        epoch += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "epoch").write_text(str(epoch))
            checkpoint = Checkpoint.from_directory(directory) if config["keeps"] else None
            report({"rank": hvd.rank(), "epoch": epoch}, checkpoint=checkpoint)


def test_trials_end_at_the_stop_criterion_with_a_checkpoint_where_one_was_made_and_free_what_they_held(
    ray_session: Any, tune_run: Callable[..., Any]
) -> None:
    before = ray_session.available_resources()["CPU"]
    analysis = tune_run(
        DistributedTrainableCreator(count, num_hosts=1, num_slots=2),
        config={"keeps": tune.grid_search([True, False])},
        num_samples=2,
        stop={"training_iteration": 2},
    )
    assert len(analysis.trials) == 4
    for trial in analysis.trials:
        assert (trial.last_result["training_iteration"], trial.last_result["rank"]) == (2, 0)
        assert (trial.checkpoint is not None) == trial.config["keeps"]
        if trial.config["keeps"]:
            assert Path(trial.checkpoint.path, "epoch").read_text() == "2"
    eventually(lambda: ray_session.available_resources().get("CPU") == before, within_s=60)
