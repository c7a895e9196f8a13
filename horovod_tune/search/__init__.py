"""Searchers for Tune; `BayesOptSearch` is Bayesian optimisation on bayesian-optimization 3.x.

`TuneBOHB`, `HyperOptSearch` and `OptunaSearch` are Ray's and need the extras
`bohb`, `hyperopt` and `optuna`; each is imported on first use.
"""

from typing import Any

from horovod_tune.search.bayesopt import BayesOptSearch
from horovod_tune.search.gp.acquisition import LogExpectedImprovement
from horovod_tune.search.optional import OPTIONAL, MissingExtra, load
from horovod_tune.search.promoting_asha import PromotingASHA
from horovod_tune.search.scaling_space import large_batch_space
from horovod_tune.search.space.domains import SpaceError
from horovod_tune.search.state_file import StateFileError
from horovod_tune.search.worker_allocation import DistributeByGlobalBatch, DistributeByNoiseScale

__all__ = [
    "BayesOptSearch",
    "DistributeByGlobalBatch",
    "DistributeByNoiseScale",
    "LogExpectedImprovement",
    "MissingExtra",
    "PromotingASHA",
    "SpaceError",
    "StateFileError",
    "large_batch_space",
]


def __getattr__(name: str) -> Any:
    if name in OPTIONAL:
        return load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
