"""Compiles Horovod for the installed torch: the package behind `horovod-tune install-horovod`.

command.py ─► install.py ─┬─ prerequisites.py  compiler, CMake, CUDA, NCCL: found, or a cure for each
                          ├─ build.py          source, patches, `pip wheel`, progress, first error
                          │   └─ patching.py   applies patches/*.patch; an error if one does not match
                          └─ installed.py      versions of torch and Horovod, read without importing them

Nothing here imports torch, Horovod or Ray, so that a build is possible when they do not fit together.
"""

from horovod_tune.errors import HorovodTuneError


class BuildError(HorovodTuneError, RuntimeError):
    """Horovod could not be built or installed; the message names the cause and the cure."""
