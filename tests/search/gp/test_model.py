"""The Gaussian process and its fit, against independent computations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from bayes_opt.acquisition import ExpectedImprovement
from scipy.optimize import check_grad
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from horovod_tune.search import LogExpectedImprovement
from horovod_tune.search.earlier_experiment import EarlierModel
from horovod_tune.search.gp.acquisition import Posterior, averaged, log_h
from horovod_tune.search.gp.feasibility import FailureModel, diverged, joint
from horovod_tune.search.gp.fit import Conditioned, MarginalLikelihood, draws
from horovod_tune.search.gp.fitted_model import SOFTNESSES, FittedModel, ModelOptions, scales
from horovod_tune.search.gp.kernels import Hyperparameters, MaternCovariance

GENERATOR = np.random.default_rng(0)
X = GENERATOR.random((25, 3))
Y = np.sin(5 * X[:, 0]) + X[:, 1] ** 2 + 0.01 * GENERATOR.standard_normal(25)
GROUPS = np.arange(3)
BOWL_AT = np.random.default_rng(0).random((40, 2))


def bowl(points: np.ndarray) -> np.ndarray:
    return -np.square(points[:, :2] - [0.3, 0.6]).sum(1)


def fitted(points: np.ndarray, values: np.ndarray, **options: object) -> FittedModel:
    return FittedModel(points, values, np.arange(points.shape[1]), ModelOptions(), **options)  # type: ignore[arg-type]


def test_predictions_are_those_of_scikit_learn() -> None:
    h = Hyperparameters(np.array([0.4, 0.9, 2.0]), 1.3, 0.01)
    kernel = ConstantKernel(h.signal, "fixed") * Matern(h.lengths, "fixed", nu=2.5)
    peer = GaussianProcessRegressor(kernel, alpha=h.noise, optimizer=None).fit(X, Y)
    process = Conditioned(X, Y[:, None], np.full(25, h.noise), MaternCovariance(h, GROUPS), mean=0.0)
    queries = GENERATOR.random((40, 3))
    mean, std = process.predict(queries)
    peer_mean, peer_std = peer.predict(queries, return_std=True)
    np.testing.assert_allclose(mean[:, 0], peer_mean, atol=1e-6)
    np.testing.assert_allclose(std, peer_std, atol=1e-6)
    _, covariance = process.predict_joint(queries)
    np.testing.assert_allclose(covariance, peer.predict(queries, return_cov=True)[1], atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("noise", [None, 0.1])
@pytest.mark.parametrize("beside_a_task", [False, True])
def test_the_likelihood_and_its_gradient(timed: bool, noise: float | None, beside_a_task: bool) -> None:
    generator = np.random.default_rng(3)
    features = np.concatenate([np.eye(2)[generator.integers(0, 2, 25)], X], axis=1)
    task = generator.standard_normal(25) if beside_a_task else None
    groups, targets = np.array([0, 0, 1, 2, 3]), (Y - Y.mean()) / Y.std()
    objective = MarginalLikelihood(features, targets, groups, noise, timed, task)
    for theta in objective.starts()[:3]:
        error = check_grad(lambda t: objective(t)[0], lambda t: objective(t)[1], theta, epsilon=1e-6)
        assert error < 1e-3 * (1 + np.linalg.norm(objective(theta)[1]))
        standard = (theta - objective.means) / objective.stds
        with_prior = 0.5 * standard @ standard - objective.log_likelihood(theta)
        assert with_prior == pytest.approx(objective(theta)[0], abs=1e-8)
    assert objective.log_likelihood(np.full(len(objective.bounds), 50.0)) == -np.inf


def test_a_fit_that_starts_from_an_earlier_one_ends_as_well() -> None:
    points = np.random.default_rng(7).random((80, 3))
    values = np.sin(6 * points[:, 0]) + points[:, 1]
    earlier = fitted(points[:70], values[:70]).state
    fresh, warm = fitted(points, values), fitted(points, values, earlier=earlier)
    assert warm.state.fresh_at == 70
    queries = GENERATOR.random((40, 3))
    means = [m.condition().predict(queries)[0][:, 0] * m.scale + m.offset for m in (fresh, warm)]
    np.testing.assert_allclose(means[0], means[1], atol=0.05)
    again = fitted(points, values, earlier=warm.state)
    assert again.state is warm.state
    np.testing.assert_allclose(
        again.covariance.between(queries, points), warm.covariance.between(queries, points)
    )


@pytest.mark.parametrize("is_linear", [True, False])
def test_an_axis_over_powers_of_ten_becomes_linear_where_the_results_are(is_linear: bool) -> None:
    points, powers = np.random.default_rng(5).random((25, 2)), np.array([np.log(1e4), 0.0])
    place = np.expm1(points[:, 0] * powers[0]) / np.expm1(powers[0]) if is_linear else points[:, 0]
    values = -np.square(place - 0.4) - 0.3 * np.square(points[:, 1] - 0.6)
    model = fitted(points, values, powers=powers)
    assert model.state.linear is is_linear
    again = fitted(points, values, powers=powers, earlier=model.state)
    means = [each.condition().predict(BOWL_AT)[0] for each in (model, again)]
    np.testing.assert_allclose(*means)


@pytest.mark.parametrize("weight", [2.0, -1.0, 0.0])
def test_few_results_determine_the_weight_of_an_earlier_task(weight: float) -> None:
    """Far from the results the process is the earlier task's shape, with the weight that the results show."""
    before = fitted(BOWL_AT, bowl(BOWL_AT))
    task = EarlierModel(before, np.empty(0))
    here = np.array([[0.1, 0.2], [0.4, 0.45], [0.8, 0.3], [0.2, 0.9], [0.55, 0.6], [0.9, 0.9]])
    model = fitted(here, 5.0 + 3.0 * weight * bowl(here), task=task)
    there = np.array([[0.4, 0.4], [0.0, 1.0], [1.0, 0.0]])
    means = model.condition().predict(there)[0][:, 0] * model.scale + model.offset
    truth = 5.0 + 3.0 * weight * bowl(there)
    assert means == pytest.approx(truth, abs=0.15 * np.ptp(3.0 * bowl(there)))


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
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


