"""Compiles Horovod for the torch that is installed: the package behind `horovod-tune install-horovod`.

install_command.py ─► install.py ─┬─ prerequisites.py   compiler, CMake, CUDA, NCCL: found, or a cure for each
                                  ├─ plan.py            what is built: key, environment, commands (pure)
                                  ├─ patches/           what Horovod 0.28.1 needs on a current torch, as diffs
                                  ├─ patching.py        each text that a diff replaces is found exactly once
                                  ├─ wheel_cache.py     the wheel that is kept, and the lock around it
                                  ├─ compiler.py        runs pip and the compilers, and ends them
                                  ├─ build_progress.py  the compiler's output: percentage, first error (pure)
                                  └─ installed.py       what is installed, read without importing it

Nothing here imports torch, Horovod or Ray: a build must be possible where they do not fit together.
"""

from horovod_tune.errors import HorovodTuneError


class BuildError(HorovodTuneError, RuntimeError):
    """Horovod could not be built or installed; the message names the cause and the cure."""
