"""Runs in the driver: an experiment that goes on where it was when its job is started a second time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import tune


def resume_or_start(trainable: Any, *, run_config: tune.RunConfig, **tuner_arguments: Any) -> tune.Tuner:
    """Return a `Tuner` that continues the experiment `run_config.name`, or starts it if there is none yet.

    For jobs that are requeued, pre-empted or simply submitted again: trials that had ended are not run again,
    the others go on from their last checkpoint, failed ones too. The search algorithm and the scheduler are
    those of the first start, with what they have learnt.

    Args:
        trainable: as for `Tuner`; the same one at every start.
        run_config: its `name` and `storage_path` are how the experiment is found again.
        tuner_arguments: `param_space`, `tune_config`, as for `Tuner`.

    Raises:
        ValueError: `run_config` has no name.
    """
    from ray import tune

    if not run_config.name:
        raise ValueError(
            "run_config.name must be set, got None: without one an experiment has a new name at every start"
        )
    path = os.path.join(str(run_config.storage_path), run_config.name)
    if not tune.Tuner.can_restore(path, storage_filesystem=run_config.storage_filesystem):
        return tune.Tuner(trainable, run_config=run_config, **tuner_arguments)
    return tune.Tuner.restore(
        path,
        trainable,
        resume_unfinished=True,
        resume_errored=True,
        param_space=tuner_arguments.get("param_space"),
        storage_filesystem=run_config.storage_filesystem,
    )