def test_log_expected_improvement_is_the_logarithm_of_bayesian_optimizations() -> None:
    mean, std = np.linspace(-3, 3, 50), np.full(50, 0.7)
    ours, theirs = LogExpectedImprovement(), ExpectedImprovement(xi=0.0)
    ours.y_max = theirs.y_max = 0.5
    np.testing.assert_allclose(ours.base_acq(mean, std), np.log(theirs.base_acq(mean, std)), rtol=1e-6)
    # Where the plain one is 0 it is finite and rises.
    values = log_h(np.array([-1e8, -1e5, -1001.0, -999.0, -50.0, -1.0001, -0.9999, 0.0, 10.0]))
    assert np.all(np.isfinite(values)) and np.all(np.diff(values) > 0)


def uncertain(pending: np.ndarray, model: FittedModel | None = None, **kwargs: object) -> Posterior:
    model = model or fitted(X[:7], Y[:7])
    model.timed = True  # the results themselves are not drawn
    return Posterior(model, pending, joint([]), LogExpectedImprovement(), 0, **kwargs)  # type: ignore[arg-type]


def test_the_best_of_points_in_flight_of_which_something_is_expected_is_not_that_of_draws() -> None:
    generator = np.random.default_rng(1)
    pending, queries = generator.random((60, 3)), generator.random((20, 3))
    unaware, drawn = uncertain(pending[:0]), uncertain(pending)
    expected = uncertain(pending, expected=60)
    best = max(unaware.incumbents[0], unaware.means(pending).max())
    assert expected.incumbents == pytest.approx(best, abs=0.05)
    assert drawn.incumbents.mean() > best + 0.1
    assert expected.means(queries) == pytest.approx(unaware.means(queries), abs=0.05)
    # Less is to be found there, as with points that are drawn.
    assert np.all(expected(pending) < unaware(pending))


Region = Callable[[np.ndarray], np.ndarray]


# Regions for which the model was not chosen, and the number of parameters, most of which do not matter.
@pytest.mark.long
@pytest.mark.parametrize(
    ("dimension", "region"),
    [
        (6, lambda x: x[:, 2] > 0.7),
        (3, lambda x: np.abs(x[:, 1] - 0.5) < 0.15),
        (5, lambda x: (x[:, 0] > 0.5) & (x[:, 3] > 0.5)),
    ],
    ids=["above a value", "a band", "a corner"],
)
def test_what_failures_depend_on_is_learned_from_forty_trials(dimension: int, region: Region) -> None:
    told_apart = []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        tried, others = generator.random((40, dimension)), generator.random((400, dimension))
        failed = region(tried)
        chances = FailureModel(tried[~failed], tried[failed], np.arange(dimension))(others)
        fails = region(others)
        # The share of pairs in which the sound point is thought safer than the failing one.
        told_apart.append(np.mean(chances[~fails][:, None] > chances[fails][None, :]))
    assert np.mean(told_apart) > 0.98


