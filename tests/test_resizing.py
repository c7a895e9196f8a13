"""Which ranks a trial has in the resources that a scheduler gives it. No Ray is started here."""

from __future__ import annotations

import random
from typing import Any

import pytest

from horovod_tune.errors import SpecError
from horovod_tune.spec.resizing import resized
from horovod_tune.spec.trial_spec import make_spec


@pytest.mark.parametrize(
    ("arguments", "bundles", "slots"),
    [
        ({"num_slots": 2}, [{"CPU": 4}], (4,)),
        ({"num_slots": 2}, [{"CPU": 1}], (1,)),
        ({"num_slots": 2}, [{"CPU": 2}, {"CPU": 2}], (2, 2)),
        ({"num_workers": 2}, [{"CPU": 1}] * 3, (1, 1, 1)),
        ({"num_workers": 2}, [{"CPU": 4}], (4,)),
        ({"num_workers": 2, "num_cpus_per_worker": 0.5}, [{"CPU": 1.5}], (3,)),
        ({"num_slots": 1, "use_gpu": True}, [{"CPU": 3.0, "GPU": 3.0}], (3,)),
        ({"num_hosts": 2, "num_slots": 2}, [{"CPU": 3}] * 2, (3, 3)),
        ({"num_hosts": 2, "num_slots": 2}, [{"CPU": 2}] * 4, (2, 2, 2, 2)),
        ({"min_workers": 1, "num_slots": 2}, [{"CPU": 4}], (4,)),
        ({"min_workers": 1, "max_workers": 4, "num_slots": 2}, [{"CPU": 4}, {}], (4,)),
        ({"num_slots": 2, "num_cpus_per_slot": 0.1}, [{"CPU": 0.1 + 0.1 + 0.1}], (3,)),
    ],
)
def test_there_are_as_many_ranks_as_the_resources_hold(
    arguments: dict[str, Any], bundles: list[dict[str, float]], slots: tuple[int, ...]
) -> None:
    spec = resized(make_spec(**arguments), bundles)
    assert (spec.slots, spec.world_size) == (slots, sum(slots))
    placement = spec.placement()
    assert [each["CPU"] for each in placement.bundles] == pytest.approx(
        [each["CPU"] for each in bundles if each]
    )
    assert placement.strategy == make_spec(**arguments).placement().strategy
    assert resized(spec, placement.bundles) == spec


def test_a_trial_that_gets_what_it_has_is_not_changed_and_may_go_back_to_its_first_size() -> None:
    spec = make_spec(num_hosts=2, num_slots=3)
    assert resized(spec, spec.placement().bundles) is spec
    first = make_spec(num_slots=2, min_workers=1)
    back = resized(resized(first, [{"CPU": 4}]), [{"CPU": 2}])
    assert (back.slots, back.most_workers) == ((2,), 2)


@pytest.mark.parametrize(
    ("arguments", "bundles", "parts"),
    [
        ({"num_slots": 2}, [], ["no rank", "increase_by"]),
        ({"num_slots": 2}, [{"CPU": 0}], ["no rank"]),
        ({"num_slots": 2}, [{"CPU": 1.5}], ["1.5 CPU", "1 CPU", "whole number"]),
        ({"num_slots": 2, "num_cpus_per_slot": 2}, [{"CPU": 5}], ["5 CPU", "2 CPU", "'CPU': 2.0"]),
        ({"use_gpu": True}, [{"CPU": 1, "GPU": 2}], ["1 CPU, 2 GPU", "1 CPU, 1 GPU", "whole number"]),
        ({"use_gpu": True}, [{"CPU": 2}], ["2 CPU", "1 CPU, 1 GPU"]),
        ({"num_slots": 2}, [{"CPU": 2, "memory": 1e9}], ["memory"]),
        ({"num_slots": 2}, [{"CPU": 1}, {"GPU": 1}], ["1 GPU"]),
        ({"num_hosts": 2, "num_slots": 2}, [{"CPU": 2}, {"CPU": 3}], ["2 CPU + 3 CPU", "num_hosts=2"]),
        ({"min_workers": 2, "num_slots": 2}, [{"CPU": 1}], ["1 rank(s)", "min_workers=2"]),
        ({"min_workers": 2, "max_workers": 3}, [{"CPU": 4}], ["4 rank(s)", "max_workers=3", "increase_by"]),
        ({"num_slots": 2}, [{"CPU": -2.0}], ["-2 CPU"]),
        ({"num_slots": 2}, [{"CPU": float("nan")}], ["nan CPU"]),
        ({"num_slots": 2}, [{"CPU": float("inf")}], ["inf CPU"]),
    ],
)
def test_resources_that_make_no_sense_are_refused(
    arguments: dict[str, Any], bundles: list[dict[str, float]], parts: list[str]
) -> None:
    with pytest.raises(SpecError) as raised:
        resized(make_spec(**arguments), bundles)
    for part in ["cannot resize a trial to", *parts]:
        assert part in str(raised.value)


NAMES = ["CPU", "GPU", "any"]


def test_any_resources_give_a_whole_world_or_an_error() -> None:
    choose = random.Random(1)
    for _ in range(2000):
        spec = make_spec(
            num_slots=choose.randint(1, 4),
            num_cpus_per_slot=choose.choice([0.25, 0.5, 1, 2]),
            use_gpu=choose.random() < 0.3,
        )
        bundles = [
            {
                name: choose.choice([0, 0.25, 1, 2, 3.5, 8])
                for name in choose.sample(NAMES, choose.randint(0, 2))
            }
            for _ in range(choose.randint(0, 4))
        ]
        try:
            new = resized(spec, bundles)
        except SpecError:
            continue
        for name, amount in spec.slot_resources.items():
            assert sum(bundle.get(name, 0) for bundle in bundles) == pytest.approx(amount * new.world_size)
