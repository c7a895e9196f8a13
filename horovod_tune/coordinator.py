"""The coordinator of a trial: between Tune, which asks for one result at a time, and its ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from horovod_tune.host_slots import write_slots
from horovod_tune.messages import CheckpointPlace, Finished, Report, TrialOrder
from horovod_tune.workers.group import WorkerGroup

if TYPE_CHECKING:
    from ray.tune import Checkpoint

    from horovod_tune.storage import TrialStorage


class Coordinator:
    """Runs one trial after another on the same workers. Starts nothing until `begin_workers` is called.

    Args:
        group: the worker group, not started.
        function: the training function as cloudpickle bytes.
        reuse_workers: whether a group that a trial leaves fit may run the next one.
    """

    def __init__(self, group: WorkerGroup, function: bytes, *, reuse_workers: bool) -> None:
        self._group = group
        self._function = function
        self._reuse_workers = reuse_workers
        self._storage: TrialStorage | None = None
        self._order: TrialOrder | None = None
        self._started = False
        self._function_is_there = False
        self._facts: dict[str, Any] = {}
        """What every result of the trial says of its world."""
        self.replaced_because: list[str] = []
        """Why the workers of the trial before were not kept; empty when they were."""

    def begin_workers(self) -> None:
        """Begin to start the training actors; returns at once."""
        self._group.create()

    def set_trial(self, order: TrialOrder, storage: TrialStorage) -> None:
        """Take the next trial; its training function starts with the first `next_result`."""
        self._order, self._storage = order, storage
        self._started = False

    def restore(self, checkpoint: CheckpointPlace) -> None:
        """Let the trial start from a checkpoint. Must come before its first `next_result`."""
        assert self._order is not None
        self._order = replace(self._order, checkpoint=checkpoint)

    def next_result(self) -> tuple[dict[str, Any], Checkpoint | None] | None:
        """Return rank 0's next metrics and its stored checkpoint; None when the function has returned.

        Raises:
            StartFailed: the training actors did not come up.
            TrainingFailed: a rank was lost.
        """
        assert self._order is not None and self._storage is not None, "set_trial() comes first"
        try:
            if not self._started:
                self._start()
            event = self._group.next_event()
        except Exception:
            self._started = False  # nothing left to unwind
            self._finish_logs()
            self.close()
            raise
        self._write_logs()
        match event:
            case Report(index=index, metrics=metrics, checkpoint_path=path):
                return self._store(index, metrics, path)
            case Finished():
                if self._reuse_workers:
                    self._group.begin_to_tidy()
                self._finish_logs()
                return None

    def _start(self) -> None:
        assert self._order is not None
        self._started = True
        asked = time.monotonic()
        function = None if self._function_is_there else self._function
        self._group.begin(replace(self._order, function=function))
        self._function_is_there = True
        hosts = self._group.hosts
        self._facts = {
            "world_size": len(hosts),
            # A string: Tune's loggers for TensorBoard and the like draw lists of numbers.
            "hosts": write_slots(hosts),
            "start_s": round(time.monotonic() - asked, 4),
        }

    def _store(
        self, index: int, metrics: dict[str, Any], path: str | None
    ) -> tuple[dict[str, Any], Checkpoint | None]:
        assert self._storage is not None
        metrics = {**metrics}
        for name, fact in self._facts.items():
            metrics.setdefault(name, fact)
        checkpoint, place = None, None
        if path is not None:
            checkpoint, place = self._storage.persist(path, metrics)
            self._storage.publish_logs()
        # Rank 0 waits in its report until Tune asks for the next result: only then is the trial to go on.
        self._group.proceed(index, place)
        return metrics, checkpoint

    def _finish_logs(self) -> None:
        """Bring what the ranks printed in this trial to its directory."""
        assert self._storage is not None
        self._write_logs()
        self._storage.publish_logs()

    def _write_logs(self) -> None:
        assert self._storage is not None
        for chunk in self._group.take_logs():
            self._storage.append_log(chunk.rank, chunk.text)

    def end_trial(self) -> None:
        """End the current trial; keep the workers for the next one if they are fit for it."""
        if not self._started:
            return  # the workers have not been touched since they were made
        self._started = False
        if not self._reuse_workers:
            self._replace_workers(["reuse_workers=False"])
            return
        problems = self._group.end_trial()
        self._finish_logs()
        self.replaced_because = problems
        if problems:
            self._replace_workers(problems)

    def _replace_workers(self, problems: list[str]) -> None:
        self.replaced_because = problems
        self._group.close()
        self._function_is_there = False
        self._group.create()

    def close(self) -> None:
        """End the trial if it still runs, and the workers' processes; twice is harmless."""
        if self._started:
            # Lets the training function's `finally` blocks run, and its last lines reach the log.
            self._group.unwind()
            self._finish_logs()
        self._group.close()
        self._function_is_there = False
        self._started = False
