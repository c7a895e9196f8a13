"""A search space for the configurations of `horovod_tune.large_batch.from_config`."""

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

    The rate is searched relative to each optimiser's usual rate, so that one range fits all of them. Batch
    sizes must be multiples of the number of ranks; a trial with any other size fails.

    Args:
        epochs: Length of a training; the warm-up takes up to a quarter of it.
        global_batch_sizes: Sizes to choose from; a single one is fixed.
        base_batch_size: The batch size that the usual rates are meant for.
        optimizers: Optimisers to choose from.
        **fixed: Further keys of the configuration, constants or domains; they override the default domains.

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
