"""Hugging Face Transformers: a Trainer on Horovod's ranks, and a callback that reports its evaluations."""

from __future__ import annotations

import logging
import os
from typing import Any

from horovod_tune.errors import NotSynchronised
from horovod_tune.session import session
from horovod_tune.session.session import refuse_in_child_process

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "horovod_tune.integrations.transformers needs Transformers. "
        "Run `pip install 'horovod_tune[transformers]'`."
    ) from error

logger = logging.getLogger(__name__)

PREFIX = "eval_"


class TuneReporterCallback(TrainerCallback):
    """At each evaluation, reports rank 0's newest metrics in ``state.log_history`` to Tune.

    Works in Horovod trials, in TPU trials and in trials whose ranks Accelerate joins. Give it to the Trainer
    of every rank, since every rank waits at a report until Tune has decided. If a scheduler stops the trial,
    training ends at that evaluation. In a Horovod trial, pass the Trainer to `distribute` first, or the
    callback raises `NotSynchronised`. In a script that `accelerate launch` runs without Tune, the callback
    logs once that it reports nothing. In a process that a trial's training function has launched, it raises
    `NotInTraining`, as `report()` does.

    Args:
        checkpoint: if True, the Trainer saves at each evaluation (with ``save_strategy="best"``, at each that
            is the best so far), and the checkpoint goes to the trial's storage with the metrics. Those of
            several ``eval_dataset`` are one report.
            ``trainer.train(resume_from_checkpoint=get_checkpoint().path)`` continues from it.

    Example:
        >>> def train(config):
        ...     trainer = distribute(Trainer(..., callbacks=[TuneReporterCallback(checkpoint=True)]))
        ...     start = horovod_tune.get_checkpoint()
        ...     trainer.train(resume_from_checkpoint=start.path if start else None)
    """

    def __init__(self, *, checkpoint: bool = False) -> None:
        self._checkpoint = checkpoint
        # The metrics of evaluations in train() since the last report, until the Trainer has saved or not.
        self._waiting: dict[str, Any] = {}
        self._is_training = False
        self._has_logged = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Raise NotSynchronised if every rank would train a model of its own."""
        self._is_training, self._waiting = True, {}
        live = session.current()
        if live is None or not _trains_by_itself(live, args) or hasattr(args, _MARK):
            return
        # A `hvd.DistributedOptimizer`, which Accelerate may have wrapped.
        if hasattr(getattr(optimizer, "optimizer", optimizer), "skip_synchronize"):
            return
        raise NotSynchronised(
            f"with this Trainer, each of the {live.rank_info.size} ranks would train by itself, on all of "
            "the data, and their models would drift apart. Before trainer.train() write:\n"
            "    from horovod_tune.integrations.transformers import distribute\n"
            "    trainer = distribute(trainer)"
        )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Report, or have the Trainer save first."""
        live = session.current()
        if live is None:
            refuse_in_child_process("TuneReporterCallback")
            if not self._has_logged:
                logger.info("this training runs outside a trial: TuneReporterCallback reports nothing")
                self._has_logged = True
            return control
        metrics = newest_evaluation(state.log_history)
        if not (self._checkpoint and self._is_training):
            live.report(metrics)
            return control
        # All ranks wait, so that they make the same reports.
        self._waiting |= metrics
        # With should_save, the Trainer saves right after its evaluation and then calls on_save. To it, each
        # of Horovod's ranks is a world of its own, so all would save. Only rank 0 does, since the ranks may
        # share a directory.
        control.should_save |= live.rank_info.rank == 0 or args.world_size > 1
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report the evaluation that this checkpoint belongs to."""
        self._report_waiting(os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report an evaluation after which the Trainer did not save on this rank."""
        self._report_waiting(None)

    on_epoch_begin = on_step_begin

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report such an evaluation after the last step."""
        self._is_training = False
        self._report_waiting(None)

    def _report_waiting(self, directory: str | None) -> None:
        live, metrics = session.current(), self._waiting
        if live is None or not metrics:
            return
        self._waiting = {}
        # The other ranks may have no checkpoint: if Accelerate joins the ranks, only the first one saves.
        live.report(metrics, directory if live.rank_info.rank == 0 else None)


# The attribute that `distribute` sets on a Trainer's arguments.
_MARK = "_distributed_by_horovod_tune"


def _trains_by_itself(live: session.Session, args: TrainingArguments) -> bool:
    """Return True if each rank's Trainer would train by itself: on Horovod's ranks, without Accelerate."""
    return live.committed is not None and live.rank_info.size > 1 and args.world_size == 1


def distribute(trainer: Trainer) -> Trainer:
    """Make a Trainer train one model on all ranks of a Horovod trial, and return it.

    Each rank takes its share of ``train_dataset``, all start from rank 0's weights, and gradients are
    averaged before they are clipped. Only rank 0 saves, logs and reports to trackers; every rank evaluates
    on all of ``eval_dataset``. A step's batch has ``per_device_train_batch_size *
    gradient_accumulation_steps * hvd.size()`` rows.
    Elsewhere (a TPU trial, ranks that Accelerate joins, no trial) the Trainer is left as it is.

    Raises:
        TypeError: ``train_dataset`` has no length, so its shares could differ in their number of steps.
    """
    live = session.current()
    if live is None or not _trains_by_itself(live, trainer.args):
        return trainer
    import horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    setattr(trainer.args, _MARK, True)
    if trainer.train_dataset is not None:
        trainer.train_dataset = share_of(trainer.train_dataset, rank, size)
    own_step = trainer.training_step

    def training_step(model: Any, *args: Any, **keywords: Any) -> Any:
        loss = own_step(model, *args, **keywords)
        _average_gradients(model)
        return loss

    trainer.training_step = training_step  # type: ignore[method-assign]
    trainer.add_callback(_BroadcastWeights())
    if rank > 0:
        trainer.args.save_strategy = "no"
        trainer.save_model = lambda *_, **__: None  # type: ignore[method-assign]
        trainer.is_world_process_zero = trainer.is_local_process_zero = lambda: False  # type: ignore[method-assign]
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = False
    return trainer


class _BroadcastWeights(TrainerCallback):
    """Broadcasts rank 0's weights once they are initialised, or loaded from a checkpoint."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        import horovod.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def share_of(dataset: Any, rank: int, size: int) -> Any:
    """Return a rank's share of a data set with a length; short shares are filled up from its beginning.

    >>> list(share_of([0, 1, 2, 3, 4], 1, 2))
    [1, 3, 0]
    """
    try:
        length = len(dataset)
    except TypeError:
        raise TypeError(
            f"distribute() needs a train_dataset with a length, so that all ranks take the same number "
            f"of steps, got {type(dataset).__name__}"
        ) from None
    indices = [index % length for index in range(rank, -(-length // size) * size, size)]
    if hasattr(dataset, "select"):  # a Dataset of the library `datasets` stays one
        return dataset.select(indices)
    from torch.utils.data import Subset

    return Subset(dataset, indices)


def _average_gradients(model: Any) -> None:
    """Average the gradients over the ranks, in place.

    Gradients from an earlier batch of the same step are averages already; averaging them again is harmless.
    """
    import horovod.torch as hvd
    import torch

    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:  # not used on this rank, perhaps on another
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        gradients.append(gradient)
    if not gradients:
        return
    hvd.grouped_allreduce_(gradients, name="horovod_tune.trainer_gradients", op=hvd.Average)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not None or gradient.any():
            parameter.grad = gradient


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
