"""Where Tune puts an experiment's results, told to whoever asks. Without it a launch could only guess.

Wraps `StorageContext.__init__` (Ray 2.60, the module ``ray.train._internal.storage``), which the driver calls
once for each experiment that is started or restored, with the storage path or URI that the script gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovod_tune.compatibility import Patch, part

_STORAGE = "ray.train._internal.storage:StorageContext"
_PATCH = Patch(
    "experiment paths",
    "a launch cannot tell where the results lie: name them with `horovod-tune launch --fetch PATH`",
    (part(_STORAGE, uses="storage_filesystem experiment_fs_path"),),
)


def note_experiments(note: Callable[[str, str], None]) -> None:
    """Call `note` with the file system ("local", "s3", …) and the path of each experiment from now on.

    Where Ray no longer has that class, a warning says so and nothing is noted.
    """
    if not _PATCH.fits:
        return
    from ray.train._internal.storage import StorageContext

    before = StorageContext.__init__

    @functools.wraps(before)
    def noting(self: Any, *arguments: Any, **named: Any) -> None:
        before(self, *arguments, **named)
        note(str(self.storage_filesystem.type_name), str(self.experiment_fs_path))

    StorageContext.__init__ = noting  # type: ignore[method-assign]
