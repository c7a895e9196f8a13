"""The tests that need an NVIDIA GPU (`make test-gpu`). If they cannot run, the reason is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sessions import local_ray

from horovod_tune.horovod_build.installed import installed_horovod, installed_torch

HERE = Path(__file__).parent


def what_is_missing(*, needs_horovod: bool) -> str:
    """Return why no GPU can be used here; "" if one can."""
    if not Path("/dev/nvidiactl").exists():
        return "this machine has no NVIDIA GPU (there is no /dev/nvidiactl)"
    torch, horovod = installed_torch(), installed_horovod()
    if torch is None or torch.cuda is None:
        return f"torch {torch.version if torch else '(none)'} is built without CUDA: make set-up TORCH=pip"
    if needs_horovod and (horovod is None or not horovod.version.endswith(".nccl")):
        have = horovod.version if horovod else "(none)"
        return f"Horovod {have} is built without NCCL: horovod-tune install-horovod --gpu nccl"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.slow)
        if missing := what_is_missing(needs_horovod="torch" not in item.name):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="module")
def ray_session(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A local Ray with this machine's GPUs, whose actors without one of their own still see them.

    In a module with ``TWO_RANKS_ON_ONE_GPU`` it believes in two GPUs where there is one.
    """
    import torch

    least = 2 if getattr(request.module, "TWO_RANKS_ON_ONE_GPU", False) else 1
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    try:
        with local_ray(num_cpus=4, num_gpus=max(least, torch.cuda.device_count())) as ray:
            yield ray
    finally:
        del os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"]
