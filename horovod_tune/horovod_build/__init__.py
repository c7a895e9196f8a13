"""Compiles Horovod for the installed torch: the package behind `horovod-tune install-horovod`.

command.py ─┬─ installed.py  torch, Horovod and the compilers: found, or a cure for each
            └─ build.py      source, patches, `pip wheel`, progress, first error

Nothing here imports torch, Horovod or Ray, so that a build is possible when their versions are incompatible.
"""

from horovod_tune.errors import HorovodTuneError


class BuildError(HorovodTuneError, RuntimeError):
    """Horovod could not be built or installed; the message names the cause and the cure."""
