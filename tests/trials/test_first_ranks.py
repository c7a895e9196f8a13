"""The first ranks of a Ray session: later ones are forked from a process that has loaded more meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sessions import local_ray

from horovod_tune import DistributedTrainableCreator

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def ray_session() -> Iterator[Any]:
    """A Ray of its own: in the shared one other tests have started ranks."""
    with local_ray(num_cpus=2) as ray:
        yield ray


def test_the_first_ranks_import_no_ray_tune_unless_their_function_does(tune_run):
    def train(config):
        import sys

        from horovod_tune import report

        heavy = ("ray.tune", "ray.data", "pandas")
        report(heavy=[name for name in heavy if name in sys.modules])

    (trial,) = tune_run(DistributedTrainableCreator(train, num_slots=1)).trials
    assert trial.last_result["heavy"] == []
