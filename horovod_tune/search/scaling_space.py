"""A search space for what `horovod_tune.large_batch.from_config` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import tune


def large_batch_space(
    *,
    epochs: float,
    global_batch_sizes: Sequence[int],
    base_batch_size: int,
    optimizers: Sequence[str] = ("sgd", "lars", "adamw", "lamb"),
    **fixed: Any,
) -> dict[str, Any]:
    """Return Tune domains for the hyperparameters of Horovod's guide: batch, rate, warm-up, optimiser.

    The rate is searched relative to a usual one of each optimiser, so that one range fits all of them;
    batches that a world does not divide fail in their trial, so give multiples of the ranks.

    Args:
        epochs: Of a training; the warm-up takes up to a quarter of them.
        global_batch_sizes: To choose from; one means a search at that size.
        base_batch_size: The batch for which usual rates are meant.
        optimizers: To choose from.
        **fixed: Further keys of the configuration, as they are or as domains; they replace those from here.

    >>> space = large_batch_space(
    ...     epochs=20, global_batch_sizes=[512], base_batch_size=64, optimizers=["lars"]
    ... )
    >>> space["global_batch_size"], space["optimizer"], space["warmup_epochs"].upper
    (512, 'lars', 5.0)
    """
    return {
        "epochs": epochs,
        "global_batch_size": _choice(global_batch_sizes),
        "base_batch_size": base_batch_size,
        "optimizer": _choice(optimizers),
        "relative_lr": tune.loguniform(0.1, 10.0),
        "warmup_epochs": tune.uniform(0.0, epochs / 4),
        "schedule": tune.choice(["cosine", "polynomial"]),
        "weight_decay": tune.loguniform(1e-5, 1e-2),
        **fixed,
    }


def _choice(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tune.choice(list(values))
