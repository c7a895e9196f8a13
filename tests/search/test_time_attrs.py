"""What Tune's schedulers go by."""

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

from horovod_tune.ray_compat import time_attr_of
from horovod_tune.search import PromotingASHA


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (ASHAScheduler(max_t=52), "training_iteration"),
        (ASHAScheduler(time_attr="epoch", max_t=20), "epoch"),
        (PromotingASHA(time_attr="samples", max_t=5e4), "samples"),
        (HyperBandScheduler(max_t=81), "training_iteration"),
        (HyperBandForBOHB(max_t=27), "training_iteration"),
        (ResourceChangingScheduler(ASHAScheduler(max_t=9)), "training_iteration"),
        (PopulationBasedTraining(hyperparam_mutations={"x": [1, 2]}), None),
        (MedianStoppingRule(), None),
        (FIFOScheduler(), None),
        ("asha", None),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_those_that_know_where_a_training_ends_say_what_they_go_by(scheduler: Any, expected: Any) -> None:
    assert time_attr_of(scheduler) == expected
