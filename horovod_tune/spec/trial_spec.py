"""TrialSpec: what one trial requests, validated when it is created, immutable afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_tune.bounds import count, number
from horovod_tune.errors import SpecError
from horovod_tune.spec.placement import Placement
from horovod_tune.spec.tpu_types import shape_of

# The default comes first, unless use_tpu is given. With both, use_gpu decides between Gloo and NCCL.
BACKENDS = ("horovod", "torch")
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_STALL_TIMEOUT_S = 1800.0
ELASTIC_CONNECT_S = 20.0
# Horovod stores time limits in a C int; hvd.init() fails with a larger value.
MAX_TIMEOUT_S = 2**31 - 1
# Seconds that each training actor adds to timeout_s in each phase of a start: Ray and the coordinator handle
# them one after the other.
START_S_PER_WORKER = 0.25
# The first phase, in which processes start and import, may take this many times as long: it is the slow one
# on overloaded hosts and file systems, and Ray reports at once if a process dies meanwhile.
PROCESS_START_FACTOR = 3


def start_timeout_s(timeout_s: float, workers: int) -> float:
    """Return how long a phase of the start of ``workers`` training actors may take.

    >>> start_timeout_s(60, 2), start_timeout_s(60, 512)
    (60.5, 188.0)
    """
    return timeout_s + START_S_PER_WORKER * workers


@dataclass(frozen=True)
class TrialSpec:
    """What one trial requests; its fields are the arguments that `DistributedTrainableCreator` documents.

    ``num_hosts`` is ``None`` when only the total number of ranks was given: they are placed on as few hosts
    as possible. Otherwise exactly ``num_slots`` ranks run on each of ``num_hosts`` different machines. With
    ``use_tpu``, a ``num_slots`` of ``None`` means all chips of a host.

    Raises:
        SpecError: an argument has the wrong type, is out of bounds, or conflicts with another.
    """

    backend: str | None = None
    num_hosts: int | None = None
    num_slots: int | None = None
    num_workers: int | None = None
    num_cpus_per_slot: float = 1.0
    use_gpu: bool = False
    use_tpu: bool = False
    tpu_type: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    preload: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    min_workers: int | None = None
    max_workers: int | None = None
    min_workers_timeout_s: float = DEFAULT_TIMEOUT_S
    # The ranks in each bundle of a trial that a scheduler has resized; None for any other trial.
    resized_slots: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_hosts", "num_slots", "num_workers", "min_workers", "max_workers"):
            if getattr(self, name) is not None:
                self._set(name, count(name, getattr(self, name), error=SpecError))
        for name in ("use_gpu", "use_tpu"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.backend not in (None, *BACKENDS):
            raise SpecError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {self.backend!r}")
        if self.use_tpu and self.backend == "horovod":
            raise SpecError(
                "with use_tpu, backend must be 'torch' (TorchTPU) or left out (torch_xla), got 'horovod'"
            )
        if self.use_gpu and self.use_tpu:
            raise SpecError("use_gpu and use_tpu cannot both be True: a trial runs on one kind of device")
        for name in ("num_cpus_per_slot", "timeout_s", "stall_timeout_s", "min_workers_timeout_s"):
            self._set(name, number(name, getattr(self, name), more_than=0, error=SpecError))
        for name in ("timeout_s", "stall_timeout_s"):
            if getattr(self, name) > MAX_TIMEOUT_S:
                raise SpecError(
                    f"{name} must be at most {MAX_TIMEOUT_S} s (68 years), got {getattr(self, name)}"
                )
        self._set("nics", _names("nics", "network interface", self.nics, or_one=True))
        self._set("preload", _names("preload", "module", self.preload))
        self._set_hosts_and_slots()
        self._check_range()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _set_hosts_and_slots(self) -> None:
        if self.tpu_type is not None:
            if not self.use_tpu:
                raise SpecError(f"tpu_type requires use_tpu=True, got tpu_type={self.tpu_type!r}")
            self._set("num_hosts", self.num_hosts or shape_of(self.tpu_type)[0])
        total = self.num_workers
        if self.min_workers is not None and self.num_hosts is None and self.num_slots is None:
            total = total or self.min_workers  # the trial starts as soon as min_workers fit
        if total is None:
            self._set("num_hosts", self.num_hosts or 1)
            if not self.use_tpu:
                self._set("num_slots", self.num_slots or 1)
            return
        if self.use_tpu and self.num_workers is not None:
            raise SpecError(f"num_workers cannot be given with use_tpu: pass num_hosts instead, got {total}")
        if self.num_slots is not None:
            raise SpecError(
                "num_workers (a total) and num_slots (a number per host) are mutually exclusive, got "
                f"num_workers={total} and num_slots={self.num_slots}"
            )
        if self.num_hosts is not None and total % self.num_hosts:
            raise SpecError(
                f"num_workers must be a multiple of num_hosts ({self.num_hosts}), so that every host gets "
                f"the same number of ranks, got {total}"
            )
        self._set("num_workers", total if self.num_hosts is None else None)
        if self.num_hosts is not None:
            self._set("num_slots", total // self.num_hosts)

    def _check_range(self) -> None:
        if self.min_workers is None:
            if self.max_workers is not None:
                raise SpecError(
                    f"max_workers requires min_workers (got max_workers={self.max_workers}, min_workers=None)"
                )
            return
        if self.use_tpu:
            raise SpecError(
                f"min_workers cannot be given with use_tpu: a slice keeps its size, got {self.min_workers}"
            )
        start = f"the {self.world_size} rank(s) that the trial starts with"
        if self.min_workers > self.world_size:
            raise SpecError(f"min_workers must be at most {start}, got {self.min_workers}")
        if self.most_workers < self.world_size:
            raise SpecError(f"max_workers must be at least {start}, got {self.max_workers}")

    @property
    def backend_name(self) -> str:
        """The backend that runs the trial's ranks: one of `BACKENDS`, or "xla" with only ``use_tpu``."""
        return self.backend or ("xla" if self.use_tpu else BACKENDS[0])

    @property
    def connect_timeout_s(self) -> float:
        """How long ranks that form a world wait for a peer that does not respond."""
        # Ranks of an elastic trial must leave a broken world within timeout_s, even while they still connect.
        return min(self.timeout_s / 2, ELASTIC_CONNECT_S) if self.is_elastic else self.timeout_s

    @property
    def is_elastic(self) -> bool:
        """True if a trial may continue with fewer or more ranks than it began with."""
        return self.min_workers is not None

    @property
    def slots(self) -> tuple[int, ...]:
        """The number of ranks in each bundle: one bundle per host, or one per rank if hosts do not matter."""
        if self.resized_slots is not None:
            return self.resized_slots
        if self.num_hosts is None:
            assert self.num_workers is not None
            return (1,) * self.num_workers
        assert self.num_slots is not None, "the slots of a TPU trial are known when its hosts are"
        return (self.num_slots,) * self.num_hosts

    @property
    def world_size(self) -> int:
        return sum(self.slots)

    @property
    def most_workers(self) -> int:
        """The largest number of ranks that an elastic trial grows to by itself."""
        return self.world_size if self.max_workers is None else self.max_workers

    @property
    def slot_resources(self) -> dict[str, float]:
        """The resources of one rank."""
        resources = {"CPU": float(self.num_cpus_per_slot)}
        if self.use_gpu:
            resources["GPU"] = 1.0
        return resources

    def placement(self) -> Placement:
        """Return the training actors' bundles: one per host, or one per rank if hosts do not matter.

        >>> make_spec(num_hosts=2, num_slots=3).placement()
        Placement(bundles=({'CPU': 3.0}, {'CPU': 3.0}), strategy='STRICT_SPREAD')
        >>> make_spec(num_workers=3).placement().strategy
        'PACK'
        """
        bundles = tuple(
            {name: amount * count for name, amount in self.slot_resources.items()} for count in self.slots
        )
        # PACK, not STRICT_PACK: a trial may be larger than one node.
        return Placement(bundles, "STRICT_SPREAD" if (self.num_hosts or 1) > 1 else "PACK")


