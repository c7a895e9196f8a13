"""What the tests of TPU trials share. Real torch_xla runs on its CPU device, where it is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from sessions import local_ray


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
    with local_ray(num_cpus=2) as ray:
        yield ray
