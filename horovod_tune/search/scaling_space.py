"""A search space for the configurations of `horovod_tune.large_batch.from_config`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ray import tune

from horovod_tune import bounds

_OPTIMIZERS = ("sgd", "lars", "adamw", "lamb")


def large_batch_space(
    *,
    epochs: float,
    global_batch_sizes: Sequence[int],
    base_batch_size: int,
    optimizers: Sequence[str] = _OPTIMIZERS,
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
            `lr` replaces the relative rate.

    Raises:
        HyperparameterError: A length or size is out of bounds, a list is empty, an optimiser is unknown, or
            `local_batch_size` is given.

    >>> space = large_batch_space(
    ...     epochs=20, global_batch_sizes=[512], base_batch_size=64, optimizers=["lars"]
    ... )
    >>> space["global_batch_size"], space["optimizer"], space["warmup_epochs"].upper
    (512, 'lars', 5.0)
    """
    bounds.number("epochs", epochs, more_than=0)
    if "local_batch_size" in fixed:
        why = f"as global_batch_sizes is given, got {fixed['local_batch_size']!r}"
        raise bounds.HyperparameterError(f"local_batch_size must be left out, {why}")
    return {
        "epochs": epochs,
        "global_batch_size": _choice("global_batch_sizes", global_batch_sizes, bounds.count),
        "base_batch_size": bounds.count("base_batch_size", base_batch_size),
        "optimizer": _choice("optimizers", optimizers, partial(bounds.one_of, choices=_OPTIMIZERS)),
        **({} if "lr" in fixed else {"relative_lr": tune.loguniform(0.1, 10.0)}),
        "warmup_epochs": tune.uniform(0.0, epochs / 4),
        "schedule": tune.choice(["cosine", "polynomial"]),
        "weight_decay": tune.loguniform(1e-5, 1e-2),
        **fixed,
    }


def _choice(name: str, values: Any, checked: Callable[[str, Any], Any]) -> Any:
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not listed:
        raise bounds.HyperparameterError(f"{name} must be a list with at least one value, got {values!r}")
    values = [checked(f"{name}[{index}]", value) for index, value in enumerate(listed)]
    return values[0] if len(values) == 1 else tune.choice(values)
