"""Which trial gets free workers, by its noise scale or its batch; made-up trials, no Ray is started."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from horovod_tune.errors import MetricsError, SpecError
from horovod_tune.search import DistributeByGlobalBatch, DistributeByNoiseScale, worker_allocation
from horovod_tune.spec.resizing import request_for, with_workers
from horovod_tune.spec.trial_spec import TrialSpec, make_spec


class FakeTrial:
    def __init__(self, name: str, spec: TrialSpec, result: dict[str, Any] | None, **config: Any) -> None:
        self.trial_id, self.config, self.last_result, self.status = name, config, result, "RUNNING"
        self.trainable = type("train", (), {"_spec": spec})
        self.placement_group_factory = request_for(spec.placement())

    def get_trainable_cls(self) -> type:
        return self.trainable


class FakeController:
    def __init__(self, *trials: FakeTrial) -> None:
        self.trials = trials

    def get_live_trials(self) -> set[FakeTrial]:
        return set(self.trials)


def ask(allocate: Any, trial: FakeTrial, *others: FakeTrial) -> Any:
    placement = allocate(FakeController(trial, *others), trial, trial.last_result or {}, None)
    return placement and [bundle["CPU"] for bundle in placement.bundles]


@pytest.fixture(autouse=True)
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_allocation.ray, "cluster_resources", lambda: {"CPU": 6.0})


NOISY = {"noise_scale_low": 1e6, "batch_size": 32}


@pytest.mark.parametrize(
    ("noise", "of_another", "slots", "given"),
    [
        (1e4, 16, 1, [5.0]),  # the noisy one gets them
        (16, 1e4, 1, None),
        (90, None, 1, [3.0]),  # until its batch reaches its noise scale: 96 samples
        (math.inf, math.inf, 1, [3.0]),  # alike
        (1e6, 1.0, 5, None),  # none gives any back
    ],
)
def test_free_workers_go_where_the_gradient_is_noisy(
    noise: float, of_another: float | None, slots: int, given: list[float] | None
) -> None:
    one = FakeTrial("a", make_spec(num_slots=1), {**NOISY, "noise_scale_low": noise})
    other = FakeTrial("b", make_spec(num_slots=slots), {**NOISY, "noise_scale_low": of_another})
    assert ask(DistributeByNoiseScale(), one, other) == given


def test_a_trial_gets_resources_of_its_own_kind() -> None:
    for spec, bundles in [
        (make_spec(num_slots=1), [6.0]),
        (make_spec(num_workers=2), [1.0] * 6),
        (make_spec(num_hosts=2, num_slots=1), [3.0, 3.0]),
        (make_spec(num_slots=1, num_cpus_per_slot=2.5), [5.0]),
        (make_spec(num_slots=1, min_workers=1, max_workers=3), [3.0]),
    ]:
        assert ask(DistributeByNoiseScale(), FakeTrial("a", spec, NOISY)) == bundles


def test_what_is_given_to_one_is_not_given_to_another_before_tune_has_changed_the_first() -> None:
    spec, allocate = make_spec(num_slots=1), DistributeByNoiseScale(max_workers=4)
    first, second = FakeTrial("a", spec, NOISY), FakeTrial("b", spec, None)
    assert ask(allocate, first, second) == [4.0]
    second.last_result = {**NOISY, "noise_scale_low": 1e9}
    assert ask(allocate, second, first) == [2.0]
    first.placement_group_factory = request_for(with_workers(spec, 4).placement())
    second.placement_group_factory = request_for(with_workers(spec, 2).placement())
    assert ask(allocate, first, second) is ask(allocate, second, first) is None


def test_a_paused_trial_holds_workers_only_until_it_continues_with_those_it_was_given() -> None:
    spec, allocate = make_spec(num_slots=1), DistributeByNoiseScale(max_workers=4)
    paused, trial = FakeTrial("a", spec, NOISY), FakeTrial("b", spec, NOISY)
    assert ask(allocate, paused, trial) == [3.0]
    paused.status = "PAUSED"  # to be resized
    assert ask(allocate, trial, paused) == [3.0]
    for each in (paused, trial):
        each.status, each.placement_group_factory = "RUNNING", request_for(with_workers(spec, 3).placement())
    assert ask(allocate, trial, paused) is None
    paused.status = "PAUSED"  # at a rung
    assert ask(allocate, trial, paused) == [4.0]


@pytest.mark.parametrize("result", [{}, {"noise_scale_low": None}, {"noise_scale_low": math.nan}])
def test_a_trial_whose_noise_is_not_known_keeps_its_workers(result: dict[str, Any]) -> None:
    assert ask(DistributeByNoiseScale(), FakeTrial("a", make_spec(num_slots=1), result)) is None


def test_the_batch_may_be_a_hyperparameter_and_has_to_be_there() -> None:
    spec, noisy = make_spec(num_slots=1), {"noise": 100.0}
    allocate = DistributeByNoiseScale(noise_scale="noise", batch_size="b")
    for name, batch in (("a", 32), ("b", np.int64(32))):
        assert ask(allocate, FakeTrial(name, spec, noisy, b=batch)) == [4.0]
    nested = DistributeByNoiseScale(noise_scale="noise", batch_size="data/b")
    assert ask(nested, FakeTrial("a", spec, noisy, data={"b": 32})) == [4.0]
    other = FakeTrial("b", spec, {"noise": 1e9, "data": {"b": 32}})
    assert ask(nested, FakeTrial("a", spec, noisy, data={"b": 32}), other) is None
    for wrong in ({}, {"b": 0}, {"b": "32"}):
        with pytest.raises(MetricsError, match=r"DistributeByNoiseScale\(batch_size='b'\)"):
            ask(allocate, FakeTrial("a", spec, noisy, **wrong))


@pytest.mark.parametrize(
    ("global_batch_size", "workers"), [(16, 1), (32, 1), (33, 2), (64, 2), (128, 4), (1024, 6)]
)
def test_a_global_batch_gets_a_worker_for_each_pass(global_batch_size: int, workers: int) -> None:
    trial = FakeTrial(
        "a", make_spec(num_slots=1), {"global_batch_size": global_batch_size}, max_micro_batch_size=32
    )
    assert ask(DistributeByGlobalBatch(), trial) == (None if workers == 1 else [float(workers)])
    few = None if workers == 1 else [float(min(workers, 3))]
    assert ask(DistributeByGlobalBatch(max_workers=3), trial) == few


def test_the_largest_step_in_speed_comes_first() -> None:
    """Two workers are free of six: one batch is worked through in 2 passes on 3 ranks, one in 4 on 1."""
    spec, allocate = make_spec(num_slots=1), DistributeByGlobalBatch()
    options = {"max_micro_batch_size": 8}
    many = FakeTrial("a", make_spec(num_slots=3), {"global_batch_size": 48}, **options)
    few = FakeTrial("b", spec, {"global_batch_size": 32}, **options)
    assert ask(allocate, many, few) is None
    assert ask(allocate, few, many) == [3.0]


def test_what_is_not_distributed_is_refused() -> None:
    trial = FakeTrial("a", make_spec(), NOISY)
    trial.trainable = object
    with pytest.raises(SpecError, match="distributed trials only"):
        ask(DistributeByNoiseScale(), trial)


@pytest.mark.parametrize("allocation", [DistributeByNoiseScale, DistributeByGlobalBatch])
def test_wrong_arguments_are_named(allocation: type) -> None:
    for workers in (0, True, math.nan, 1.5, "4"):
        with pytest.raises(SpecError, match=f"max_workers must be an integer of at least 1, got {workers!r}"):
            allocation(max_workers=workers)
    with pytest.raises(ValueError, match="batch_size must be the name of a reported value, got 3"):
        allocation(batch_size=3)
    assert allocation(max_workers=np.int64(2))._max_workers == 2
