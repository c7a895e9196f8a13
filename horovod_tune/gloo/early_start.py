"""Starts a trial's training actors while its coordinator is still importing Ray Tune.

A coordinator begins its life by unpickling the trainable class, whose base class needs ``ray.tune``: nearly a
second. The ranks need torch, which takes longer. So that both go on at once, the first thing in the pickled
class is an `EarlyRanks`, and its arrival in the coordinator starts the actors; `GlooLauncher.create` takes
them over a moment later. They belong to the coordinator like any others, and end with it.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from horovod_tune import ray_compat
from horovod_tune.gloo.start_slots import SLOT_TIMEOUT_S, StartSlot, import_slot
from horovod_tune.resizing import resized
from horovod_tune.spec import TrialSpec

if TYPE_CHECKING:
    from horovod_tune.gloo.rank_start import RankStart

# How long a free slot takes to be granted.
SOON_S = 0.05
# How long the import of Ray Tune waits for the actors to be created, which takes about 0.1 s.
CREATED_S = 0.5


class EarlyRanks:
    """Travels in the metaclass of a trainable, since cloudpickle sends that before the base classes."""

    _start: ClassVar[RankStart | None] = None
    _imports: ClassVar[StartSlot | None] = None

    def __init__(self, spec: TrialSpec, class_name: str) -> None:
        self._spec = spec
        self._class_name = class_name

    def __reduce__(self) -> Any:
        return EarlyRanks._arrive, (self._spec, self._class_name)

    @classmethod
    def _arrive(cls, spec: TrialSpec, class_name: str) -> EarlyRanks:
        arrived = cls(spec, class_name)
        if cls._start is None and arrived._is_in_coordinator():
            from horovod_tune.gloo.rank_start import RankStart

            group = ray.util.get_current_placement_group()
            if group is not None:
                cls._start = RankStart(resized(spec, group.bundle_specs), group)
                # The trial that starts first should import first: it asks before those that wait here. An
                # import leaves other threads little time, and the ranks take longer than it.
                if cls._start.has_slot_within(SOON_S):
                    cls._start.wait(CREATED_S)
            directory = ray_compat.private_directory()
            if directory is not None:
                cls._imports = import_slot(directory).request()
                cls._imports.wait(SLOT_TIMEOUT_S)
            gc.disable()  # until Ray Tune is there: a collection finds nothing among modules
        return arrived

    def _is_in_coordinator(self) -> bool:
        # The class is unpickled by drivers as well, and a driver may be an actor too.
        if not ray.is_initialized():
            return False
        context = ray.get_runtime_context()
        return (
            context.get_actor_id() is not None and context.get_task_name() == f"{self._class_name}.__init__"
        )

    @classmethod
    def imports_are_done(cls) -> None:
        """Let another process import: this one has Ray Tune."""
        if cls._imports is not None:
            cls._imports.release()
            cls._imports = None
        gc.enable()

    @classmethod
    def take(cls, placement_group: Any) -> RankStart | None:
        """Return the start of the actors of ``placement_group``, once; None where there is none."""
        if cls._start is None or cls._start.placement_group_id != placement_group.id.hex():
            return None
        start, cls._start = cls._start, None
        return start
