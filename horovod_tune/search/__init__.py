"""Searchers for Tune; `BayesOptSearch` is Bayesian optimisation on bayesian-optimization 3.x.

`TuneBOHB` (a subclass of Ray's) and Ray's own `HyperOptSearch` and `OptunaSearch` need the extras
`bohb`, `hyperopt` and `optuna`; each is imported on first use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import horovod_tune.creator  # noqa: F401 - for the hint to a function that is passed to Tune without it
from horovod_tune.errors import HorovodTuneError
from horovod_tune.search.bayesopt import BayesOptSearch
from horovod_tune.search.gp.acquisition import LogExpectedImprovement
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

#: Searcher: the module it comes from, the packages it needs, and the extra of horovod_tune that has them.
_OPTIONAL = {
    "TuneBOHB": ("horovod_tune.search.bohb", ("hpbandster", "ConfigSpace"), "bohb"),
    "HyperOptSearch": ("ray.tune.search.hyperopt", ("hyperopt",), "hyperopt"),
    "OptunaSearch": ("ray.tune.search.optuna", ("optuna",), "optuna"),
}


class MissingExtra(HorovodTuneError, ImportError):
    """A searcher's package is not installed; the message names the extra to install."""


def __getattr__(name: str) -> Any:
    if name not in _OPTIONAL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, packages, extra = _OPTIONAL[name]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(
            f"{name} needs {' and '.join(missing)} to be installed: `pip install 'horovod_tune[{extra}]'`"
        )
    return getattr(import_module(module), name)
