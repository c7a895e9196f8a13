"""Our searcher and Ray's, put through the same suite; an absent extra is named."""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

import pytest
from conformance import METRIC, SearcherConformance, in_mixed_space, mixed_space
from ray.tune.search import Searcher

from horovod_tune import search as package
from horovod_tune.search import BayesOptSearch, MissingExtra

pytestmark = pytest.mark.long


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


@pytest.mark.parametrize(("name", "extra"), [("TuneBOHB", "bohb"), ("HyperOptSearch", "hyperopt")])
def test_a_missing_package_names_its_extra(monkeypatch: Any, name: str, extra: str) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"{name} needs .* `pip install 'horovod_tune\[{extra}\]'`"):
        getattr(package, name)


def bohb() -> Any:
    pytest.importorskip("hpbandster", reason="pip install 'horovod_tune[bohb]'")
    search = package.TuneBOHB(metric=METRIC, mode="min", seed=1)
    assert search.set_search_properties(METRIC, "min", mixed_space())
    return search


def test_bohb_gives_plain_values_and_survives_every_ending() -> None:
    search = bohb()
    endings = [0.5, math.nan, math.inf, None, "text"] * 5
    for number, value in enumerate(endings):
        config = search.suggest(f"t{number}")
        assert in_mixed_space(config) and json.loads(json.dumps(config)) == config
        assert type(config["model"]["activation"]) is str
        result = {"hyperband_info": {"budget": 3}} | ({} if value is None else {METRIC: value})
        search.on_trial_result(f"t{number}", result)
        search.on_trial_complete(f"t{number}", result)
    search.on_trial_result("unknown", {METRIC: 0.1})
    search.on_trial_complete("unknown", {METRIC: 0.1})
