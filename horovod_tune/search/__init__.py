"""Searchers for Tune; `BayesOptSearch` is Bayesian optimisation on bayesian-optimization 3.x."""

from horovod_tune.search.acquisition import LogExpectedImprovement
from horovod_tune.search.bayesopt import BayesOptSearch
from horovod_tune.search.space import SpaceError
from horovod_tune.search.state_file import StateFileError

__all__ = ["BayesOptSearch", "LogExpectedImprovement", "SpaceError", "StateFileError"]
