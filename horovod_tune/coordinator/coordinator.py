"""Runs in the coordinator actor: returns rank 0's reports to the trainable, one at a time.

Step 4 of 5 of a report's path: `next_result()` stores its checkpoint, adds metrics of the world, and
returns it to `trainable.py`.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import MetricsError
from horovod_tune.messages import CheckpointPlace, Finished, Report, TrialRequest
from horovod_tune.session.session import COMMIT_FILE

if TYPE_CHECKING:
    from ray.tune import Checkpoint

    from horovod_tune.coordinator.trial_storage import TrialStorage

logger = logging.getLogger(__name__)


@dataclass
class _Trial:
    """The current trial.

    ``is_running`` is True from its first `next_result` until its ranks are ended; ``stored`` is where the
    checkpoint of its last report is.
    """

    request: TrialRequest
    storage: TrialStorage
    is_running: bool = False
    start_s: float = 0.0
    stored: CheckpointPlace | None = None
    has_warned_of_logs: bool = False


class Coordinator:
    """Runs one trial after another on the same workers, which start new processes for each."""

    _trial: _Trial

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def set_trial(self, request: TrialRequest, storage: TrialStorage) -> None:
        """Set the next trial; its training function starts with the first `next_result`."""
        self._trial = _Trial(request, storage)

    def restore(self, checkpoint: CheckpointPlace) -> None:
        """Make the trial start from a checkpoint; must be called before the first `next_result`."""
        self._trial.request = replace(self._trial.request, checkpoint=checkpoint)

    def next_result(self) -> tuple[dict[str, Any], Checkpoint | None] | None:
        """Return rank 0's next metrics and its stored checkpoint; None if the function has returned.

        Raises:
            StartFailed: the training actors did not start.
            TrainingFailed: a rank raised, died, stopped responding or lost contact with the others.
            MetricsError: the checkpoint contains something that cannot be stored.
        """
        trial = self._trial
        try:
            if not trial.is_running:
                trial.is_running, began = True, time.monotonic()
                self._group.begin(trial.request)
                trial.start_s = round(time.monotonic() - began, 4)
            event = self._group.next_event(trial.stored, self._keep_logs)
        except Exception as cause:
            trial.is_running = False  # so that `close` ends the processes without unwinding the trial
            self._keep_logs(at_end=True)
            try:
                self.close()
            except Exception:  # any: it must not hide the cause
                logger.exception("the workers could not be ended after %r", cause)
            raise
        match event:
            case Report(metrics=metrics, checkpoint_path=path):
                return self._store(metrics, path)
            case Finished():
                self._group.begin_end()
                self._keep_logs(at_end=True)
                return None

    def _store(self, metrics: dict[str, Any], path: str | None) -> tuple[dict[str, Any], Checkpoint | None]:
        trial, state = self._trial, self._group.state
        ranks = state.hosts
        more: dict[str, Any] = {
            "world_size": len(ranks),
            # In Horovod's notation; a string, since the TensorBoard logger would plot a list.
            "hosts": ",".join(f"{host}:{len(list(each))}" for host, each in groupby(ranks.values())),
            "start_s": trial.start_s,
        }
        if state.limits.is_elastic:
            more["world_changes"] = len(state.changes)
            more["world_change"] = state.changes[-1] if state.changes else ""
            more["world_change_s"] = round(state.change_s, 3)
        metrics = metrics | more | metrics  # a function's own metrics take precedence
        checkpoint, trial.stored = None, None
        if path is not None:
            nodes = (each.info.node_id for each in state.members if each.info and 0 in each.ranks)
            try:
                checkpoint, trial.stored = trial.storage.persist(path, metrics, node_id=next(nodes, None))
            except MetricsError as error:
                raise MetricsError(f"rank 0 of {len(ranks)} on {ranks.get(0)} failed: {error}") from None
            self._keep_logs(publish=True)
        return metrics, checkpoint

    def must_restart_elsewhere(self, node_id: str) -> bool:
        """Return True if the trial must restart on other nodes, as in `Slots`."""
        return self._group.world.slots.must_restart_elsewhere(self._group.state.members, node_id)

    def resize(self, workers: int, resources: bytes) -> bool:
        """Change the number of ranks at the next commit; False if the trial must restart."""
        return self._trial.is_running and self._group.world.resize(workers, resources)

    @property
    def nodes(self) -> list[str]:
        """The Ray node id of each worker."""
        return [worker.info.node_id for worker in self._group.state.members if worker.info is not None]

    def store_commit(self, metrics: dict[str, Any]) -> Checkpoint | None:
        """Make a checkpoint of the ranks' last commit; None if they have committed nothing."""
        if not self._trial.is_running:
            return None
        world = self._group.world
        dumped = world.first_reply("dump_commit", timeout_s=world.limits.timeout_s)
        if dumped is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, COMMIT_FILE).write_bytes(dumped)
            checkpoint, _ = self._trial.storage.persist(folder, metrics)
        return checkpoint

    def _keep_logs(self, *, publish: bool = False, at_end: bool = False) -> None:
        """Store what the ranks have printed.

        If that fails, one warning is logged: a log must neither fail the trial nor hide why it failed.
        """
        trial, chunks = self._trial, self._group.take_logs()
        try:
            for chunk in chunks:
                trial.storage.append_log(chunk.rank, chunk.text)
            if publish or at_end:
                trial.storage.publish_logs(at_end=at_end)
        except Exception as error:  # the storage may raise anything
            if not trial.has_warned_of_logs:
                trial.has_warned_of_logs = True
                logger.warning("the ranks' logs cannot be stored; this does not affect the trial: %r", error)

    def end_trial(self) -> None:
        """End the current trial; keep the workers for the next one if all of them are well."""
        if self._trial.is_running:
            self._trial.is_running = False
            can_continue = self._group.end_trial()
            self._keep_logs(at_end=True)
            if not can_continue:
                self._group.close()
                self._group.world.create()
        self._trial.storage.close()

    def close(self) -> None:
        """End the trial if it still runs, then end the workers; may be called twice."""
        try:
            if self._trial.is_running:
                # So that the function's `finally` blocks and the `atexit` handlers run, and the last output
                # reaches the log.
                self._group.end_trial()
                self._keep_logs(at_end=True)
        finally:
            self._trial.is_running = False
            self._group.close()
            self._trial.storage.close()
