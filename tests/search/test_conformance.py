"""Our searcher and Ray's, put through the same suite."""

from __future__ import annotations

from typing import ClassVar

import pytest
from conformance import METRIC, SearcherConformance
from ray.tune.search import Searcher

from horovod_tune.search import BayesOptSearch


class TestBayesOptSearch(SearcherConformance):
    def make(self, seed: int = 1) -> Searcher:
        return BayesOptSearch(metric=METRIC, mode="min", random_state=seed)


class TestHyperOptSearch(SearcherConformance):
    improvement = 0.9

    def make(self, seed: int = 1) -> Searcher:
        pytest.importorskip("hyperopt", reason="pip install horovod_tune[hyperopt]")
        from horovod_tune.search import HyperOptSearch

        return HyperOptSearch(metric=METRIC, mode="min", random_state_seed=seed, n_initial_points=8)


class TestOptunaSearch(SearcherConformance):
    improvement = 0.9

    def make(self, seed: int = 1) -> Searcher:
        optuna = pytest.importorskip("optuna", reason="pip install horovod_tune[optuna]")
        from horovod_tune.search import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return OptunaSearch(metric=METRIC, mode="min", seed=seed)


class TestTuneBOHB(SearcherConformance):
    improvement = 0.9
    report: ClassVar = {"hyperband_info": {"budget": 9}}

    def make(self, seed: int = 1) -> Searcher:
        pytest.importorskip("hpbandster", reason="pip install horovod_tune[bohb]")
        from horovod_tune.search import TuneBOHB

        return TuneBOHB(metric=METRIC, mode="min", seed=seed)
