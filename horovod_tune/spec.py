"""TrialSpec: what one trial asks for, validated once, frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from horovod_tune.errors import SpecError
from horovod_tune.placement import Placement
from horovod_tune.tpu_types import shape_of

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_STALL_TIMEOUT_S = 1800.0
# Horovod reads its time limits into C's int, and its hvd.init() fails with more.
MAX_TIMEOUT_S = 2**31 - 1
# How much longer than timeout_s each phase of a start may take for each training actor: Ray and the
# coordinator deal with them one after the other.
START_S_PER_WORKER = 0.25
# How many times that long the processes of training actors may take to start and to import: on overloaded
# hosts and file systems this is what takes long, and of one that dies meanwhile Ray tells at once.
PROCESS_START_FACTOR = 3


def start_timeout_s(timeout_s: float, workers: int) -> float:
    """Return how long a phase of the start of ``workers`` training actors may take.

    >>> start_timeout_s(60, 2), start_timeout_s(60, 512)
    (60.5, 188.0)
    """
    return timeout_s + START_S_PER_WORKER * workers


@dataclass(frozen=True)
class TrialSpec:
    """What one trial asks for.

    ``num_hosts`` is ``None`` when only a total of ranks was given, which is then placed as tightly as it
    fits; otherwise exactly ``num_slots`` ranks run on each of ``num_hosts`` different machines. On a TPU
    ``num_slots`` is ``None`` for all chips of a host, and ``tpu_type`` names the type of slice.

    Raises:
        SpecError: an argument has the wrong type, is out of bounds, or contradicts another.
    """

    num_hosts: int | None
    num_slots: int | None
    num_workers: int | None
    num_cpus_per_slot: float
    use_gpu: bool
    use_tpu: bool
    tpu_type: str | None
    timeout_s: float
    stall_timeout_s: float
    reuse_workers: bool
    nics: tuple[str, ...]
    min_workers: int | None = None
    max_workers: int | None = None
    min_workers_timeout_s: float = DEFAULT_TIMEOUT_S
    background_uploads: bool = False
    # The ranks in each bundle of a trial that a scheduler has resized; None before.
    resized_slots: tuple[int, ...] | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether a trial may go on with fewer ranks than it began with, or with more."""
        return self.min_workers is not None

    @property
    def slots(self) -> tuple[int, ...]:
        """The number of ranks in each bundle: one a host, or one a rank where hosts do not matter."""
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
        """The most ranks that an elastic trial grows to by itself."""
        return self.world_size if self.max_workers is None else self.max_workers

    @property
    def slot_resources(self) -> dict[str, float]:
        """Return what one rank holds."""
        resources = {"CPU": float(self.num_cpus_per_slot)}
        if self.use_gpu:
            resources["GPU"] = 1.0
        return resources

    def placement(self) -> Placement:
        """Return the training actors' bundles: one a host, or one a rank where hosts do not matter.

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


def make_spec(
    *,
    num_hosts: int | None = None,
    num_slots: int | None = None,
    num_workers: int | None = None,
    num_cpus_per_slot: float | None = None,
    num_cpus_per_worker: float | None = None,
    use_gpu: bool = False,
    use_tpu: bool = False,
    tpu_type: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    reuse_workers: bool = True,
    nics: str | Sequence[str] | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    min_workers_timeout_s: float = DEFAULT_TIMEOUT_S,
    background_uploads: bool = False,
) -> TrialSpec:
    """Return the spec for arguments of either era's names.

    Raises:
        SpecError: see TrialSpec.
    """
    counts = {"num_hosts": num_hosts, "num_slots": num_slots, "num_workers": num_workers}
    for name, number in {**counts, "min_workers": min_workers, "max_workers": max_workers}.items():
        if number is not None:
            _check_count(name, number)
    flags = {"use_gpu": use_gpu, "use_tpu": use_tpu, "reuse_workers": reuse_workers}
    for name, flag in {**flags, "background_uploads": background_uploads}.items():
        if not isinstance(flag, bool):
            raise SpecError(f"{name} must be True or False, got {flag!r}")
    if use_gpu and use_tpu:
        raise SpecError("use_gpu and use_tpu cannot both be True: a trial runs on one kind of device")
    if num_cpus_per_slot is not None and num_cpus_per_worker is not None:
        raise SpecError(
            "num_cpus_per_slot and num_cpus_per_worker are two names of one thing; give one of them, "
            f"got {num_cpus_per_slot!r} and {num_cpus_per_worker!r}"
        )
    cpus_name = "num_cpus_per_slot" if num_cpus_per_worker is None else "num_cpus_per_worker"
    cpus = num_cpus_per_slot if num_cpus_per_worker is None else num_cpus_per_worker
    cpus = 1.0 if cpus is None else cpus
    _check_positive(cpus_name, cpus)
    for name, limit_s in {"timeout_s": timeout_s, "stall_timeout_s": stall_timeout_s}.items():
        _check_positive(name, limit_s)
        if limit_s > MAX_TIMEOUT_S:
            raise SpecError(f"{name} must be at most {MAX_TIMEOUT_S} s (68 years), got {limit_s}")
    if tpu_type is not None:
        if not use_tpu:
            raise SpecError(f"tpu_type needs use_tpu=True, got tpu_type={tpu_type!r}")
        hosts_of_type, _ = shape_of(tpu_type)
        num_hosts = num_hosts or hosts_of_type
    _check_positive("min_workers_timeout_s", min_workers_timeout_s)
    if min_workers is not None and num_hosts is None and num_slots is None and num_workers is None:
        num_workers = min_workers  # it starts as soon as these fit
    hosts, slots = _hosts_and_slots(num_hosts, num_slots, num_workers, use_tpu=use_tpu)
    spec = TrialSpec(
        num_hosts=hosts,
        num_slots=slots,
        num_workers=num_workers if hosts is None else None,
        num_cpus_per_slot=float(cpus),
        use_gpu=use_gpu,
        use_tpu=use_tpu,
        tpu_type=tpu_type,
        timeout_s=float(timeout_s),
        stall_timeout_s=float(stall_timeout_s),
        reuse_workers=reuse_workers,
        nics=_interface_names(nics),
        min_workers=min_workers,
        max_workers=max_workers,
        min_workers_timeout_s=float(min_workers_timeout_s),
        background_uploads=background_uploads,
    )
    return _with_checked_range(spec)


def _with_checked_range(spec: TrialSpec) -> TrialSpec:
    """Return the spec, once its range of sizes holds together."""
    if spec.min_workers is None:
        if spec.max_workers is not None:
            raise SpecError(f"max_workers needs min_workers, got max_workers={spec.max_workers} alone")
        return spec
    if spec.use_tpu:
        raise SpecError(
            f"min_workers cannot be given with use_tpu: a slice keeps its size, got {spec.min_workers}"
        )
    if spec.min_workers > spec.world_size:
        raise SpecError(
            f"min_workers must be at most the {spec.world_size} rank(s) that the trial starts with, got "
            f"{spec.min_workers}"
        )
    if spec.most_workers < spec.world_size:
        raise SpecError(
            f"max_workers must be at least the {spec.world_size} rank(s) that the trial starts with, got "
            f"{spec.max_workers}"
        )
    return spec


def _hosts_and_slots(
    num_hosts: int | None, num_slots: int | None, num_workers: int | None, *, use_tpu: bool
) -> tuple[int | None, int | None]:
    if num_workers is None:
        return num_hosts or 1, num_slots if use_tpu else (num_slots or 1)
    if use_tpu:
        raise SpecError(
            f"num_workers cannot be given with use_tpu (a slice has num_hosts hosts), got {num_workers}"
        )
    if num_slots is not None:
        raise SpecError(
            "num_workers (a total) and num_slots (a number per host) contradict each other; give one of "
            f"them, got num_workers={num_workers} and num_slots={num_slots}"
        )
    if num_hosts is None:
        return None, None
    if num_workers % num_hosts:
        raise SpecError(
            f"num_workers must be a multiple of num_hosts ({num_hosts}), so that every host gets as many "
            f"ranks, got {num_workers}"
        )
    return num_hosts, num_workers // num_hosts


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{name} must be an integer of at least 1, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise SpecError(f"{name} must be at least 1, got {value}")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SpecError(f"{name} must be a number above 0, got {value!r} ({type(value).__name__})")
    if not (float(value) > 0 and math.isfinite(value)):
        raise SpecError(f"{name} must be above 0 and finite, got {value}")


def _interface_names(nics: object) -> tuple[str, ...]:
    names = (nics,) if isinstance(nics, str) else nics
    if names is None:
        return ()
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        raise SpecError(f"nics must be the name of a network interface or a list of such names, got {nics!r}")
    return tuple(names)
