"""The members of one world: created, given their ranks, called by name when something is wrong, and ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from horovod_tune.errors import StartFailed
from horovod_tune.messages import MemberFacts
from horovod_tune.workers import processes
from horovod_tune.workers.gate import Gate
from horovod_tune.workers.protocol import Launcher


class Members:
    """What is known of each member, by its place: ``actors``, ``facts``, ``ranks``, and ``gates`` of some.

    ``facts`` and ``ranks`` are empty until `assemble` has been through.
    """

    def __init__(self, launcher: Launcher, *, timeout_s: float) -> None:
        self.launcher = launcher
        self._timeout_s = timeout_s
        self._descriptions: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self.actors: list[Any] = []
        self.facts: list[MemberFacts] = []
        self.ranks: list[tuple[int, ...]] = []
        self.gates: dict[int, Gate] = {}
        self._descriptions = []

    def __len__(self) -> int:
        return len(self.actors)

    @property
    def are_assembled(self) -> bool:
        """Whether they have their ranks."""
        return bool(self.ranks)

    @property
    def all_ranks(self) -> set[int]:
        return {rank for ranks in self.ranks for rank in ranks}

    @property
    def hosts(self) -> list[str]:
        """The host of each rank, by rank."""
        by_rank = {
            rank: fact.host for fact, ranks in zip(self.facts, self.ranks, strict=True) for rank in ranks
        }
        return [by_rank[rank] for rank in sorted(by_rank)]

    def create(self) -> None:
        """Begin to start them, in their turn; does not wait for them."""
        self.actors = list(self.launcher.create())
        self._descriptions = [actor.describe.remote() for actor in self.actors]

    def assemble(self) -> None:
        """Wait until all are there, and give each its ranks.

        Raises:
            StartFailed: some did not come up within ``timeout_s``, or landed wrongly.
        """
        self.facts = self.get_all(self._descriptions, "to start")
        assignments = self.launcher.assign(self.actors, self.facts)
        self.get_all(
            [actor.assign.remote(each) for actor, each in zip(self.actors, assignments, strict=True)],
            "to take their ranks",
        )
        self.ranks = [tuple(world.rank for world in each.worlds) for each in assignments]
        self.gates = self.launcher.gates()

    def get_all(self, refs: Sequence[Any], doing: str) -> list[Any]:
        """Return what every member answers; ``refs`` are in their order.

        Raises:
            StartFailed: one did not answer within ``timeout_s``, or died.
        """
        try:
            return ray.get(list(refs), timeout=self._timeout_s)
        except GetTimeoutError:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            missing = [i for i, ref in enumerate(refs) if ref not in set(ready)]
            who = ", ".join(self._name(i) for i in missing)
            raise StartFailed(
                f"{len(missing)} of {len(refs)} training actors took longer than timeout_s="
                f"{self._timeout_s:g} s {doing}: {who}"
            ) from None
        except RayActorError as error:
            raise StartFailed(f"a training actor died on its way {doing}: {error}") from error

    def _name(self, member: int) -> str:
        if not self.facts:
            return f"actor {member}"
        ranks = self.ranks[member] if self.ranks else (member,)
        text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        return f"{text} on {self.facts[member].host}"

    def end(self, *, lost_nodes: Collection[str]) -> None:
        """End every process, and see it gone; twice is harmless."""
        actors, facts = self.actors, self.facts
        self._clear()
        processes.end_actors(actors, facts, lost_nodes=lost_nodes)
        self.launcher.close()
