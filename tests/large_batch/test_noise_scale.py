"""The noise scale of quadratics whose noise scale is known in closed form, and its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from horovod_tune.large_batch import NoiseScale
from horovod_tune.large_batch.noise_scale import gradient_norms

# The loss of sample x is (theta - x)' H (theta - x) / 2, x from N(0, diag(variances)): its gradient is
# H (theta - x), of mean H theta and covariance H diag(variances) H.
HESSIAN = np.linspace(0.5, 4, 12)
VARIANCES = np.linspace(2, 0.1, 12)
THETA = np.full(12, 0.3)
SQUARED_GRADIENT = float(np.sum((HESSIAN * THETA) ** 2))
TRACE = float(np.sum(HESSIAN**2 * VARIANCES))


def norms(draw: np.random.Generator, sizes: list[int]) -> tuple[float, float, float, float]:
    """What an optimiser step with passes of these sizes tells."""
    gradients = [
        (HESSIAN * (THETA - draw.normal(size=(size, 12)) * np.sqrt(VARIANCES))).mean(0) for size in sizes
    ]
    whole = np.average(gradients, axis=0, weights=sizes)
    small = float(np.mean([np.sum(gradient**2) for gradient in gradients]))
    return small, float(np.mean([1 / size for size in sizes])), float(np.sum(whole**2)), float(sum(sizes))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [[1, 15], [3, 3, 3, 7], [64] * 4])
def test_the_moments_are_unbiased_for_passes_of_any_sizes(sizes: list[int]) -> None:
    draw = np.random.default_rng(0)
    moments = []
    for _ in range(3000):
        meter = NoiseScale(decay=0.5)
        step = norms(draw, sizes)
        for _ in range(2):  # the moments of this step only
            meter.update(*step)
        moments.append(meter.estimate()[-2:])
    errors = np.std(moments, 0) / math.sqrt(len(moments))
    assert np.all(np.abs(np.mean(moments, 0) - [SQUARED_GRADIENT, TRACE]) < 4 * errors)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[8, 8], [4, 12, 16]])
@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_the_truth_is_in_the_interval_as_often_as_it_says(sizes: list[int], decay: float) -> None:
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        meter = NoiseScale(decay=decay, confidence=0.9)
        for _ in range(60):
            meter.update(*norms(draw, sizes))
        estimate = meter.estimate()
        assert estimate is not None
        inside += estimate.low <= TRACE / SQUARED_GRADIENT <= estimate.high
    assert 0.83 <= inside / 200 <= 0.97


def test_at_the_minimum_the_interval_is_open() -> None:
    draw = np.random.default_rng(3)
    still_open = 0
    for _ in range(100):
        meter = NoiseScale(decay=0.9)
        for _ in range(20):
            noise = draw.normal(size=(2, 12))
            squares = np.sum(noise**2, axis=1)
            meter.update(float(squares.mean()), 1.0, float(np.sum(noise.mean(0) ** 2)), 2.0)
        estimate = meter.estimate()
        assert estimate is not None and 0 <= estimate.low < math.inf
        still_open += estimate.high == math.inf
    assert still_open >= 90


def test_the_average_of_both_is_kept_and_not_that_of_the_ratio() -> None:
    meter = NoiseScale(decay=0.5)
    for trace, square in [(4.0, 1.0), (8.0, 4.0)]:
        meter.update(square + trace / 2, 1 / 2, square + trace / 8, 8)
    # Weights 0.5 and 1: traces 10 / 1.5, squares 4.5 / 1.5.
    assert meter.estimate().noise_scale == pytest.approx(10 / 4.5)


def test_hooks_see_one_pass_at_a_time_also_of_shared_and_sparse_weights() -> None:
    shared = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    table = torch.nn.Embedding(5, 2, sparse=True)
    for factor in (1.0, 3.0):
        with gradient_norms([shared, table.weight]) as found:
            (factor * (shared * shared).sum() + factor * table(torch.tensor([1, 1])).sum()).backward()
        # Gradients 2 * factor * (1, 2), and 2 * factor * (1, 1) of a row that is looked up twice.
        assert sum(float(norm) ** 2 for norm in found) == pytest.approx(factor**2 * (4 * 5 + 8))
        (factor * shared.sum()).backward()  # Afterwards, it sees nothing.
        assert sum(float(norm) ** 2 for norm in found) == pytest.approx(factor**2 * (4 * 5 + 8))
