"""Which parameters get a layer-wise rate and weight decay: not biases and normalisation parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horovod_tune.large_batch import bounds


def parameter_groups(model: nn.Module, *, weight_decay: float = 0.0, **options: Any) -> list[dict[str, Any]]:
    """Return the model's parameters as two groups for `Lars`, `Lamb` or any torch optimiser.

    The second has ``weight_decay=0`` and ``layer_wise=False``: biases and scales, see `is_excluded`, and
    whatever a normalising module has. A layer-wise rate would be that of a norm near 0, and decay pulls
    scales away from 1. (Goyal et al. 2017, section 5.3, and implementations of LARS and LAMB leave them
    out.) An empty group is left out; so are frozen parameters. A parameter that layers share is listed once.

    Args:
        model: Any module. Its parameters' names go with the groups, for error messages.
        weight_decay: Of the first group.
        **options: For both groups, such as ``lr``.

    Raises:
        HyperparameterError: A lazy layer has not seen its first batch yet, or no parameter is trained.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    >>> for group in parameter_groups(model, weight_decay=0.1):
    ...     print(group["names"], group["weight_decay"], group["layer_wise"])
    ['0.weight'] 0.1 True
    ['0.bias', '1.weight', '1.bias'] 0.0 False
    """
    bounds.at_least("weight_decay", weight_decay, 0)
    excluded = {id(parameter) for parameter in _of_normalisation(model)}
    groups: dict[bool, dict[str, Any]] = {
        True: {"params": [], "names": [], "weight_decay": weight_decay, "layer_wise": True, **options},
        False: {"params": [], "names": [], "weight_decay": 0.0, "layer_wise": False, **options},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise bounds.HyperparameterError(
                f"model must have seen a batch before its parameters are grouped, {name!r} has no shape yet"
            )
        group = groups[not (id(parameter) in excluded or is_excluded(name, parameter))]
        group["params"].append(parameter)
        group["names"].append(name)
    filled = [group for group in groups.values() if group["params"]]
    if not filled:
        raise bounds.HyperparameterError("model must have a parameter that requires a gradient, got none")
    return filled


def is_excluded(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a bias or a scale, by its name and shape.

    Those are the ones of at most one dimension, or named ``bias`` or ``bias_…`` (`nn.MultiheadAttention` has
    some of three dimensions), or the magnitude of a weight normalisation.

    >>> is_excluded("norm.weight", torch.ones(8)), is_excluded("conv.weight", torch.ones(8, 3, 3, 3))
    (True, False)
    >>> is_excluded("attention.bias_k", torch.ones(1, 1, 8))
    True
    """
    last = name.rsplit(".", 1)[-1]
    return parameter.dim() <= 1 or last == "bias" or last.startswith("bias_") or last == "weight_g"


def _of_normalisation(model: nn.Module) -> list[torch.Tensor]:
    """Parameters of normalising modules of any shape, such as ``LayerNorm([8, 4, 4])``'s weight."""
    found: list[Any] = []
    for module in model.modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if any("Norm" in kind and not kind.startswith("_WeightNorm") for kind in kinds):
            found += list(module.parameters(recurse=False))
        if isinstance(module, nn.utils.parametrize.ParametrizationList) and any(
            type(each).__name__ == "_WeightNorm" for each in module
        ):
            found.append(module.original0)
    return found
