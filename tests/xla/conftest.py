"""What the tests of TPU trials share. Real torch_xla runs on its CPU device, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sessions import local_ray


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """A Ray of a driver that tries a TPU function on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        with local_ray(num_cpus=2) as ray:
            yield ray
