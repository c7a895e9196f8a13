"""What any Tune searcher has to honour, ours and Ray's: a suite to inherit, as the training loop sees it.

A subclass named `Test...` defines how to make its searcher, and which promises it does not make.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import pytest
from ray import tune
from ray.tune.search import ConcurrencyLimiter, Searcher

from horovod_tune.search import BayesOptSearch

#: A configuration's reports: one of `METRIC`, one of several metrics, or a tuple of these in their order;
#: an exception for a trial that fails.
Outcome = Any
METRIC = "loss"


def searcher(seed: int = 1, **arguments: Any) -> BayesOptSearch:
    return BayesOptSearch(metric=METRIC, mode="min", random_state=seed, **arguments)


def mixed_space() -> dict[str, Any]:
    return {
        "lr": tune.loguniform(1e-5, 1e-1),
        "momentum": tune.uniform(0.0, 0.99),
        "layers": tune.randint(1, 6),
        "model": {"activation": tune.choice(["relu", "tanh"]), "constant": 7},
    }


def loss(config: dict[str, Any]) -> float:
    penalty = 0.3 if config["model"]["activation"] == "tanh" else 0.0
    return (math.log10(config["lr"]) + 3) ** 2 + (config["momentum"] - 0.9) ** 2 + penalty


def in_mixed_space(config: dict[str, Any]) -> bool:
    return (
        isinstance(config["lr"], float)
        and isinstance(config["layers"], (int, np.integer))
        and 1e-5 <= config["lr"] <= 1e-1
        and 0.0 <= config["momentum"] <= 0.99
        and config["layers"] in range(1, 6)
        and config["model"]["activation"] in ("relu", "tanh")
    )


class Loop:
    """The part of Tune that talks to a searcher, with trials that are plain function calls."""

    def __init__(
        self,
        searcher: Searcher,
        space: dict[str, Any] | None,
        in_flight: int = 4,
        report: dict[str, Any] | None = None,
    ) -> None:
        self.searcher = ConcurrencyLimiter(searcher, max_concurrent=in_flight)
        if space is not None:
            assert self.searcher.set_search_properties(None, None, space)
        self.live: dict[str, dict[str, Any]] = {}
        self.configs: list[dict[str, Any]] = []
        self._started = 0
        self._report = {"training_iteration": 1} | (report or {})

    def start(self) -> dict[str, Any] | None:
        """Ask for one more configuration, as Tune does whenever it could start a trial."""
        config = self.searcher.suggest(f"trial{self._started}")
        if config is None or config == Searcher.FINISHED:
            return None
        self.live[f"trial{self._started}"] = config
        self._started += 1
        self.configs.append(config)
        return config

    def end(self, trial_id: str, outcome: Outcome = None) -> None:
        self.live.pop(trial_id)
        if isinstance(outcome, Exception):
            self.searcher.on_trial_complete(trial_id, error=True)
            return
        for value in outcome if isinstance(outcome, tuple) else (outcome,):
            report = value if isinstance(value, dict) else {} if value is None else {METRIC: value}
            self.searcher.on_trial_result(trial_id, self._report | report)
        self.searcher.on_trial_complete(trial_id, self._report | report | {"done": True})

    def run(self, trials: int, evaluate: Callable[[dict[str, Any]], Outcome] = loss) -> list[dict[str, Any]]:
        """Run until `trials` have ended, the oldest but one first where several are in flight."""
        idle = 0
        while self._started < trials or self.live:
            if self._started < trials and self.start() is not None:
                idle = 0
                continue
            if not self.live:
                idle += 1
                assert idle < 100, f"stalled after {self._started} of {trials} trials"
                continue
            trial_id = list(self.live)[min(1, len(self.live) - 1)]
            self.end(trial_id, evaluate(self.live[trial_id]))
        return self.configs


class SearcherConformance(ABC):
    """Inherit this as `Test<Searcher>`."""

    #: How the last ten losses of thirty compare with the first ten, at most.
    improvement = 0.5
    #: What a scheduler that the searcher needs adds to each report.
    report: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def make(self, seed: int = 1) -> Searcher:
        """Return a new searcher that minimises `METRIC`."""

    def loop(self, seed: int = 1, in_flight: int = 4) -> Loop:
        return Loop(self.make(seed), mixed_space(), in_flight, self.report)

    @pytest.fixture(scope="class")
    def searches(self, request: Any) -> list[list[dict[str, Any]]]:
        """The configurations of three searches of 30 trials, with the seeds 0, 1 and 2."""
        return [request.cls().loop(seed).run(30) for seed in range(3)]

    def test_every_suggestion_is_in_the_space(self, searches: list[list[dict[str, Any]]]) -> None:
        for config in chain(*searches):
            assert in_mixed_space(config), config

    def test_it_learns(self, searches: list[list[dict[str, Any]]]) -> None:
        early = [loss(config) for configs in searches for config in configs[:10]]
        late = [loss(config) for configs in searches for config in configs[-10:]]
        assert np.median(late) < self.improvement * np.median(early)

    def test_the_same_seed_gives_the_same_suggestions(self, searches: list[list[dict[str, Any]]]) -> None:
        assert self.loop(2).run(15) == searches[2][:15]
        assert searches[1][:15] != searches[2][:15]

    def test_all_trials_are_started_whatever_becomes_of_them(self) -> None:
        endings = iter([1.0, RuntimeError("crash"), 0.5, 2.0, RuntimeError("crash")] * 4)
        assert len(self.loop().run(20, lambda config: next(endings))) == 20

    def test_a_run_of_nothing_but_failures_continues(self) -> None:
        loop = self.loop()
        assert len(loop.run(20, lambda config: RuntimeError("crash"))) == 20

    def test_points_in_flight_differ(self) -> None:
        loop = self.loop(in_flight=8)
        loop.run(16)
        together = [loop.start() for _ in range(8)]
        assert len({str(config) for config in together}) == 8

    def test_a_restored_search_continues(self, tmp_path: Any) -> None:
        loop = self.loop(in_flight=1)
        loop.run(12)
        loop.searcher.save(str(tmp_path / "state"))
        resumed = self.loop(in_flight=1)
        resumed.searcher.restore(str(tmp_path / "state"))
        resumed._started = 12
        for config in resumed.run(15):
            assert in_mixed_space(config)
