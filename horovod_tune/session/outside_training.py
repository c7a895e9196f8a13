"""Errors for a call of `report()` outside a rank, by the kind of process that made it."""

from __future__ import annotations

import os
import sys
import warnings

from horovod_tune.errors import NotInTraining

# Set to RANK:PID while a rank's training function runs, for the processes that the function starts.
RANK_VARIABLE = "HOROVOD_TUNE_RANK"


def child_process_error(caller: str, rank: int, pid: int) -> str:
    """Return the error text for a call in a process that the training function of ``rank`` started."""
    return (
        f"{caller} was called in process {os.getpid()}, which the training function of rank {rank} (process "
        f"{pid}) started. Only the function itself can report. It runs in every rank already: one "
        "process per slot, or per TPU chip. So give DistributedTrainableCreator the function that a launcher "
        "(torch_xla.launch, xmp.spawn, notebook_launcher, mp.spawn) is to run, without the launcher; or "
        "return the results of such a process to the function, and report them there."
    )


def refuse_in_child_process(caller: str) -> None:
    """Raise NotInTraining if a training function started this process."""
    rank, _, pid = os.environ.get(RANK_VARIABLE, "").partition(":")
    if pid and int(pid) != os.getpid():
        raise NotInTraining(child_process_error(caller, int(rank), int(pid)))


def is_plain_tune_function() -> bool:
    """Return True if this process runs a function passed to Tune without `DistributedTrainableCreator`."""
    tune = sys.modules.get("ray.tune")
    if tune is None:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns if there is no trial
        return tune.get_context().get_trial_id() is not None
