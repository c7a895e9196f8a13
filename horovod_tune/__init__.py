"""Hyperparameter search that runs distributed training functions as Ray Tune trials.

train(config)                                    the user's training function
 └ trainable.py         the trial, as Tune sees it     ── step() ─► Tune ─► search/
    └ coordinator/      one actor per trial      ▲ messages.py:
       └ actors/        N training actors: gloo/ │   Report    rank 0
       │                or torch_dist/ in each   │
       └ xla/           one actor per TPU host,  │   Finished  every rank
          │             torch_xla ranks inside   │   Failed    any rank
          └ session/    report(), checkpoints  ──┘ called by train(config)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from horovod_tune.function.with_parameters import with_parameters
from horovod_tune.session.committed_state import commit, get_state
from horovod_tune.session.session import get_checkpoint, get_world, report

if TYPE_CHECKING:
    from horovod_tune.analysis import analyze
    from horovod_tune.creator import DistributedTrainableCreator
    from horovod_tune.resume import resume_or_start

__version__ = "0.1.0"

__all__ = [
    "DistributedTrainableCreator",
    "analyze",
    "commit",
    "get_checkpoint",
    "get_state",
    "get_world",
    "report",
    "resume_or_start",
    "with_parameters",
]

# These need Ray Tune, pandas or Plotly, and are imported on first use.
_LAZY = {
    "DistributedTrainableCreator": "horovod_tune.creator",
    "analyze": "horovod_tune.analysis",
    "resume_or_start": "horovod_tune.resume",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
