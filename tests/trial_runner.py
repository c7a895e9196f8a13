"""Runs trials on one worker group without Tune: the coordinator in the test, real actors, real ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from worker_kinds import Workers

from horovod_tune import report
from horovod_tune.coordinator.coordinator import Coordinator
from horovod_tune.function import shipping


class LogsInMemory:
    """The part of a trial's storage that a trial without checkpoints uses."""

    def __init__(self) -> None:
        self.logs: dict[int, bytes] = {}

    def append_log(self, rank: int, text: bytes) -> None:
        self.logs[rank] = self.logs.get(rank, b"") + text

    def publish_logs(self, *, at_end: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


def run_what_config_says(config: dict[str, Any]) -> Any:
    return cloudpickle.loads(config["train"])(config)


class TrialRunner:
    """One coordinator with ``num_slots`` ranks. ``run`` is one trial; the next one takes the same workers."""

    def __init__(self, folder: Path, *, num_slots: int = 2, reuse_workers: bool = True) -> None:
        self._folder, self._workers = folder, Workers("gloo", folder, size=num_slots)
        self.group = self._workers.group
        self.group.world.create()
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.function = ray.put(shipping.dumps(run_what_config_says))
        self.coordinator = Coordinator(self.group, reuse_workers=reuse_workers)
        self.storage = LogsInMemory()

    def run(
        self, train: Callable[[dict[str, Any]], Any], *, stop_after: int | None = None, **config: Any
    ) -> list[dict[str, Any]]:
        """Run one trial and return rank 0's reports; ``stop_after`` reports a scheduler stops it."""
        request = self._workers.request(self.function, {"train": shipping.dumps(train), **config})
        self.storage = LogsInMemory()
        self.coordinator.set_trial(request, self.storage)  # type: ignore[arg-type]
        results = []
        while stop_after is None or len(results) < stop_after:
            result = self.coordinator.next_result()
            if result is None:
                break
            results.append(result[0])
        self.coordinator.end_trial()
        return results

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, as reported at their start; empty before the first trial."""
        return [worker.info.pid for worker in self.group.world.members if worker.info]

    @property
    def replaced_because(self) -> str:
        """Why the last trial's workers were replaced; empty when they were kept."""
        return "; ".join(self.coordinator.replaced_because)

    def close(self) -> None:
        self.coordinator.close()
        self._workers.close()


def exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def sound(config: dict[str, Any]) -> None:
    """Pass only in a process and a world that are as new ones are."""
    import horovod.torch as hvd
    import torch

    assert not hvd.is_initialized()
    hvd.init()
    assert torch.is_grad_enabled()
    sums = [hvd.allreduce(torch.full((size,), hvd.rank() + 1.0), op=hvd.Sum).sum() for size in (1, 3, 2)]
    named = hvd.allreduce(torch.ones(config.get("size", 4)), name="x", op=hvd.Sum)
    assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1
    report(sums=[each.item() for each in sums], named=named.tolist(), size=hvd.size())


def is_kept(runner: TrialRunner, train: Any, **arguments: Any) -> bool:
    """Return True if the trial after ``train`` runs in the same processes; no reason is given then."""
    runner.run(sound)
    before = runner.pids
    runner.run(train, **arguments)
    reason = runner.replaced_because
    runner.run(sound)
    runner.coordinator.replaced_because = [reason] if reason else []  # for the test to look at
    print("replaced because:", reason)
    assert (before == runner.pids) == (reason == "")
    assert before == runner.pids or not any(map(exists, before))
    return before == runner.pids
