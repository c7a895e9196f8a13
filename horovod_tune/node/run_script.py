"""Runs on the head, as the entrypoint of a launched job: the user's script, with its experiments noted.

`python -m horovod_tune.node.run_script SCRIPT ARGUMENTS…` is `python SCRIPT ARGUMENTS…`, except that where
Tune puts the results is written to the file that ``HOROVOD_TUNE_EXPERIMENTS`` names: wherever the script
wants them, the launch can fetch them.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

from horovod_tune import ray_compat
from horovod_tune.node.job_files import EXPERIMENTS_VARIABLE


def note_experiment(file_system: str, path: str) -> None:
    """Add an experiment's folder to the job's list."""
    line = json.dumps({"file_system": file_system, "path": path})
    with open(os.environ[EXPERIMENTS_VARIABLE], "a") as lines:
        lines.write(line + "\n")


def run(script: str, arguments: list[str]) -> None:
    """Run `script` as the main module of this process."""
    main = types.ModuleType("__main__")
    path = Path(script)
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    if EXPERIMENTS_VARIABLE in os.environ:
        ray_compat.note_experiments(note_experiment)
    run(sys.argv[1], sys.argv[2:])
