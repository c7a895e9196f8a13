"""Runs in the coordinator actor: returns rank 0's reports to the trainable, one at a time.

Step 4 of 5 of a report's path: `next_result()` stores its checkpoint, adds metrics of the world, and
returns it to `trainable.py`.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_tune import ray_compat
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import MetricsError, StartFailed, TrainingFailed
from horovod_tune.messages import CheckpointPlace, Finished, Report, TrialRequest
from horovod_tune.session.session import COMMIT_FILE

if TYPE_CHECKING:
    from ray.tune import Checkpoint

    from horovod_tune.coordinator.trial_storage import TrialStorage

logger = logging.getLogger(__name__)

# Added to the error of a trial in used processes.
_USED = "(in processes that earlier trials had used; reuse_workers=False gives every trial new ones)"


class Coordinator:
    """Runs one trial after another on the same workers.

    Args:
        group: the worker group, whose workers may have begun to start.
        function: the training function as cloudpickle bytes.
        reuse_workers: True if workers that a trial leaves usable run the next one.
    """

    def __init__(self, group: WorkerGroup, function: bytes, *, reuse_workers: bool) -> None:
        self._group = group
        self._function = function
        self._reuse_workers = reuse_workers
        self._storage: TrialStorage | None = None
        self._request: TrialRequest | None = None
        self._started = False
        self._has_warned_of_logs = False
        self._workers_have_function = False
        # True if the workers ran another trial before this one.
        self._workers_are_used = False
        self._has_reported = False
        self._start_s = 0.0
        # Where the checkpoint of the last report is stored.
        self._stored: CheckpointPlace | None = None
        # Why the previous trial's workers were not kept; empty if they were.
        self.replaced_because: list[str] = []

    def set_trial(self, request: TrialRequest, storage: TrialStorage) -> None:
        """Set the next trial; its training function starts with the first `next_result`."""
        self._release_storage()
        self._request, self._storage = request, storage
        self._started = self._has_warned_of_logs = self._has_reported = False

    def restore(self, checkpoint: CheckpointPlace) -> None:
        """Make the trial start from a checkpoint; must be called before the first `next_result`."""
        assert self._request is not None
        self._request = replace(self._request, checkpoint=checkpoint)

    def next_result(self) -> tuple[dict[str, Any], Checkpoint | None] | None:
        """Return rank 0's next metrics and its stored checkpoint; None if the function has returned.

        Raises:
            StartFailed: the training actors did not start.
            TrainingFailed: a rank was lost.
        """
        assert self._request is not None and self._storage is not None, "set_trial() comes first"
        try:
            if not self._started:
                self._start()
            # Until Tune requests this result, every rank waits in its previous report.
            event = self._group.next_event(self._stored)
        except Exception as cause:
            self._started = False  # so that `close` ends the processes without unwinding the trial
            if self._may_retry(cause):
                return self._retry(cause)
            self._end_workers(cause)
            if self._workers_are_used and isinstance(cause, TrainingFailed):
                first, _, rest = str(cause).partition("\n")
                cause.args = (f"{first}\n{_USED}\n{rest}",)
            raise
        self._keep_logs()
        match event:
            case Report(metrics=metrics, checkpoint_path=path):
                return self._store(metrics, path)
            case Finished():
                if self._reuse_workers:
                    self._group.begin_reset()
                self._keep_logs(at_end=True)
                return None

    def _may_retry(self, cause: Exception) -> bool:
        """Return True if the trial may have failed because of what an earlier one left in its processes.

        A trial that has reported must not be retried, since Tune has its results.
        """
        if (
            not self._workers_are_used
            or self._has_reported
            or not isinstance(cause, TrainingFailed | StartFailed)
        ):
            return False
        lost = getattr(cause, "lost_nodes", ())
        return not (lost and ray_compat.is_preempted(lost))

    def _retry(self, cause: Exception) -> Any:
        """Start the trial again in new processes; a second failure is raised."""
        assert self._request is not None
        logger.warning(
            "horovod_tune: %s failed before its first report in processes that an earlier trial had used; it "
            "is tried again in new ones. reuse_workers=False gives every trial new ones. It failed with: %s",
            self._request.trial_name,
            str(cause).strip().rpartition("\n")[2],
        )
        self._keep_logs(at_end=True)
        self._replace_workers(["the trial failed in them"])
        return self.next_result()

    def _end_workers(self, cause: Exception) -> None:
        """End the workers after ``cause``, which no later error may hide."""
        self._keep_logs(at_end=True)
        try:
            self.close()
        except Exception as error:  # any: it must not hide the cause
            logger.exception("the workers could not be ended after %r", cause)
            if sys.version_info >= (3, 11):
                cause.add_note(f"The workers could not be ended either: {error!r}")

    def _start(self) -> None:
        assert self._request is not None
        self._started, self._stored = True, None
        self._workers_are_used = self._workers_have_function
        asked = time.monotonic()
        function = None if self._workers_have_function else self._function
        self._group.begin(replace(self._request, function=function))
        self._workers_have_function = True
        self._start_s = round(time.monotonic() - asked, 4)

    def _store(self, metrics: dict[str, Any], path: str | None) -> tuple[dict[str, Any], Checkpoint | None]:
        assert self._storage is not None
        self._has_reported = True
        hosts = groupby(self._group.hosts.values())
        world = {
            "world_size": len(self._group.hosts),
            # In Horovod's notation; a string, since the TensorBoard logger would plot a list.
            "hosts": ",".join(f"{host}:{len(list(ranks))}" for host, ranks in hosts),
            "start_s": self._start_s,
            **self._group.change_metrics,
        }
        metrics = metrics | world | metrics  # a function's own metrics of these names count
        checkpoint, place = None, None
        if path is not None:
            try:
                checkpoint, place = self._storage.persist(path, metrics)
            except MetricsError as error:
                where = f"rank 0 of {len(self._group.hosts)} on {self._group.hosts.get(0)}"
                raise MetricsError(f"{where} failed: {error}") from None
            self._keep_logs(publish=True)
        self._stored = place
        return metrics, checkpoint

    def must_restart_elsewhere(self, node_id: str) -> bool:
        """Return True if the trial must restart on other nodes, see `Slots.must_restart_elsewhere`."""
        return self._group.world.slots.must_restart_elsewhere(self._group.workers, node_id)

    def resize(self, workers: int, resources: bytes) -> bool:
        """Change the number of ranks at the next commit; False if the trial must restart."""
        return self._started and self._group.world.resize(workers, resources)

    @property
    def nodes(self) -> list[str]:
        """The Ray node id of each worker."""
        return [worker.info.node_id for worker in self._group.workers if worker.info is not None]

    def store_commit(self, metrics: dict[str, Any]) -> Checkpoint | None:
        """Make a checkpoint of the ranks' last commit; None if they have committed nothing."""
        assert self._storage is not None
        world = self._group.world
        dumped = world.first_reply("dump_commit", timeout_s=world.limits.timeout_s) if self._started else None
        if dumped is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, COMMIT_FILE).write_bytes(dumped)
            checkpoint, _ = self._storage.persist(folder, metrics)
        return checkpoint

    def _keep_logs(self, *, publish: bool = False, at_end: bool = False) -> None:
        """Store what the ranks have printed.

        If that fails, the trial logs one warning: a log must not fail it, nor hide why it failed.
        """
        assert self._storage is not None
        chunks = self._group.take_logs()
        try:
            for chunk in chunks:
                self._storage.append_log(chunk.rank, chunk.text)
            if publish or at_end:
                self._storage.publish_logs(at_end=at_end)
        except Exception as error:  # the storage may raise anything
            if not self._has_warned_of_logs:
                self._has_warned_of_logs = True
                logger.warning("the ranks' logs cannot be stored; this does not affect the trial: %r", error)

    def end_trial(self) -> None:
        """End the current trial; keep the workers for the next one if they can be reset."""
        if not self._started:
            return  # the trial has not begun: the workers are as they were
        self._started = False
        if self._reuse_workers:
            problems = self._group.end_trial()
        else:
            problems = ["reuse_workers=False", *self._group.unwind()]
        self._keep_logs(at_end=True)
        self._release_storage()
        self.replaced_because = problems
        if problems:
            self._replace_workers(problems)

    def _replace_workers(self, problems: list[str]) -> None:
        self.replaced_because = problems
        self._group.close()
        self._workers_have_function = False
        self._group.create()

    def close(self) -> None:
        """End the trial if it still runs, and the workers' processes; twice is harmless."""
        try:
            if self._started:
                # So that the training function's `finally` blocks run, and its last output reaches the log.
                self._group.unwind()
                self._keep_logs(at_end=True)
        finally:
            self._started = self._workers_have_function = False
            self._group.close()
            self._release_storage()

    def _release_storage(self) -> None:
        if self._storage is not None:
            self._storage.close()
