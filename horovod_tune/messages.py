"""The messages between the coordinator and the ranks. Data only: messages do not act."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class TrialRequest:
    """One trial's work, which the coordinator sends to every rank.

    ``function`` is the training function as cloudpickle bytes, ``None`` when the rank holds it already.
    ``checkpoint`` is a directory that a restored trial starts from; ``resources`` is Tune's
    PlacementGroupFactory and ``storage`` its StorageContext, both pickled. ``parameters`` is where the rank
    finds the objects of `with_parameters`: a Ray ObjectRef, or a path of its host. ``run`` counts the trials
    of one worker group, so that a late message is not mistaken for one of the next trial. ``reports`` is how
    often the trial has reported before a rank joins it, ``world_number`` counts the worlds that an elastic
    trial has formed.
    """

    trial_id: str
    trial_name: str
    trial_dir: str
    working_dir: str
    experiment_name: str
    config: dict[str, Any]
    function: bytes | None
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
    """Where a checkpoint is stored: a path on a pyarrow filesystem (``None``: the local disk of ``node_id``).

    ``node_id`` is set when only that Ray node can read it; other nodes fetch a copy from there. ``report``
    is the number of the report that it came with, 0 for one that the trial starts from.
    """

    path: str
    filesystem: Any = None
    node_id: str | None = None
    report: int = 0


@dataclass(frozen=True)
class Report:
    """Rank 0 reported for the ``index``-th time (counted from 1) and waits for ``proceed(index)``."""

    index: int
    metrics: dict[str, Any]
    checkpoint_path: str | None = None


@dataclass(frozen=True)
class Finished:
    """The training function returned on this rank."""

    rank: int


@dataclass(frozen=True)
class Stopped:
    """The training function was unwound on this rank because the trial was stopped."""

    rank: int


class FailureKind(Enum):
    """How a rank was lost; the smaller the value, the closer to the cause."""

    RAISED = 1
    DIED = 2
    UNRESPONSIVE = 3
    RETURNED = 4
    HUNG = 5
    STALLED = 6
    DISCONNECTED = 7


@dataclass(frozen=True)
class Failed:
    """A rank was lost. ``traceback`` is the rank's own if it could still send one."""

    rank: int
    host: str
    kind: FailureKind
    traceback: str


@dataclass(frozen=True)
class LogChunk:
    """What a rank printed since its last chunk.

    ``stack`` is where its training function was, if an immediate reply was requested.
    """

    rank: int
    text: bytes
    stack: str = ""


@dataclass(frozen=True)
class NeedsWorld:
    """The rank has left its world, which changes or is broken, and waits for its place in the next one.

    ``error`` is why it left, empty if it left to let others join. ``stalled`` is the traceback if it waited
    in a collective that not all ranks entered.
    """

    rank: int
    error: str = ""
    stalled: str = ""


@dataclass(frozen=True)
class AwaitedRanks:
    """The ranks that collectives have long waited for, each with the collectives' names.

    Only what is new since the last poll; empty in a trial's first poll.
    """

    names: dict[int, str]


Message = Report | Finished | Stopped | Failed | LogChunk | NeedsWorld | AwaitedRanks


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker was placed, and its process; ``process_started`` is its `process_start`."""

    node_id: str
    node_ip: str
    host: str
    pid: int
    process_started: float
    gpu_ids: tuple[str, ...] = ()
    tpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResetResult:
    """What a worker's reset could not restore; if ``problems`` is empty, it can run the next trial."""

    ranks: tuple[int, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankInfo:
    """One rank's numbers in its world, which Horovod, torch.distributed and torch_xla call by these names."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Assignment:
    """One worker's ranks in a world, and their environment variables.

    ``defaults`` are variables that are set only if the process has none of that name. ``channel_token`` (a
    `channel.listener.ChannelToken`) lets a rank on the coordinator's host report without Ray.
    """

    rank_infos: tuple[RankInfo, ...]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    channel_token: Any = None
