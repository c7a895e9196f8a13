"""Which of a trial's checkpoints is its best."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.scoring import is_better, value_of

if TYPE_CHECKING:
    from horovod_tune.analysis.results import Analysis

# Not checkpoint_000001.part: a copy that a full disk or a kill has ended.
_CHECKPOINT = re.compile(r"checkpoint_[A-Za-z0-9_-]+")


def best_checkpoint_folder(analysis: Analysis) -> Folder | None:
    """Return the best trial's best checkpoint by the metric; None if it has none."""
    metric, mode = analysis.require_metric()
    trial = analysis.best_trial
    if not trial.directory:
        return None
    home = analysis.folder.below(trial.folder_name)
    on_disk = {e.name for e in home.entries() if e.is_dir and _CHECKPOINT.fullmatch(e.name)}
    # Ray adds the name to a report that came with a checkpoint.
    measured = {str(row.get("checkpoint_dir_name")): value_of(row, metric) for row in trial.rows}
    chosen, best = None, math.nan
    for name in sorted(on_disk):
        value = measured.get(name)
        if value is not None and is_better(value, best, mode):
            chosen, best = name, value
    # No report names a checkpoint, as with class trainables: the newest is the nearest to the last result.
    chosen = chosen or max(on_disk, default=None)
    return None if chosen is None else home.below(chosen)