@pytest.mark.parametrize("scored", [0, 1])
@pytest.mark.parametrize("dimension", [1, 3])
def test_one_failure_is_enough_for_a_model(scored: int, dimension: int) -> None:
    safety = FailureModel(
        np.full((scored, dimension), 0.2), np.full((1, dimension), 0.8), np.arange(dimension)
    )
    near, far = safety(np.asarray([[0.8] * dimension, [0.2] * dimension]))
    assert near <= far <= 0


class Normal:
    """A likelihood that is normal around 2 with variance 1, with a standard normal prior."""

    means, stds = np.zeros(3), np.ones(3)

    def log_likelihood(self, theta: np.ndarray) -> float:
        return -0.5 * float(np.square(theta - 2.0).sum())


@pytest.mark.long
def test_draws_have_the_mean_and_the_variance_of_the_posterior() -> None:
    found = np.asarray(draws(Normal(), np.full(3, 5.0), 3000, np.random.default_rng(0)))  # type: ignore[arg-type]
    # Prior and likelihood are equally wide: the posterior is half-way between them, and half as wide.
    assert found[50:].mean(axis=0) == pytest.approx(np.ones(3), abs=0.08)
    assert found[50:].var(axis=0) == pytest.approx(np.full(3, 0.5), abs=0.08)


def test_a_chain_stays_where_it_is_when_nothing_near_is_as_probable() -> None:
    class Needle(Normal):
        def log_likelihood(self, theta: np.ndarray) -> float:
            return 0.0 if np.all(theta == 5.0) else -np.inf

    (only,) = draws(Needle(), np.full(3, 5.0), 1, np.random.default_rng(0))  # type: ignore[arg-type]
    assert only.tolist() == [5.0, 5.0, 5.0]


def test_the_average_is_that_of_the_expectations_not_of_their_logarithms() -> None:
    models = fitted(X[:12], Y[:12]).drawn(3, seed=2)
    assert len({tuple(each.covariance.hyperparameters.lengths) for each in models}) > 1
    each, queries = [uncertain(X[13:14], model) for model in models], GENERATOR.random((6, 3))
    expected = np.log(np.mean([np.exp(one(queries)) for one in each], axis=0))
    assert averaged(each)(queries) == pytest.approx(expected)


def test_the_slopes_of_a_scale_are_those_of_finite_differences() -> None:
    # The median is not in the middle, so that the first scale has a compressed part too.
    results = np.concatenate([np.linspace(-12.0, 1.0, 20_001), np.full(20_001, 0.5)])
    for scale in scales(results, 3.0, SOFTNESSES):
        targets, slopes = scale.targets[:20_001], np.exp(scale.log_slopes[:20_001])
        measured = np.diff(targets) / np.diff(results[:20_001])
        np.testing.assert_allclose(measured, (slopes[1:] + slopes[:-1]) / 2, rtol=1e-3)


NOISES = np.random.default_rng(3).standard_normal((5, 40))


@pytest.mark.long
@pytest.mark.parametrize(
    ("results", "least", "most"),
    [
        ([-np.exp(-10.0 * bowl(BOWL_AT))], 1, 1),
        ([BOWL_AT @ [1.0, 2.0]], 0, 0),
        ([-np.exp(-10.0 * bowl(BOWL_AT) + 0.3 * noise) for noise in NOISES], 5, 5),
        ([bowl(BOWL_AT) + 0.2 * noise for noise in NOISES], 0, 1),
    ],
    ids=["over powers of ten", "a plane", "noise in proportion", "constant noise"],
)
def test_which_results_are_warped(results: list[np.ndarray], least: int, most: int) -> None:
    options = ModelOptions(softnesses=SOFTNESSES)
    warped = sum(FittedModel(BOWL_AT, each, np.arange(2), options).state.scale > 0 for each in results)
    assert least <= warped <= most
