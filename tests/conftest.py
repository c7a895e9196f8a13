"""What the tests of real trials share: a Ray session of their own, and a look at its processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sessions import local_ray

# A test says what it wants to see; Tune's tables and Ray's usage report are not it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "2")


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """A local Ray of 4 CPUs for the module, ended after it."""
    with local_ray(num_cpus=4) as ray:
        yield ray


@pytest.fixture
def tune_run(ray_session: Any, tmp_path: Any) -> Callable[..., Any]:
    """`tune.run` that writes below the test's own folder and prints nothing."""
    from ray import tune

    def run(trainable: Any, **arguments: Any) -> Any:
        settings = {"storage_path": str(tmp_path), "verbose": 0, "name": "experiment", **arguments}
        return tune.run(trainable, **settings)

    return run
