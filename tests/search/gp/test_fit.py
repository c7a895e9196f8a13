"""The Gaussian process and the acquisition functions, against independent computations."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from bayes_opt.acquisition import ConstantLiar, ExpectedImprovement, GPHedge, UpperConfidenceBound
from scipy.optimize import check_grad
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from horovod_tune.search import LogExpectedImprovement
from horovod_tune.search.gp.acquisition import log_h
from horovod_tune.search.gp.failure_model import FailureModel, diverged
from horovod_tune.search.gp.fit import MarginalLikelihood, Priors, fit
from horovod_tune.search.gp.fitted_model import FittedModel, ModelOptions, thin
from horovod_tune.search.gp.kernels import Hyperparameters, MaternCovariance
from horovod_tune.search.gp.posterior import DRAWS, Posterior
from horovod_tune.search.gp.process import Conditioned
from horovod_tune.search.search_arguments import acquisition_of

GENERATOR = np.random.default_rng(0)
X = GENERATOR.random((25, 3))
Y = np.sin(5 * X[:, 0]) + X[:, 1] ** 2 + 0.01 * GENERATOR.standard_normal(25)
GROUPS = np.arange(3)
H = Hyperparameters(np.array([0.4, 0.9, 2.0]), 1.3, 0.01)


def conditioned(mean: float | None = None) -> Conditioned:
    return Conditioned(X, Y[:, None], np.full(25, H.noise), MaternCovariance(H, GROUPS), mean=mean)


def test_predictions_are_those_of_scikit_learn() -> None:
    kernel = ConstantKernel(H.signal, "fixed") * Matern(H.lengths, "fixed", nu=2.5)
    peer = GaussianProcessRegressor(kernel, alpha=H.noise, optimizer=None).fit(X, Y)
    queries = GENERATOR.random((40, 3))
    mean, std = conditioned(mean=0.0).predict(queries)
    peer_mean, peer_std = peer.predict(queries, return_std=True)
    np.testing.assert_allclose(mean[:, 0], peer_mean, atol=1e-6)
    np.testing.assert_allclose(std, peer_std, atol=1e-6)


def test_the_joint_covariance_has_the_single_variances_on_its_diagonal() -> None:
    queries = GENERATOR.random((6, 3))
    _, std = conditioned().predict(queries)
    _, covariance = conditioned().predict_joint(queries)
    np.testing.assert_allclose(np.diag(covariance), std**2, atol=1e-10)


def test_slopes_are_those_of_finite_differences() -> None:
    process, query, step = conditioned(), np.array([0.3, 0.6, 0.5]), 1e-6
    _, _, mean_slope, std_slope = process.predict_with_slopes(query)
    for i in range(3):
        shift = step * np.eye(3)[i]
        up, down = process.predict((query + shift)[None, :]), process.predict((query - shift)[None, :])
        assert mean_slope[i, 0] == pytest.approx(
            (up[0][0, 0] - down[0][0, 0]) / (2 * step), rel=1e-4, abs=1e-6
        )
        assert std_slope[i] == pytest.approx((up[1][0] - down[1][0]) / (2 * step), rel=1e-3, abs=1e-6)


def part(objective: MarginalLikelihood, index: int, theta: np.ndarray) -> np.ndarray:
    return np.asarray(objective(theta)[index])


def test_the_likelihoods_gradient_is_that_of_finite_differences() -> None:
    targets = (Y - Y.mean()) / Y.std()
    categories = np.eye(2)[GENERATOR.integers(0, 2, 25)]
    features, groups = np.concatenate([X, categories], axis=1), np.array([0, 1, 2, 3, 3])
    objective = MarginalLikelihood(features, targets, groups, Priors())
    for start in objective.starts()[:3]:
        error = check_grad(partial(part, objective, 0), partial(part, objective, 1), start)
        assert error < 1e-3 * np.linalg.norm(objective(start)[1])


def test_a_fit_goes_on_from_an_earlier_one_and_ends_as_well() -> None:
    points = np.random.default_rng(7).random((80, 3))
    values = np.sin(6 * points[:, 0]) + points[:, 1]
    earlier = FittedModel(points[:70], values[:70], GROUPS, ModelOptions()).state
    fresh = FittedModel(points, values, GROUPS, ModelOptions())
    warm = FittedModel(points, values, GROUPS, ModelOptions(), earlier=earlier)
    assert earlier is not None and warm.state is not None and warm.state.fresh_at == 70
    queries = GENERATOR.random((40, 3))
    means = [m.condition().predict(queries)[0][:, 0] * m.scale + m.offset for m in (fresh, warm)]
    np.testing.assert_allclose(means[0], means[1], atol=0.05)
    again = FittedModel(points, values, GROUPS, ModelOptions(), earlier=warm.state)
    assert again.state is warm.state
    np.testing.assert_allclose(
        again.covariance.between(queries, points), warm.covariance.between(queries, points)
    )


@pytest.mark.parametrize("is_linear", [True, False])
def test_an_axis_over_powers_of_ten_becomes_linear_where_the_results_are(is_linear: bool) -> None:
    points = np.random.default_rng(5).random((25, 2))
    powers = np.array([np.log(1e4), 0.0])
    place = np.expm1(points[:, 0] * powers[0]) / np.expm1(powers[0]) if is_linear else points[:, 0]
    values = -np.square(place - 0.4) - 0.3 * np.square(points[:, 1] - 0.6)
    model = FittedModel(points, values, np.arange(2), ModelOptions(), powers)
    assert model.state is not None and model.state.linear is is_linear
    process = model.condition()
    query = np.array([0.93, 0.3])
    _, _, mean_slope, std_slope = process.predict_with_slopes(query)
    for i in range(2):
        step = np.zeros(2)
        step[i] = 1e-5
        means, stds = process.predict(np.stack([query - step, query + step]))
        assert mean_slope[i, 0] == pytest.approx((means[1, 0] - means[0, 0]) / 2e-5, rel=1e-3, abs=1e-5)
        assert std_slope[i] == pytest.approx((stds[1] - stds[0]) / 2e-5, rel=1e-2, abs=1e-5)
    again = FittedModel(points, values, np.arange(2), ModelOptions(), powers, earlier=model.state)
    queries = np.random.default_rng(6).random((9, 2))
    np.testing.assert_allclose(again.condition().predict(queries)[0], process.predict(queries)[0])


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        ([0.3, 1e6, 0.4, 2.3, 0.9, 3e6], 2),
        ([0.3, 0.4, 2.3, 1e6, 1e30, 1e300, 0.5, 0.2], 3),
        ([1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6], 0),  # grows without a gap
        ([0.397887 + 1e-9 * i for i in range(9)] + [0.5, 1.0, 80.0], 0),  # converged
        ([-5.0, -4.9, -4.5, -3.0, 0.1], 0),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 1e9], 0),  # nothing to measure the jump by
        ([1e6, 2e6, 3e6, 0.4], 0),  # all but one
        ([], 0),
    ],
)
def test_losses_far_beyond_a_gap_count_as_diverged(losses: list[float], lost: int) -> None:
    assert diverged(np.array(losses)).sum() == lost


def test_our_kernel_is_scikit_learns() -> None:
    ours, theirs = MaternCovariance(H, GROUPS), ConstantKernel(H.signal) * Matern(H.lengths, nu=2.5)
    queries = GENERATOR.random((8, 3))
    np.testing.assert_allclose(ours.between(queries, X), theirs(queries, X), atol=1e-10)
    np.testing.assert_allclose(ours.variance(queries), theirs.diag(queries))


def test_the_fit_tells_relevant_parameters_from_idle_ones() -> None:
    objective = MarginalLikelihood(X, (Y - Y.mean()) / Y.std(), GROUPS)
    found = objective.hyperparameters(fit(objective, objective.starts(), 60).theta)
    assert found.lengths[2] > 2 * max(found.lengths[:2])
    assert found.noise < 0.05


def test_log_expected_improvement_is_the_logarithm_of_bayesian_optimizations() -> None:
    mean, std = np.linspace(-3, 3, 50), np.full(50, 0.7)
    ours, theirs = LogExpectedImprovement(), ExpectedImprovement(xi=0.0)
    ours.y_max = theirs.y_max = 0.5
    np.testing.assert_allclose(ours.base_acq(mean, std), np.log(theirs.base_acq(mean, std)), rtol=1e-6)


def test_log_expected_improvement_is_finite_and_rising_where_the_plain_one_is_zero() -> None:
    values = log_h(np.array([-1e8, -1e5, -1001.0, -999.0, -50.0, -1.0001, -0.9999, 0.0, 10.0]))
    assert np.all(np.isfinite(values)) and np.all(np.diff(values) > 0)


def test_thinning_keeps_the_best() -> None:
    targets = GENERATOR.standard_normal(500)
    kept = thin(targets, 100)
    assert len(set(kept)) == 100 and set(np.argsort(-targets)[:50]) <= set(kept)


def posterior(pending: np.ndarray, failed: np.ndarray | None = None, **kwargs: object) -> Posterior:
    model = FittedModel(X, Y, GROUPS, ModelOptions())
    safety = None if failed is None else FailureModel(X, failed, GROUPS)
    acquisition = kwargs.pop("acquisition", LogExpectedImprovement())
    return Posterior(model, pending, safety, acquisition, seed=0, **kwargs)  # type: ignore[arg-type]


def test_a_point_in_flight_makes_its_surroundings_uninteresting() -> None:
    nobody = posterior(np.empty((0, 3)))
    queries = GENERATOR.random((500, 3))
    best = queries[[np.argmax(nobody(queries))]]
    assert posterior(best)(best)[0] < nobody(best)[0] - 3.0


def uncertain(pending: np.ndarray, **kwargs: object) -> Posterior:
    """As `posterior`, of seven results alone."""
    model = FittedModel(X[:7], Y[:7], GROUPS, ModelOptions())
    return Posterior(model, pending, None, LogExpectedImprovement(), 0, draw_results=False, **kwargs)  # type: ignore[arg-type]


def test_the_best_of_points_in_flight_of_which_something_is_expected_is_not_that_of_draws() -> None:
    generator = np.random.default_rng(1)
    pending, queries = generator.random((60, 3)), generator.random((20, 3))
    nobody, drawn = uncertain(pending[:0]), uncertain(pending)
    expected = uncertain(pending, expected=60)
    best = max(nobody.incumbents[0], nobody.means(pending).max())
    assert expected.incumbents == pytest.approx(best, abs=0.05)
    assert drawn.incumbents.mean() > best + 0.1
    assert expected.means(queries) == pytest.approx(nobody.means(queries), abs=0.05)
    # Less is to be found there, as with points that are drawn.
    assert np.all(expected(pending) < nobody(pending))


def test_the_first_points_in_flight_are_expected_and_the_others_drawn() -> None:
    pending = np.random.default_rng(1).random((6, 3))
    nobody, both = uncertain(pending[:0]), uncertain(pending, expected=4)
    means, _ = both._process.predict(pending)
    assert means.shape[1] == DRAWS
    assert np.ptp(means[4:], axis=1).min() > 10 * np.ptp(means[:4], axis=1).max()
    assert means[:4].mean(axis=1) == pytest.approx(nobody.means(pending[:4]), abs=0.05)


def test_a_failure_makes_its_surroundings_uninteresting_and_leaves_the_rest() -> None:
    here, far = np.array([[0.9, 0.9, 0.9]]), np.array([[0.1, 0.1, 0.1]])
    without, with_failure = (
        posterior(np.empty((0, 3))),
        posterior(np.empty((0, 3)), failed=np.repeat(here, 2, axis=0)),
    )
    assert with_failure(here)[0] < without(here)[0] - 5.0
    assert with_failure(far)[0] == pytest.approx(without(far)[0], abs=0.5)


@pytest.mark.parametrize("failed", [None, np.array([[0.5, 0.5, 0.2]])])
@pytest.mark.parametrize(
    "acquisition", [LogExpectedImprovement(), ExpectedImprovement(0.01), UpperConfidenceBound()]
)
def test_the_acquisitions_gradient_is_that_of_finite_differences(acquisition: object, failed: object) -> None:
    function = posterior(np.array([[0.2, 0.8, 0.5]]), failed=failed, acquisition=acquisition)  # type: ignore[arg-type]
    query = np.array([0.45, 0.35, 0.7])
    value, slope = function.with_slope(query)
    assert value == pytest.approx(function(query[None, :])[0], rel=1e-6)
    for i in range(3):
        shift = 1e-5 * np.eye(3)[i]
        up, down = function((query + shift)[None, :])[0], function((query - shift)[None, :])[0]
        assert slope[i] == pytest.approx((up - down) / 2e-5, rel=2e-2, abs=1e-4)


def test_what_cannot_be_used_as_an_acquisition_function_is_said() -> None:
    with pytest.raises(TypeError, match="cannot be a GPHedge; give one of its functions"):
        acquisition_of(GPHedge([UpperConfidenceBound()]), None)
    with pytest.raises(TypeError, match=r"cannot be a ConstantLiar.*Pass only its base_acquisition"):
        acquisition_of(ConstantLiar(UpperConfidenceBound()), None)
    with pytest.raises(TypeError, match=r"acquisition_function must be one of.* got 'ucb'"):
        acquisition_of("ucb", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'kind'.* got 'best'"):
        acquisition_of(None, {"kind": "best"})
    with pytest.raises(ValueError, match="not both"):
        acquisition_of(UpperConfidenceBound(), {"kind": "ei"})
