"""What the tests of TPU trials share. Real torch_xla runs on its CPU device, where it is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cpu_device() -> Iterator[None]:
    """The driver as one that tries a TPU function on the CPU."""
    before = os.environ.get("PJRT_DEVICE")
    os.environ["PJRT_DEVICE"] = "CPU"
    yield
    if before is None:
        del os.environ["PJRT_DEVICE"]
    else:
        os.environ["PJRT_DEVICE"] = before


@pytest.fixture(scope="module")
def ray_session(cpu_device: None) -> Iterator[Any]:
    import ray

    ray.shutdown()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def tune_run(ray_session: Any, tmp_path: Path) -> Callable[..., Any]:
    from ray import tune

    def run(trainable: Any, **arguments: Any) -> Any:
        settings = {"storage_path": str(tmp_path), "verbose": 0, "name": "experiment", **arguments}
        return tune.run(trainable, **settings)

    return run
