"""Which trial gets free workers, by its noise scale or its batch; made-up trials, no Ray is started."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from horovod_tune.errors import MetricsError, SpecError
from horovod_tune.search import DistributeByGlobalBatch, DistributeByNoiseScale, worker_allocation
from horovod_tune.search.worker_allocation import Demand, share_out
from horovod_tune.spec.resizing import request_for, with_workers
from horovod_tune.spec.trial_spec import TrialSpec, make_spec


@pytest.mark.parametrize(
    ("demands", "free", "shares"),
    [
        ({"a": Demand(1, 32, 1e4), "b": Demand(1, 32, 16)}, 2, {"a": 3, "b": 1}),  # the noisy one gets them
        ({"a": Demand(1, 32, 90)}, 10, {"a": 3}),  # until its batch reaches its noise scale: 96 samples
        ({"a": Demand(1, 32, math.inf), "b": Demand(1, 32, math.inf)}, 4, {"a": 3, "b": 3}),  # alike
        ({"a": Demand(4, 32, 1.0), "b": Demand(1, 32, 1e6)}, 0, {"a": 4, "b": 1}),  # none gives any back
        ({"a": Demand(4, 32, 1.0), "b": Demand(1, 32, 1e6)}, -3, {"a": 4, "b": 1}),
    ],
)
def test_free_workers_go_where_the_gradient_is_noisy(
    demands: dict[str, Demand], free: int, shares: dict[str, int]
) -> None:
    assert share_out(demands, free=free) == shares


def test_shares_are_bounded_whole_and_no_better_elsewhere() -> None:
    choose = random.Random(0)
    for _ in range(500):
        step, most = choose.randint(1, 3), choose.choice([None, 4, 7])
        demands = {
            name: Demand(
                choose.randint(1, 4),
                choose.choice([8, 64]),
                choose.choice([0, 5, 70, 900, math.inf]),
                choose.choice([None, None, 1, 100, 1024]),
            )
            for name in "abcd"[: choose.randint(1, 4)]
        }
        free = choose.randint(-2, 12)
        shares = share_out(demands, free=free, step=step, most=most)
        given = {name: shares[name] - each.workers for name, each in demands.items()}
        assert sum(given.values()) <= max(free, 0)
        assert all(each >= 0 and each % step == 0 for each in given.values())
        left = free - sum(given.values())
        for name, each in demands.items():
            if given[name]:
                assert most is None or shares[name] <= most
                before = replace(each, workers=shares[name] - step)
                assert before.gain(step) > 0
                others = [
                    replace(demands[other], workers=shares[other]).gain(step)
                    for other in demands
                    if other != name and (most is None or shares[other] + step <= most)
                ]
                assert all(before.gain(step) >= gain - 1e-9 for gain in others), "the last one went rightly"
            elif left >= step and (most is None or shares[name] + step <= most):
                assert each.gain(step) == 0, "what is left over helps nobody"


class FakeTrial:
    def __init__(self, name: str, spec: TrialSpec, result: dict[str, Any] | None, **config: Any) -> None:
        self.trial_id, self.config, self.last_result = name, config, result
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


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_allocation.ray, "cluster_resources", lambda: {"CPU": 6.0})


NOISY = {"noise_scale_low": 1e6, "batch_size": 32}


def test_a_trial_gets_resources_of_its_own_kind(cpus: None) -> None:
    for spec, bundles in [
        (make_spec(num_slots=1), [6.0]),
        (make_spec(num_workers=2), [1.0] * 6),
        (make_spec(num_hosts=2, num_slots=1), [3.0, 3.0]),
        (make_spec(num_slots=1, num_cpus_per_slot=2.5), [5.0]),
        (make_spec(num_slots=1, min_workers=1, max_workers=3), [3.0]),
    ]:
        assert ask(DistributeByNoiseScale(), FakeTrial("a", spec, NOISY)) == bundles


def test_what_is_given_to_one_is_not_given_to_another_before_tune_has_changed_the_first(cpus: None) -> None:
    spec, allocate = make_spec(num_slots=1), DistributeByNoiseScale(max_workers=4)
    first, second = FakeTrial("a", spec, NOISY), FakeTrial("b", spec, None)
    assert ask(allocate, first, second) == [4.0]
    second.last_result = {**NOISY, "noise_scale_low": 1e9}
    assert ask(allocate, second, first) == [2.0]
    first.placement_group_factory = request_for(with_workers(spec, 4).placement())
    second.placement_group_factory = request_for(with_workers(spec, 2).placement())
    assert ask(allocate, first, second) is ask(allocate, second, first) is None


@pytest.mark.parametrize("result", [{}, {"noise_scale_low": None}, {"noise_scale_low": math.nan}, {"x": 1}])
def test_a_trial_whose_noise_is_not_known_keeps_its_workers(cpus: None, result: dict[str, Any]) -> None:
    assert ask(DistributeByNoiseScale(), FakeTrial("a", make_spec(num_slots=1), result)) is None


def test_the_batch_may_be_a_hyperparameter_and_has_to_be_there(cpus: None) -> None:
    spec, noisy = make_spec(num_slots=1), {"noise": 100.0}
    allocate = DistributeByNoiseScale(noise_scale="noise", batch_size="b")
    assert ask(allocate, FakeTrial("a", spec, noisy, b=32)) == [4.0]
    for wrong in ({}, {"b": 0}, {"b": "32"}):
        with pytest.raises(MetricsError, match="batch_size='b'"):
            ask(allocate, FakeTrial("a", spec, noisy, **wrong))


@pytest.mark.parametrize(
    ("global_batch_size", "workers"), [(16, 1), (32, 1), (33, 2), (64, 2), (96, 3), (128, 4), (1024, 6)]
)
def test_a_global_batch_gets_a_worker_for_each_pass(cpus: None, global_batch_size: int, workers: int) -> None:
    trial = FakeTrial(
        "a", make_spec(num_slots=1), {"global_batch_size": global_batch_size}, max_micro_batch_size=32
    )
    assert ask(DistributeByGlobalBatch(), trial) == (None if workers == 1 else [float(workers)])
    few = None if workers == 1 else [float(min(workers, 3))]
    assert ask(DistributeByGlobalBatch(max_workers=3), trial) == few


def test_the_largest_step_in_speed_comes_first(cpus: None) -> None:
    """Two workers are free of six: one batch is worked through in 2 passes on 3 ranks, one in 4 on 1."""
    spec, allocate = make_spec(num_slots=1), DistributeByGlobalBatch()
    options = {"max_micro_batch_size": 8}
    many = FakeTrial("a", make_spec(num_slots=3), {"global_batch_size": 48}, **options)
    few = FakeTrial("b", spec, {"global_batch_size": 32}, **options)
    assert ask(allocate, many, few) is None
    assert ask(allocate, few, many) == [3.0]


def test_a_growing_batch_needs_to_be_told_with_that_of_a_rank(cpus: None) -> None:
    spec = make_spec(num_slots=1)
    assert ask(DistributeByGlobalBatch(), FakeTrial("a", spec, {"accuracy": 0.5})) is None
    with pytest.raises(MetricsError, match=r"DistributeByGlobalBatch\(batch_size='max_micro_batch_size'\)"):
        ask(DistributeByGlobalBatch(), FakeTrial("a", spec, {"global_batch_size": 64}))


def test_what_is_not_distributed_is_refused() -> None:
    trial = FakeTrial("a", make_spec(), NOISY)
    trial.trainable = object
    with pytest.raises(SpecError, match="distributed trials only"):
        ask(DistributeByNoiseScale(), trial)
    with pytest.raises(SpecError, match="at least 1, got 0"):
        DistributeByNoiseScale(max_workers=0)
