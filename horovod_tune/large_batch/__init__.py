"""Building blocks for training with large batches, for use in a training function.

curves.py, lr_scheduler.py        learning rates for a global batch of any size
layer_wise.py                     layer-wise optimisers, and their groups of parameters
batches.py, accumulation.py       a global batch in several passes, also if its size or the ranks change
noise_scale.py, growth.py         which batch size is enough, and batches that grow
recipe.py                         optimiser, schedule and accumulation from a configuration

All of it runs in each rank of a trial, of `horovodrun` or of `torchrun`, or in a single process. Arguments
that are out of bounds, or that contradict each other or the world, raise `HyperparameterError`.
"""

from __future__ import annotations

import importlib
from typing import Any

from horovod_tune.bounds import HyperparameterError

_MODULES = {
    "accumulation": "GradientAccumulator StepResult",
    "batches": "BatchSplit GlobalBatch rank_passes split_batch steps_per_epoch",
    "curves": "Constant Cosine InverseSqrt MultiStep OneCycle Polynomial Schedule Warmup",
    "growth": "BatchGrowth CurvatureGrowth FixedGrowth NoiseScaleGrowth largest_eigenvalue",
    "layer_wise": "Lamb Lars TrustRatioError parameter_groups",
    "lr_scheduler": "AdamHyperparameters LargeBatchLR scaled_adam scaling_factor",
    "noise_scale": "NoiseEstimate NoiseScale",
    "recipe": "TrainingSetup from_config",
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted([*_LAZY, HyperparameterError.__name__])


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"horovod_tune.large_batch.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
