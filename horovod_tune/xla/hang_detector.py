"""Finds a host's ranks hanging, and where: `inactivity` decides, this looks and asks. In the host actor."""

from __future__ import annotations

from collections.abc import Collection

from horovod_tune.xla import inactivity
from horovod_tune.xla.answers import Answers
from horovod_tune.xla.inactivity import Inactivity, StackDump
from horovod_tune.xla.supervisor import Supervisor

LOOK_S = 5.0
"""How often it is looked at what the ranks do where they say nothing: the processes of a host are many."""
ANSWER_S = 5.0
"""How long ranks that stand still may take to say where."""


class HangDetector:
    """For how long the ranks have done nothing while the coordinator listened, and where they stand then."""

    def __init__(self, supervisor: Supervisor, *, limit_s: float) -> None:
        self._supervisor = supervisor
        self._limit_s = limit_s
        self._inactivity = Inactivity(limit_s)
        self._listened_s = 0.0
        self._where: Answers[StackDump] = Answers()

    def restart(self) -> None:
        """Count from now on."""
        self._listened_s = 0.0
        self._inactivity.restart()

    def listened(self, for_s: float) -> None:
        """Note that the coordinator has listened for ``for_s`` more."""
        self._listened_s += for_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for a `look`."""
        return self._listened_s >= min(LOOK_S, self._limit_s / 6)

    def look(self, running: Collection[int]) -> tuple[int, str] | None:
        """Return which of the ``running`` ranks hangs and what there is to say; None while none does."""
        listened_s, self._listened_s = self._listened_s, 0.0
        if not self._inactivity.note(listened_s, self._supervisor.activity()):
            return None
        self._inactivity.restart()
        return inactivity.explain(self._where_they_stand(running), self._limit_s)

    def _where_they_stand(self, running: Collection[int]) -> dict[int, StackDump | None]:
        self._where.clear()
        for rank in self._supervisor.ranks:
            if rank.ordinal in running:
                rank.tell("dump_stack")
        told = self._where.wait_for(len(running), timeout_s=ANSWER_S)
        return {ordinal: told.get(ordinal) for ordinal in running}

    def hear(self, ordinal: int, where: StackDump) -> None:
        """Take in where a rank stands, as it says itself. Runs in the supervisor's thread."""
        self._where.put(ordinal, where)
