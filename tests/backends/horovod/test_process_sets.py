"""Process sets of Horovod that a training function makes and removes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from worker_kinds import Workers, skip_unless_installed

from horovod_tune import report

pytestmark = pytest.mark.processes


def test_a_set_that_the_function_removes_is_freed_at_once(ray_session: Any, tmp_path: Path) -> None:
    skip_unless_installed("gloo")

    def train(config: dict[str, Any]) -> None:
        import horovod.torch as hvd
        import torch

        hvd.init(process_sets="dynamic")

        def count() -> list[int]:
            return [len(os.listdir(f"/proc/self/{each}")) for each in ("fd", "task")]

        def use_set() -> None:
            one = hvd.add_process_set([1])
            if hvd.rank() == 1:
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=one).item() == 1
            hvd.barrier()
            assert hvd.remove_process_set(one)

        use_set()
        before = count()
        for _ in range(5):
            use_set()
        report(more=[now - then for now, then in zip(count(), before, strict=True)])

    workers = Workers("gloo", tmp_path)
    try:
        _, events = workers.run(train)
        assert events[0].metrics["more"] == [0, 0]
    finally:
        workers.close()
