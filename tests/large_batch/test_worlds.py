"""Two real ranks do what one rank with the whole batch does: see programs/two_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from horovod_worlds import run_worlds

pytestmark = pytest.mark.processes

LAYER_WISE = ("lars", "lamb")


def run(backend: str) -> list[dict[str, Any]]:
    """Return what each of two ranks has found."""
    program = Path(__file__).parent / "programs" / "two_ranks.py"
    (world,) = run_worlds("a:2", program=program.read_text(), BACKEND=backend)
    return world.said


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run("horovod")


@pytest.fixture(scope="module")
def torch_ranks() -> list[dict[str, Any]]:
    return run("torch")


@pytest.fixture(params=["ranks", "torch_ranks"])
def both(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("kind", ["sgd", *LAYER_WISE])
def test_unequal_passes_on_unequal_ranks_give_the_gradient_of_all_samples(both, kind: str) -> None:
    for rank in both:
        found = rank["accumulated"][kind]
        assert found["distance"] < 1e-12
        # The rates are equal to the last bit, and nothing is sent before the last pass.
        assert found["rates"] and found["samples"] and found["early"] == 0


@pytest.mark.parametrize("name", ["clipped", "summed"])
def test_clipping_and_a_sum_instead_of_an_average_do_not_change_that(ranks, torch_ranks, name: str) -> None:
    found = [*ranks, *torch_ranks] if name == "clipped" else ranks
    assert max(rank[name]["distance"] for rank in found) < 1e-12


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_in_the_schedule(both) -> None:
    for rank in both:
        found = rank["mixed_precision"]
        assert found["stepped"] == [True, False, True, True]
        assert (found["epoch"], found["scale"]) == (3.0, 128.0)
        assert found["weights"] == both[0]["mixed_precision"]["weights"]


def test_what_no_rank_has_a_gradient_of_stays(both) -> None:
    for rank in both:
        trained, unused, frozen = rank["unused"]
        assert trained > 0 and unused == frozen == 0


def test_what_was_made_before_there_was_a_world_averages_in_it(torch_ranks) -> None:
    assert [rank["grown"] for rank in torch_ranks] == [-1.0, -1.0]


@pytest.mark.parametrize("kind", LAYER_WISE)
def test_horovods_own_backward_passes_per_step_are_one_batch(ranks, kind: str) -> None:
    assert max(rank["own_passes"][kind] for rank in ranks) < 1e-12


@pytest.mark.parametrize("kind", LAYER_WISE)
def test_a_new_rank_takes_up_the_state_of_rank_0(ranks, kind: str) -> None:
    first, second = (rank["broadcast"][kind] for rank in ranks)
    assert first == second
    if kind == "lamb":
        assert 5 in first["state"]  # Steps.


def test_the_noise_scale_of_ranks_and_passes_is_the_known_one(both) -> None:
    # A gradient of ones in 20 dimensions, each with variance 1: 20 / 20.
    assert both[0]["noise"] == both[1]["noise"]
    assert both[0]["noise"]["low"] < 1.0 < both[0]["noise"]["high"] < 1.3


def test_curvature_is_that_of_the_mean_loss_over_the_ranks(both) -> None:
    for rank in both:
        assert rank["curvature"]["found"] == pytest.approx(rank["curvature"]["dense"], rel=1e-6)


def test_a_configuration_trains_as_by_hand_on_one_rank(both) -> None:
    for rank in both:
        found = rank["configured"]
        assert found["distance"] < 1e-12 and found["rates"] and found["passes"] == 3


def test_an_optimiser_that_does_not_average_is_refused(ranks, torch_ranks) -> None:
    assert torch_ranks[1]["refusals"] == {
        "plain": "model must be given in a torch.distributed world of 2 ranks, got None",
        "sharded": "model must not be sharded, got one with FullyShardedDataParallel",
    }
    found = ranks[1]["refusals"]
    assert found["plain"] == "optimizer must be a hvd.DistributedOptimizer in a world of 2 ranks, got SGD"
    assert "op of hvd.DistributedOptimizer must be Average or Sum" in found["adasum"]
