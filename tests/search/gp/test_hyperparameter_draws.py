"""Draws of hyperparameters, and the acquisition that is averaged over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import logsumexp

from horovod_tune.search.gp.acquisition import LogExpectedImprovement
from horovod_tune.search.gp.fit import MarginalLikelihood, Priors, draws
from horovod_tune.search.gp.fitted_model import FittedModel, ModelOptions
from horovod_tune.search.gp.posterior import AveragedAcquisition, Posterior


class Normal:
    """A likelihood that is normal around 2 with variance 1, with a standard normal prior."""

    means, stds = np.zeros(3), np.ones(3)

    def log_likelihood(self, theta: np.ndarray) -> float:
        return -0.5 * float(np.square(theta - 2.0).sum())


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


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("noise", [None, 0.1])
def test_the_likelihood_alone_is_the_posterior_without_the_prior(timed: bool, noise: float | None) -> None:
    generator = np.random.default_rng(3)
    features, targets = generator.random((20, 3)), generator.standard_normal(20)
    task = generator.standard_normal(20)
    objective = MarginalLikelihood(features, targets, np.arange(3), Priors(), noise, timed, task)
    size = len(objective.bounds)
    differences = []
    for _ in range(5):
        theta = 0.5 * generator.standard_normal(size)
        theta[4] -= 2.0
        standard = (theta - objective.means) / objective.stds
        alone = -objective(theta)[0] + 0.5 * standard @ standard
        differences.append(objective.log_likelihood(theta) - alone)
    assert differences == pytest.approx([0.0] * 5, abs=1e-8)
    assert objective.log_likelihood(np.full(size, 50.0)) == -np.inf


def fitted(**options: object) -> FittedModel:
    generator = np.random.default_rng(1)
    features = generator.random((12, 3))
    targets = np.sin(5 * features[:, 0]) + 0.1 * generator.standard_normal(12)
    return FittedModel(features, targets, np.arange(3), replace(ModelOptions(), **options))  # type: ignore[arg-type]


def test_drawn_models_are_the_most_probable_one_and_others_always_the_same() -> None:
    model = fitted()
    first, second = model.drawn(4, seed=7), model.drawn(4, seed=7)
    assert first[0] is model
    lengths = [each.covariance.hyperparameters.lengths.tolist() for each in first]  # type: ignore[attr-defined]
    assert lengths == [each.covariance.hyperparameters.lengths.tolist() for each in second]  # type: ignore[attr-defined]
    assert len({tuple(each) for each in lengths}) > 1
    assert all(np.array_equal(each.targets, model.targets) for each in first)
    # 12 results do not tell how long an idle parameter's scale is.
    many = [each.covariance.hyperparameters.lengths for each in model.drawn(40, seed=7)]  # type: ignore[attr-defined]
    spread = np.log(many).std(axis=0)
    assert spread[1] > spread[0]


def posteriors() -> list[Posterior]:
    pending = np.array([[0.5, 0.5, 0.5]])
    return [
        Posterior(each, pending, None, LogExpectedImprovement(), 0, draw_results=False)
        for each in fitted().drawn(3, seed=2)
    ]


def test_the_average_is_that_of_the_expectations_not_of_their_logarithms() -> None:
    each, queries = posteriors(), np.random.default_rng(4).random((6, 3))
    expected = logsumexp([one(queries) for one in each], axis=0) - np.log(3)
    assert AveragedAcquisition(each)(queries) == pytest.approx(expected)
    assert AveragedAcquisition(each[:1])(queries) == pytest.approx(each[0](queries))
    assert AveragedAcquisition(each).means(queries) == pytest.approx(
        np.mean([p.means(queries) for p in each], axis=0)
    )


def test_the_averages_gradient_is_that_of_finite_differences() -> None:
    belief, query = AveragedAcquisition(posteriors()), np.array([0.3, 0.6, 0.2])
    value, slope = belief.with_slope(query)
    assert value == pytest.approx(float(belief(query[None, :])[0]))
    steps = 1e-5 * np.eye(3)
    measured = [float((belief((query + s)[None, :]) - belief((query - s)[None, :]))[0] / 2e-5) for s in steps]
    assert slope == pytest.approx(measured, rel=1e-4, abs=1e-6)
