"""Runs in each rank: advice on errors that the training function raises because of how a rank runs it."""

from __future__ import annotations

import os
import pickle
import traceback
from bdb import BdbQuit

from horovod_tune.errors import exception_chain
from horovod_tune.rank.imports import is_installed, top_level

# The functions of Ray Train that have no namesake in Ray Tune.
_OF_RAY_TRAIN = ("get_dataset_shard", "get_device", "get_devices", "prepare_model", "prepare_data_loader")


def advice_on(error: BaseException) -> str:
    """Return a line or two to print below the traceback of ``error``; empty if there is no advice."""
    if isinstance(error, SystemExit):
        return _advice_on_exit(error)
    for each in exception_chain(error):
        if _is_of_debugger(each):
            return (
                "\nbreakpoint() needs a terminal, which a rank does not have. Attach a debugger to the rank: "
                "debugpy.listen(5678 + get_world().rank); debugpy.wait_for_client()\n"
            )
        if _is_of_ray_train(each):
            return (
                "\nFunctions of Ray Train do not work in a rank of horovod_tune. Use "
                "torch.device(get_world().device) for get_device; DistributedDataParallel or "
                "hvd.DistributedOptimizer for prepare_model; a DataLoader with a DistributedSampler for "
                "prepare_data_loader; dataset.split(get_world().size)[get_world().rank], of a dataset in "
                "config, for get_dataset_shard; and report, get_checkpoint and get_world of horovod_tune.\n"
            )
        if isinstance(each, FileNotFoundError):
            return _advice_on_missing_file(each)
        text = str(each) if isinstance(each, pickle.PicklingError | AttributeError | RuntimeError) else ""
        if "__main__" in text and ("pickle" in text or "get attribute" in text):
            return (
                "\nPickle finds the functions and classes of your script (__main__) by their names, but not "
                "those that are defined in a function, nor the script's other variables in processes that "
                "'spawn' or 'forkserver' starts, such as DataLoader workers. Put them into a module that the "
                "script imports; or use 'fork', and save model.state_dict().\n"
            )
    return ""


def _is_of_debugger(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {frame.f_globals.get("__name__") for frame in frames}
    return isinstance(error, BdbQuit) or not modules.isdisjoint({"ray.util.rpdb", "ray.util.debugpy"})


def _is_of_ray_train(error: BaseException) -> bool:
    """Return True if Ray Train has raised ``error``, or one of its functions was looked for in ray.tune."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_its_own = bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("ray.train.")
    is_missing = isinstance(error, AttributeError) and "module 'ray.tune' has no attribute" in str(error)
    return is_its_own or (is_missing and getattr(error, "name", None) in _OF_RAY_TRAIN)


def _advice_on_exit(error: SystemExit) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = [each for each in frames if each.f_globals.get("__name__") != "_sitebuiltins"]  # exit(), quit()
    if frames and is_installed(frames[-1].f_code.co_filename):
        library = top_level(frames[-1].f_globals.get("__name__", "a library"))
        if error.code == 2:  # by convention, wrong arguments
            return (
                f"\n{library} has found wrong arguments. If it has parsed sys.argv: in a rank, it is empty, "
                "not your command line. Parse in the driver, and pass the values in config: "
                "config={**vars(parser.parse_args()), ...}.\n"
            )
        return (
            f"\n{library} called sys.exit({error.code!r}), so the trial counts as failed. Call a function in "
            "place of a command (one of click: with standalone_mode=False).\n"
        )
    return (
        f"\nThe training function called sys.exit({error.code!r}), so the trial counts as failed. "
        "To end a trial early, return from the function.\n"
    )


def _advice_on_missing_file(error: FileNotFoundError) -> str:
    here, start = _working_directory(), os.environ.get("TUNE_ORIG_WORKING_DIR")
    named = [os.fsdecode(error.filename)] if isinstance(error.filename, (str, bytes, os.PathLike)) else []
    # NumPy and others give the path only in the message; its other words do not name existing files.
    words = named or [word.strip("'\"`.,:;()") for word in str(error).split()]
    relative = [word for word in words if word and not os.path.isabs(word)]
    there = [word for word in relative if start is not None and os.path.exists(os.path.join(start, word))]
    if not there and not (named and relative):
        return ""
    path = (there or relative)[0]
    text = f"\n{path!r} is a relative path, and a rank starts in its trial's own directory ({here})"
    if there:
        text += f"; the file is in {start}"
    return (
        f"{text}. Use an absolute path: in the function, os.path.join(os.environ['TUNE_ORIG_WORKING_DIR'], "
        f"{path!r}), or os.path.abspath({path!r}) computed before the search and passed in config. With "
        "the environment variable RAY_CHDIR_TO_TRIAL_DIR=0 ranks stay where Ray started them.\n"
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "which has been removed"
