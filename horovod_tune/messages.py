"""The messages between the coordinator and the ranks. They hold data and have no methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class TrialRequest:
    """What every rank needs to run a trial; sent by the coordinator.

    Attributes:
        config: the trial's config, pickled.
        function: the training function: cloudpickle bytes, or a Ray ObjectRef of them.
        resources: Tune's PlacementGroupFactory, pickled.
        storage: Tune's StorageContext, pickled.
        parameters: where the rank finds the objects of `with_parameters`: a Ray ObjectRef, or a path on its
            host.
        run: counts the trials of one worker group, so that a late message is not mistaken for one from the
            next trial.
        reports: the number of reports before this rank joined the trial.
        world_number: counts the worlds that an elastic trial has formed.
    """

    trial_id: str
    trial_name: str
    trial_dir: str
    working_dir: str
    experiment_name: str
    config: bytes
    function: Any
    checkpoint: CheckpointPlace | None = None
    resources: bytes = b""
    storage: bytes = b""
    parameters: Any = None
    run: int = 0
    is_elastic: bool = False
    reports: int = 0
    world_number: int = 0


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a checkpoint is stored.

    Attributes:
        path: a path on ``filesystem``, a pyarrow filesystem; if that is None, a path on the node ``node_id``.
        node_id: the Ray node from which others fetch a copy, unless they share its file system; None if
            every node can read ``path``.
        report: the number of the report that it came with; 0 if the trial starts from it.
    """

    path: str
    filesystem: Any = None
    node_id: str | None = None
    report: int = 0


@dataclass(frozen=True)
class Report:
    """Rank 0 reported for the ``index``-th time (counted from 1) and waits for ``acknowledge(index)``.

    ``metrics`` are pickled, as bytes, if they hold something other than plain values.
    """

    index: int
    metrics: dict[str, Any]
    checkpoint_path: str | None = None


@dataclass(frozen=True)
class Finished:
    """The training function has returned on this rank, or was unwound because the trial was stopped."""

    rank: int
    has_returned: bool = True


class FailureKind(Enum):
    """How a rank was lost. If several ranks were lost, the one with the smallest value is the cause."""

    RAISED = 1
    DIED = 2
    UNRESPONSIVE = 3
    RETURNED = 4
    AHEAD = 5
    HUNG = 6
    STALLED = 7
    DISCONNECTED = 8


@dataclass(frozen=True)
class Failed:
    """A rank was lost. ``traceback`` is the rank's own, or a description if it could not send one."""

    rank: int
    host: str
    kind: FailureKind
    traceback: str


@dataclass(frozen=True)
class LogChunk:
    """What a rank printed since its last chunk.

    ``stack`` is the stack of its training function; empty unless an immediate reply was requested.
    """

    rank: int
    text: bytes
    stack: str = ""


@dataclass(frozen=True)
class NeedsWorld:
    """The rank has left its world, which is changing or broken, and waits for the next one.

    ``error`` is why it left; empty if the world changes at a commit. ``stalled`` is the traceback if it
    waited in a collective that not all ranks entered.
    """

    rank: int
    error: str = ""
    stalled: str = ""


@dataclass(frozen=True)
class AwaitedRanks:
    """Ranks that collectives have long waited for, found since the last poll: the collectives by rank."""

    names: dict[int, str]


@dataclass(frozen=True)
class ImportsSeen:
    """How long the training function's imports took, in seconds by installed package, until it reported."""

    seconds: dict[str, float]


@dataclass(frozen=True)
class LongWait:
    """A rank other than 0 has waited for some seconds in its ``report``-th report (counted from 1)."""

    rank: int
    report: int


Message = Report | Finished | Failed | LogChunk | NeedsWorld | AwaitedRanks | ImportsSeen | LongWait


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's node and process.

    ``process_started`` is `process_start` of ``pid``; ``interfaces`` are the host's IP addresses by network
    interface.
    """

    node_id: str
    node_ip: str
    host: str
    pid: int
    process_started: float
    gpu_ids: tuple[str, ...] = ()
    tpu_ids: tuple[str, ...] = ()
    interfaces: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RankInfo:
    """One rank's numbers in its world, named as in Horovod."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Assignment:
    """One worker's ranks in a world, and their environment variables.

    ``defaults`` are variables that are set only if the process does not have them. With ``channel_token`` (a
    `report_channel.ChannelToken`), a rank on the coordinator's host reports through a socket, not Ray.
    """

    rank_infos: tuple[RankInfo, ...]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    channel_token: Any = None


@dataclass(frozen=True)
class RayAddress:
    """How a rank connects to the cluster of its search, if its training function uses Ray.

    ``gpu_ids`` are what `ray.get_gpu_ids` returns in its training actor, and so in the rank.
    """

    address: str
    namespace: str
    runtime_env: dict[str, Any]
    gpu_ids: tuple[Any, ...] = ()


@dataclass(frozen=True)
class RankBegin:
    """What a rank's process receives from its training actor when a trial begins.

    ``environment`` and ``directory`` are the actor's (in a TPU trial, the process has set its environment
    before, and this one is empty); ``copies`` is the host's folder for copies of
    checkpoints; ``gpu`` is the rank's own GPU among those that it sees.
    """

    request: TrialRequest
    assignment: Assignment
    environment: dict[str, str]
    directory: str
    node_id: str
    host: str
    copies: str
    gpu: int | None
    ray: RayAddress


@dataclass(frozen=True)
class RankRejoin:
    """The next world of a rank in an elastic trial."""

    assignment: Assignment
    number: int
    reports: int
    resources: bytes
