"""Hugging Face Transformers: a callback that reports a Trainer's evaluations to Tune."""

from __future__ import annotations

import logging
import os
from typing import Any

from horovod_tune import session
from horovod_tune.outside_training import refuse_below_a_rank

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "horovod_tune.integrations.transformers needs Transformers. "
        "Run `pip install 'horovod_tune[transformers]'`."
    ) from error

logger = logging.getLogger(__name__)

PREFIX = "eval_"


class TuneReporterCallback(TrainerCallback):
    """Reports to Tune at each evaluation: the newest evaluation in ``state.log_history``, of rank 0.

    Works in Horovod trials, in TPU trials and where Accelerate joins a trial's ranks; give it to the Trainer
    of every rank, since every rank waits at a report until Tune has decided. A trial that a scheduler stops,
    stops in its evaluation. In a script that `accelerate launch` runs without Tune there is nothing to
    report to: the callback says so once in the log and does nothing. In a process that a trial's training
    function has launched, it raises `NotInTraining`, as `report()` does there.

    Args:
        checkpoint: whether the Trainer saves at each evaluation, and the checkpoint goes to the trial's
            storage with the metrics. ``trainer.train(resume_from_checkpoint=get_checkpoint().path)`` goes on
            from it.

    Example:
        >>> def train(config):
        ...     trainer = Trainer(..., callbacks=[TuneReporterCallback(checkpoint=True)])
        ...     start = horovod_tune.get_checkpoint()
        ...     trainer.train(resume_from_checkpoint=start.path if start else None)
    """

    def __init__(self, *, checkpoint: bool = False) -> None:
        self._checkpoint = checkpoint
        self._waiting: dict[str, Any] | None = None
        self._said = False

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Report, or have the Trainer save first."""
        live = session.current()
        if live is None:
            refuse_below_a_rank("TuneReporterCallback")
            if not self._said:
                logger.info("no trial runs this training: TuneReporterCallback reports nothing")
                self._said = True
            return control
        metrics = newest_evaluation(state.log_history)
        # Horovod's ranks are each a world of its own to the Trainer: one that saves is enough, and they may
        # share a directory.
        saves = self._checkpoint and (live.world.rank == 0 or args.world_size > 1)
        if not saves:
            live.report(metrics)
            return control
        # The Trainer saves right after its evaluation, if told to, and then calls on_save.
        self._waiting = metrics
        control.should_save = True
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report the evaluation that this checkpoint belongs to."""
        self._report_waiting(os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report an evaluation after which the Trainer did not save: one that was called by hand."""
        self._report_waiting(None)

    def _report_waiting(self, directory: str | None) -> None:
        live, metrics = session.current(), self._waiting
        if live is None or metrics is None:
            return
        self._waiting = None
        # Ranks other than 0 need not have a checkpoint: where Accelerate joins them, the first one saves.
        live.report(metrics, directory if live.world.rank == 0 else None)


def newest_evaluation(log_history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the newest entry of ``TrainerState.log_history`` that an evaluation wrote.

    Raises:
        ValueError: there is none.

    >>> newest_evaluation([{"loss": 2.0, "step": 1}, {"eval_loss": 1.5, "epoch": 1.0, "step": 1}])
    {'eval_loss': 1.5, 'epoch': 1.0, 'step': 1}
    """
    for entry in reversed(log_history):
        if any(name.startswith(PREFIX) for name in entry):
            return dict(entry)
    raise ValueError(f"log_history has no evaluation: no entry with a metric named {PREFIX}...")
