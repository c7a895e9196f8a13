"""What Tune's schedulers say of a whole training."""

from __future__ import annotations

from typing import Any

import pytest
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)

from horovod_tune.ray_adapter import whole_training
from horovod_tune.search import PromotingASHA


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (ASHAScheduler(max_t=52), ("training_iteration", 52.0)),
        (ASHAScheduler(time_attr="epoch", max_t=20), ("epoch", 20.0)),
        (PromotingASHA(time_attr="samples", max_t=5e4), ("samples", 5e4)),
        (HyperBandScheduler(max_t=81), ("training_iteration", 81.0)),
        (HyperBandForBOHB(max_t=27), ("training_iteration", 27.0)),
        (ResourceChangingScheduler(ASHAScheduler(max_t=9)), ("training_iteration", 9.0)),
        (PopulationBasedTraining(hyperparam_mutations={"x": [1, 2]}), None),
        (MedianStoppingRule(), None),
        (FIFOScheduler(), None),
        ("asha", None),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_those_that_know_where_a_training_ends_say_it(scheduler: Any, expected: Any) -> None:
    assert whole_training(scheduler) == expected
