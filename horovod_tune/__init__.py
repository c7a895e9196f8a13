"""Hyperparameter search that runs distributed training functions as Ray Tune trials.

train(config)                                     the user's function, in the main thread
 └ rank/             one process per rank and trial, forked from the host's template; ends with the trial
    └ actors/           one training actor per rank (torch_xla: one per TPU host): starts and watches it
       └ coordinator/      one actor: runs one trial after another, and keeps the training actors
          └ trainable.py      the trial as Tune sees it, in the same actor   ── step() ─► Tune ─► search/

rank/template.py     one process per host and search: a fresh Python that has imported what ranks need, and
                     forks them: backends/ for Horovod, torch.distributed or torch_xla
session/             report() and checkpoints, called by train(config)
messages.py          Report, Finished, Failed: what ranks send to the coordinator
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
