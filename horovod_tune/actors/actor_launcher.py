"""Runs in the coordinator: creates a trial's training actors, and opens their rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod_tune.actors import ranks
from horovod_tune.actors.rank_backend import OpenRendezvous, PlacedRank, RankBackend
from horovod_tune.actors.training_actor import METHODS_AT_ONCE, TrainingActor
from horovod_tune.channel.report_channel import CoordinatorChannel, Listener
from horovod_tune.messages import Assignment, WorkerInfo
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.tpu.reservation import Reservation


class ActorLauncher:
    """Creates ``spec.world_size`` training actors in ``placement_group``, and opens their rendezvous.

    ``node_id`` is the coordinator's. ``make_backend`` is called in each rank; it is pickled by reference.
    With ``tpu``, it creates one actor for each chip that this has reserved.
    """

    def __init__(
        self,
        spec: TrialSpec,
        placement_group: PlacementGroup,
        *,
        node_id: str,
        make_backend: Callable[[], RankBackend],
        open_rendezvous: OpenRendezvous,
        tpu: Reservation | None = None,
    ) -> None:
        self._spec = spec
        self._group = placement_group
        self._tpu = tpu
        # The index of each slot's bundle in the group.
        slots = spec.slots if tpu is None else ()
        self._bundles = [bundle for bundle, count in enumerate(slots) for _ in range(count)]
        self._node_id = node_id
        self._make_backend = make_backend
        self._open_rendezvous = open_rendezvous
        self._close_rendezvous: Callable[[], None] = lambda: None
        self._listener: Listener | None = None
        # By slot: the placement groups of actors outside the trial's own group; the last one is in use.
        self._more: dict[int, list[PlacementGroup]] = {}

    def create(self) -> list[Any]:
        places = [(self._group, bundle) for bundle in self._bundles]
        if self._tpu is not None:
            places = [place for place in self._tpu.bundles() for _ in range(self._tpu.chips_per_host)]
        return [self._create_actor(*place) for place in places]

    def _create_actor(self, placement_group: PlacementGroup, bundle: int) -> Any:
        spec = self._spec
        strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundle)
        options = ray.remote(TrainingActor).options(
            num_cpus=spec.num_cpus_per_slot,
            num_gpus=1 if spec.use_gpu else 0,
            resources={"TPU": 1} if spec.use_tpu else {},
            max_concurrency=METHODS_AT_ONCE,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        return options.remote(self._make_backend, spec.preload, spec.timeout_s)

    def create_one(self, slot: int, *, elsewhere: bool = False) -> Any:
        """Create the actor of one slot, to replace a lost one or to grow the trial.

        A slot beyond the trial's placement group, or whose host has drained (``elsewhere``), has a group of
        its own, which Ray removes when this coordinator ends.
        """
        groups = self._more.setdefault(slot, [])
        if slot < self._spec.world_size and not groups and not elsewhere:
            return self._create_actor(self._group, self._bundles[slot])
        if not groups or elsewhere:
            # With num_slots only, all ranks are on this host.
            same_host = self._spec.num_hosts == 1 and not elsewhere
            groups.append(
                ray.util.placement_group(
                    [self._spec.slot_resources],
                    bundle_label_selector=[{"ray.io/node-id": self._node_id}] if same_host else None,
                )
            )
        return self._create_actor(groups[-1], 0)

    def release_slot(self, slot: int) -> None:
        for group in self._more.pop(slot, []):
            ray.util.remove_placement_group(group)

    def assign(
        self, actors: Sequence[Any], infos: Sequence[WorkerInfo], *, first_node: str | None = None
    ) -> list[Assignment]:
        spec = self._spec
        nodes = [info.node_id for info in infos]
        if self._tpu is not None:  # a rank's number is its chip's task id
            order = [worker for worker, _ in self._tpu.find_chips(infos).processes]
            in_order = ranks.assign_ranks([nodes[i] for i in order], first_node=nodes[order[0]])
            rank_infos = [in_order[order.index(i)] for i in range(len(infos))]
        else:
            if spec.num_hosts is not None and not spec.is_elastic:
                assert spec.num_slots is not None
                ranks.check_hosts(infos, num_hosts=spec.num_hosts, num_slots=spec.num_slots)
            rank_infos = ranks.assign_ranks(nodes, first_node=first_node or self._node_id)
        single_host = len(set(nodes)) == 1
        self._end_rendezvous()
        gpus = ranks.visible_gpus(infos, rank_infos)

        def choose(info: WorkerInfo, single_host: bool) -> str:
            return ranks.choose_interface(
                info.interfaces, node_ip=info.node_ip, nics=spec.nics, single_host=single_host
            )

        interfaces = [choose(info, single_host) for info in infos]
        # NCCL chooses once per process, also for later worlds, which may be on several hosts.
        stays = single_host and (spec.num_hosts == 1 or not spec.is_elastic)
        self._listener = listener = Listener()
        # Ranks on other hosts report through Ray.
        tokens = [
            listener.create_token(number) if info.node_id == self._node_id else None
            for number, info in enumerate(infos)
        ]
        placed = list(map(PlacedRank, actors, infos, rank_infos, interfaces, tokens))
        environments, self._close_rendezvous = self._open_rendezvous(placed)
        assignments = []
        for rank, visible, environment in zip(placed, gpus, environments, strict=True):
            if visible is not None:
                environment["CUDA_VISIBLE_DEVICES"] = visible
            defaults: dict[str, str] = {}
            if spec.use_gpu:
                # NCCL does not read Horovod's or Gloo's variable. Without "=" it treats the name as a prefix.
                # Without nics=, a value that is set on the host takes precedence.
                settings = environment if spec.nics else defaults
                settings["NCCL_SOCKET_IFNAME"] = f"={choose(rank.info, stays)}"
            assignments.append(Assignment((rank.rank_info,), environment, defaults, rank.token))
        return assignments

    def channels(self) -> dict[int, CoordinatorChannel]:
        listener, self._listener = self._listener, None
        return listener.accept() if listener is not None else {}

    def processes_below(self) -> list[WorkerInfo]:
        return []  # the template ends a rank with its actor

    def close(self) -> None:
        for slot in list(self._more):
            self.release_slot(slot)
        if self._tpu is not None:
            self._tpu.close()
        self._end_rendezvous()

    def abandon_world(self) -> None:
        self._close_rendezvous()

    def _end_rendezvous(self) -> None:
        for channel in self.channels().values():  # those not returned before
            channel.close()
        self._close_rendezvous()
