"""The earlier task's kernel: slopes, weight, and what the fit makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import check_grad

from horovod_tune.search.gp.earlier_task import EarlierTask, TransferCovariance
from horovod_tune.search.gp.fit import MarginalLikelihood, Priors
from horovod_tune.search.gp.fitted_model import FittedModel, ModelOptions
from horovod_tune.search.gp.kernels import Hyperparameters, MaternCovariance

GROUPS = np.arange(2)


def bowl(points: np.ndarray) -> np.ndarray:
    return -np.square(points[:, :2] - 0.4).sum(1)


def earlier_task(timed: bool = False) -> EarlierTask:
    points = np.random.default_rng(0).random((30, 3 if timed else 2))
    groups = np.arange(points.shape[1])
    model = FittedModel(points, bowl(points), groups, ModelOptions(), timed=timed)
    return EarlierTask(model.condition(), 2, np.array([0.7]) if timed else np.empty(0))


@pytest.mark.parametrize("timed", [False, True])
def test_slopes_are_those_of_the_covariance(timed: bool) -> None:
    task = earlier_task(timed=True)
    columns = 3 if timed else 2
    own = MaternCovariance(Hyperparameters(np.full(columns, 0.5), 1.0, 1e-3), np.arange(columns), timed=timed)
    covariance = TransferCovariance(own, task)
    points = np.random.default_rng(1).random((7, columns))
    query = np.full(columns, 0.3)
    found, jacobian, prior, prior_slope = covariance.slopes(query, points)
    assert found == pytest.approx(covariance.between(query[None], points)[0])
    assert prior == pytest.approx(covariance.variance(query[None])[0])
    for feature in range(2):
        step = np.zeros(columns)
        step[feature] = 1e-5
        ahead, behind = (query + step)[None], (query - step)[None]
        across = covariance.between(ahead, points) - covariance.between(behind, points)
        assert jacobian[:, feature] == pytest.approx(across[0] / 2e-5, abs=1e-5)
        own_slope = (covariance.variance(ahead) - covariance.variance(behind))[0] / 2e-5
        assert prior_slope[feature] == pytest.approx(own_slope, abs=1e-5)


def test_the_gradient_of_the_likelihood_holds_beside_an_earlier_task() -> None:
    points = np.random.default_rng(2).random((20, 2))
    values = bowl(points)
    task = earlier_task()(points)
    objective = MarginalLikelihood(
        points, (values - values.mean()) / values.std(), GROUPS, Priors(), None, task=task
    )
    for theta in objective.starts()[:3]:
        error = check_grad(lambda t: objective(t)[0], lambda t: objective(t)[1], theta, epsilon=1e-6)
        assert error < 1e-3 * (1 + np.linalg.norm(objective(theta)[1]))


@pytest.mark.parametrize("weight", [2.0, -1.0, 0.0])
def test_few_results_tell_the_weight(weight: float) -> None:
    """Far from the results the process is the earlier task's shape, with the weight that the results show."""
    task = earlier_task()
    here = np.array([[0.1, 0.2], [0.4, 0.45], [0.8, 0.3], [0.2, 0.9], [0.55, 0.6], [0.9, 0.9]])
    model = FittedModel(here, 5.0 + 3.0 * weight * bowl(here), GROUPS, ModelOptions(), task=task)
    there = np.array([[0.4, 0.4], [0.0, 1.0], [1.0, 0.0]])
    means = model.condition().predict(there)[0][:, 0] * model.scale + model.offset
    truth = 5.0 + 3.0 * weight * bowl(there)
    assert means == pytest.approx(truth, abs=0.15 * np.ptp(3.0 * bowl(there)))


def test_an_earlier_task_without_a_shape_changes_nothing() -> None:
    points = np.random.default_rng(3).random((20, 2))
    flat = FittedModel(points, np.ones(20), GROUPS, ModelOptions())
    task = EarlierTask(flat.condition(), 2, np.empty(0))
    alone = FittedModel(points, bowl(points), GROUPS, ModelOptions())
    beside = FittedModel(points, bowl(points), GROUPS, ModelOptions(), task=task)
    queries = np.random.default_rng(4).random((5, 2))
    for ours, theirs in zip(
        beside.condition().predict(queries), alone.condition().predict(queries), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
