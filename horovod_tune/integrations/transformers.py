"""Hugging Face Transformers: a Trainer on Horovod's ranks, and a callback that reports its evaluations."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from horovod_tune.errors import NotSynchronised, SpecError
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


class TuneReporterCallback(TrainerCallback):
    """Reports rank 0's metrics of each evaluation to Tune, if their names begin with ``eval_``.

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
            ``trainer.train(resume_from_checkpoint=get_checkpoint().path)`` continues from it, with the
            ``learning_rate`` and ``weight_decay`` of this trial's ``TrainingArguments``.

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
        *_: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        **more: Any,
    ) -> None:
        """Check that the training can be right, and prepare one that continues from a checkpoint.

        Raises:
            NotSynchronised: Every rank would train a model of its own.
            SpecError: The checkpoint is from a training with another number of steps per epoch.
        """
        self._is_training, self._waiting = True, {}
        live = session.current()
        if live is None:
            return
        # A `hvd.DistributedOptimizer`, which Accelerate may have wrapped.
        is_horovods = hasattr(getattr(optimizer, "optimizer", optimizer), "skip_synchronize")
        if _trains_by_itself(live, args) and not hasattr(state, _MARK) and not is_horovods:
            raise NotSynchronised(
                f"with this Trainer, each of the {live.rank_info.size} ranks would train by itself, on all "
                "of the data, and their models would drift apart. Before trainer.train() write:\n"
                "    from horovod_tune.integrations.transformers import distribute\n"
                "    trainer = distribute(trainer)"
            )
        if state.global_step > 0:
            _refuse_other_steps_per_epoch(args, state, train_dataloader)
            if start := live.get_checkpoint():
                _keep_own_rates(args, start.path, optimizer, lr_scheduler)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Report, or have the Trainer save first."""
        live = session.current()
        if live is None:
            refuse_in_child_process("TuneReporterCallback")
            if not self._has_logged:
                logger.info("this training runs outside a trial: TuneReporterCallback reports nothing")
                self._has_logged = True
            return control
        metrics = {**more["metrics"], "step": state.global_step}
        # trainer.evaluate(test_dataset, metric_key_prefix="test") is not for Tune.
        if not any(name.startswith("eval_") for name in metrics):
            return control
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

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **more: Any) -> None:
        """Report the evaluation that this checkpoint belongs to."""
        self._report_waiting(os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}"))

    def on_step_begin(self, *_: Any, **more: Any) -> None:
        """Report an evaluation after which the Trainer did not save on this rank."""
        self._report_waiting(None)

    on_epoch_begin = on_step_begin

    def on_train_end(self, *_: Any, **more: Any) -> None:
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


# The attribute of the TrainerState of a training that `distribute` has prepared.
_MARK = "_distributed_by_horovod_tune"


def _refuse_other_steps_per_epoch(args: TrainingArguments, state: TrainerState, dataloader: Any) -> None:
    """Raise SpecError if the steps so far are another number of epochs than in the checkpoint.

    Transformers continues at the step, whatever epoch that is now.
    """
    if args.max_steps > 0:
        return
    per_epoch = max(1, math.ceil(len(dataloader) / args.gradient_accumulation_steps))
    epoch = state.epoch or 0.0
    # Within an epoch, the two differ by less than a step if its last step has fewer batches.
    if abs(epoch * per_epoch - state.global_step) >= 1:
        raise SpecError(
            f"a step's batch must stay as large as before the checkpoint, which has {epoch:g} epochs "
            f"in {state.global_step} steps, got one with {per_epoch} steps per epoch: training would end too "
            "early, or repeat epochs. With another number of ranks, change per_device_train_batch_size or "
            "gradient_accumulation_steps accordingly"
        )


def _keep_own_rates(args: TrainingArguments, start: str, optimizer: Any, lr_scheduler: Any) -> None:
    """Replace the rate and weight decay in the checkpoint: PBT may have copied it from another trial."""
    import torch

    names = ("training_args.bin", "optimizer.pt", "scheduler.pt")
    paths = [os.path.join(start, name) for name in names]
    if not all(map(os.path.isfile, paths)):  # Transformers has not loaded the rate
        return
    of_start = torch.load(paths[0], weights_only=False)
    factor = args.learning_rate / (of_start.learning_rate or 1)
    for group in optimizer.param_groups:
        for name in {"lr", "initial_lr"} & set(group):
            group[name] *= factor
    groups = optimizer.param_groups
    # The Trainer's second group are the biases and norms.
    if len(groups) == 2 and groups[1].get("weight_decay") == 0:
        groups[0]["weight_decay"] = args.weight_decay
    lr_scheduler.base_lrs = [rate * factor for rate in getattr(lr_scheduler, "base_lrs", ())]


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
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(each, _OneModel) for each in callbacks):
        return trainer
    import horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if trainer.train_dataset is not None:
        trainer.train_dataset = share_of(trainer.train_dataset, rank, size)
    own_step, own_evaluate = trainer.training_step, trainer.evaluate

    def training_step(model: Any, *args: Any, **keywords: Any) -> Any:
        loss = own_step(model, *args, **keywords)
        _average_gradients(model)
        return loss

    def evaluate(*args: Any, **keywords: Any) -> Any:
        # Early stopping and the like must decide the same on all ranks. Later, a rank may evaluate by itself.
        if trainer.is_in_train:
            model: Any = trainer.model
            moving = {name for name, each in model.named_buffers() if each.is_floating_point()}
            _broadcast({name: each for name, each in model.state_dict().items() if name in moving})
        return own_evaluate(*args, **keywords)

    trainer.training_step, trainer.evaluate = training_step, evaluate  # type: ignore[method-assign]
    callbacks.insert(0, _OneModel())  # before TuneReporterCallback, which looks for its mark
    if rank > 0:
        trainer.args.save_strategy = "no"
        trainer.save_model = lambda *_, **__: None  # type: ignore[method-assign]
        trainer.is_world_process_zero = trainer.is_local_process_zero = lambda: False  # type: ignore[method-assign]
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = False
    return trainer


class _OneModel(TrainerCallback):
    """Broadcasts rank 0's weights once they are initialised, or loaded from a checkpoint."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **more: Any) -> None:
        setattr(state, _MARK, True)
        _broadcast(more["model"].state_dict())


def _broadcast(tensors: dict[str, Any]) -> None:
    """Broadcast rank 0's tensors, in place.

    Raises:
        TypeError: One is of type bfloat16, which Horovod cannot send.
    """
    import horovod.torch as hvd
    import torch

    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raise TypeError(
                f"Horovod cannot send the model's {name!r}, which is bfloat16: load the model with "
                "from_pretrained(..., dtype=torch.float32), and train it with TrainingArguments(bf16=True)"
            )
    bools = {name: each.view(torch.uint8) for name, each in tensors.items() if each.dtype == torch.bool}
    hvd.broadcast_parameters(tensors | bools, root_rank=0)


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
    """Average the gradients over the ranks, in place; one that no rank has stays None.

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
    used = gradients[0].new_tensor([float(parameter.grad is not None) for parameter in parameters])
    hvd.grouped_allreduce_([*gradients, used], name="horovod_tune.trainer_gradients", op=hvd.Average)
    # Reading the numbers waits for the GPU.
    parts = used.tolist() if any(each.grad is None for each in parameters) else [1.0] * len(parameters)
    for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
        parameter.grad = gradient if part else None
