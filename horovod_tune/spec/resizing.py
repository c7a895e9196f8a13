"""Resizes a trial to the number of ranks that fit the resources that a scheduler has given it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from horovod_tune.errors import SpecError
from horovod_tune.spec.placement import Placement, amounts
from horovod_tune.spec.trial_spec import TrialSpec

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory


def resized(spec: TrialSpec, bundles: Sequence[Mapping[str, float]]) -> TrialSpec:
    """Return the spec of a trial that holds these bundles (resource name to amount).

    The spec is unchanged if these are its own bundles.

    Raises:
        SpecError: a bundle does not hold a whole number of ranks; the trial would have too few or too many
            ranks, or hosts of different sizes with num_hosts; or it runs on TPUs.

    >>> from horovod_tune.spec.trial_spec import make_spec
    >>> resized(make_spec(num_slots=2), [{"CPU": 4.0}]).world_size
    4
    >>> resized(make_spec(num_slots=2), [{"CPU": 2.0}, {"CPU": 1.0}]).slots
    (2, 1)
    """
    if spec.use_tpu:
        raise _refusal(bundles, "with use_tpu, a slice keeps its size")
    held = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    slots = tuple(_ranks_in(spec, bundle) for bundle in held if bundle)
    if not slots:
        raise _refusal(bundles, f"that holds no rank. {_whole_ranks(spec)}")
    if slots == spec.slots:
        return spec
    size = sum(slots)
    if spec.min_workers is not None and size < spec.min_workers:
        raise _refusal(bundles, f"{size} rank(s) are fewer than min_workers={spec.min_workers}")
    if spec.max_workers is not None and size > spec.max_workers:
        raise _refusal(
            bundles,
            f"{size} rank(s) are more than max_workers={spec.max_workers}. "
            "DistributeResources(increase_by=..., increase_by_times=...) limits what a trial gets",
        )
    if spec.num_hosts is None or (spec.num_hosts == 1 and len(slots) > 1):
        # The bundles may land on any number of hosts.
        return replace(spec, num_hosts=None, num_slots=None, num_workers=size, resized_slots=slots)
    if len(set(slots)) > 1:
        raise _refusal(
            bundles,
            f"with num_hosts={spec.num_hosts} every host has the same number of ranks. "
            "Pass num_workers without num_hosts if hosts do not matter",
        )
    return replace(spec, num_hosts=len(slots), num_slots=slots[0], num_workers=None, resized_slots=slots)


def _ranks_in(spec: TrialSpec, bundle: Mapping[str, float]) -> int:
    each = spec.slot_resources
    counts = [bundle.get(name, 0.0) / amount for name, amount in each.items()]
    count = round(counts[0]) if math.isfinite(counts[0]) else 0
    # Allows for rounding errors: amounts are sums of floats.
    whole = all(abs(other - count) < 1e-6 for other in counts)
    if count < 1 or not whole or set(bundle) - set(each):
        raise _refusal(
            [bundle],
            f"a rank holds {amounts(each)}, and a bundle must hold a whole number of ranks. "
            f"{_whole_ranks(spec)}",
        )
    return count


def _refusal(bundles: Sequence[Mapping[str, float]], why: str) -> SpecError:
    asked = " + ".join(amounts(bundle) or "nothing" for bundle in bundles) or "nothing"
    return SpecError(f"cannot resize a trial to {asked}: {why}")


def _whole_ranks(spec: TrialSpec) -> str:
    return f"DistributeResources(increase_by={spec.slot_resources}) adds whole ranks"


def with_workers(spec: TrialSpec, workers: int) -> TrialSpec:
    """Return the spec of the same trial with this number of workers, on the same number of hosts.

    >>> from horovod_tune.spec.trial_spec import make_spec
    >>> with_workers(make_spec(num_hosts=2, num_slots=1), 4).slots
    (2, 2)
    """
    hosts = spec.num_hosts or workers
    bundle = {name: amount * (workers // hosts) for name, amount in spec.slot_resources.items()}
    return resized(spec, [bundle] * hosts)


def request_for(placement: Placement) -> PlacementGroupFactory:
    """Return Tune's request: an empty bundle for the coordinator, and the training actors' bundles."""
    from ray.tune import PlacementGroupFactory

    bundles = [{}, *[dict(bundle) for bundle in placement.bundles]]
    return PlacementGroupFactory(bundles, strategy=placement.strategy)


def resized_request(
    spec: TrialSpec, resources: PlacementGroupFactory | dict[str, float]
) -> PlacementGroupFactory:
    """Return a trial's request for the resources that a scheduler gives it, in either of Tune's two forms.

    Raises:
        SpecError: the trial cannot run with these resources.
    """
    if isinstance(resources, dict):
        bundles = [{name.upper() if name in ("cpu", "gpu") else name: resources[name] for name in resources}]
    else:
        bundles = resources.bundles
    return request_for(resized(spec, bundles).placement())
