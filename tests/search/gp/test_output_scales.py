"""The scales that results are modelled on, and which of them is used."""

from __future__ import annotations

import numpy as np
import pytest
from bayes_opt.acquisition import ExpectedImprovement, UpperConfidenceBound

from horovod_tune.search import BayesOptSearch, LogExpectedImprovement
from horovod_tune.search.gp.acquisition import is_scale_free
from horovod_tune.search.gp.fitted_model import FittedModel, ModelOptions
from horovod_tune.search.gp.output_scales import SOFTNESSES, Scale, compress, scales

GROUPS = np.arange(2)
X = np.random.default_rng(0).random((40, 2))
BOWL = -np.square(X - [0.3, 0.6]).sum(1)


def test_disasters_are_pulled_in_and_order_is_kept() -> None:
    targets = np.array([0.0, 1.0, 2.0, -1e6, -1e3, 1.5, 0.5])
    squeezed = compress(targets, depth=3.0)
    assert list(np.argsort(squeezed)) == list(np.argsort(targets))
    assert squeezed.min() > -50 and list(squeezed[[1, 2, 5]]) == [1.0, 2.0, 1.5]


def test_every_scale_is_standardised_and_keeps_the_order() -> None:
    results = np.random.default_rng(1).standard_cauchy(50)
    found = list(scales(results, 3.0, SOFTNESSES))
    assert len(found) == 1 + len(SOFTNESSES)
    for scale in found:
        assert list(np.argsort(scale.targets)) == list(np.argsort(results))
        assert (scale.targets.mean(), scale.targets.std()) == pytest.approx((0.0, 1.0))


def test_the_slopes_of_a_scale_are_those_of_finite_differences() -> None:
    results = np.linspace(-12.0, 1.0, 20_001)
    # The median is not in the middle, so that the first scale has a compressed part too.
    results = np.concatenate([results, np.full(20_001, 0.5)])
    for scale in scales(results, 3.0, SOFTNESSES):
        targets, slopes = scale.targets[:20_001], np.exp(scale.log_slopes[:20_001])
        measured = np.diff(targets) / np.diff(results[:20_001])
        np.testing.assert_allclose(measured, (slopes[1:] + slopes[:-1]) / 2, rtol=1e-3)


def test_a_small_softness_spreads_the_best_results() -> None:
    own, soft, hard = scales(BOWL, 3.0, (1.0, 0.1))
    first, second = np.argsort(-BOWL)[:2]

    def lead(scale: Scale) -> float:
        return float(scale.targets[first] - scale.targets[second])

    assert lead(own) < lead(soft) < lead(hard)


def test_results_that_are_mostly_the_best_stay_on_their_own_scale() -> None:
    assert len(list(scales(np.array([1.0, 1.0, 1.0, 0.0]), 3.0, SOFTNESSES))) == 1


def is_warped(results: np.ndarray, options: ModelOptions) -> bool:
    """Return True if the model of `results` is on another scale than their own."""
    model = FittedModel(X, results, GROUPS, options)
    return not np.array_equal(model.targets, next(scales(results, options.linear_depth, ())).targets)


def test_results_over_powers_of_ten_are_warped_and_a_plane_is_not() -> None:
    options = ModelOptions(softnesses=SOFTNESSES)
    assert is_warped(-np.exp(-10.0 * BOWL), options)
    assert not is_warped(X @ [1.0, 2.0], options)


def test_noise_in_proportion_to_the_results_is_warped_and_constant_noise_seldom() -> None:
    options = ModelOptions(softnesses=SOFTNESSES)
    noises = np.random.default_rng(3).standard_normal((5, 40))
    assert all(is_warped(-np.exp(-10.0 * BOWL + 0.3 * noise), options) for noise in noises)
    assert sum(is_warped(BOWL + 0.2 * noise, options) for noise in noises) <= 1


def test_numbers_on_the_objectives_scale_keep_results_on_it() -> None:
    results = -np.exp(-10.0 * BOWL)
    assert not is_warped(results, ModelOptions())
    assert not is_warped(results, ModelOptions(softnesses=SOFTNESSES, fixed_noise=1e-4))


def test_only_the_logarithm_of_expected_improvement_without_a_margin_is_scale_free() -> None:
    assert is_scale_free(LogExpectedImprovement())
    for other in (UpperConfidenceBound(), ExpectedImprovement(0.0), LogExpectedImprovement(0.1)):
        assert not is_scale_free(other)


@pytest.mark.parametrize("acquisition", [None, UpperConfidenceBound()])
def test_a_search_warps_only_by_default(acquisition: UpperConfidenceBound | None) -> None:
    search = BayesOptSearch(
        {"x": (0.0, 1.0), "y": (0.0, 1.0)}, "loss", "min", acquisition_function=acquisition
    )
    for (x, y), value in zip(X, BOWL, strict=True):
        search.add_evaluated_point({"x": x, "y": y}, float(np.exp(-10.0 * value)))
    search.suggest("trial")
    _, model = search._optimizer._fitted["loss"]
    own = next(scales(-np.exp(-10.0 * BOWL), 3.0, ())).targets
    assert np.array_equal(model.targets, own) == (acquisition is not None)