def make_spec(*, num_cpus_per_worker: float | None = None, **arguments: Any) -> TrialSpec:
    """Return the spec for `DistributedTrainableCreator`'s arguments, including the alias num_cpus_per_worker.

    Raises:
        SpecError: see TrialSpec.
    """
    if arguments.get("num_cpus_per_slot") is None:
        arguments.pop("num_cpus_per_slot", None)
        if num_cpus_per_worker is not None:
            arguments["num_cpus_per_slot"] = number(
                "num_cpus_per_worker", num_cpus_per_worker, more_than=0, error=SpecError
            )
    elif num_cpus_per_worker is not None:
        raise SpecError(
            "num_cpus_per_worker is an alias of num_cpus_per_slot; pass only one (got num_cpus_per_slot="
            f"{arguments['num_cpus_per_slot']!r}, num_cpus_per_worker={num_cpus_per_worker!r})"
        )
    return TrialSpec(**arguments)


def _names(argument: str, of: str, given: object, *, or_one: bool = False) -> tuple[str, ...]:
    names = (given,) if or_one and isinstance(given, str) else given
    if names is None:
        return ()
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not isinstance(names, Sequence) or not is_list or not all(isinstance(n, str) and n for n in names):
        one = f"the name of a {of} or " if or_one else ""
        raise SpecError(f"{argument} must be {one}a list of names of {of}s, got {given!r}")
    return tuple(names)
