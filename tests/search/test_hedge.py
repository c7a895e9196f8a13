"""bayesian-optimization's `GPHedge`, with trials in flight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bayes_opt.acquisition import ExpectedImprovement, GPHedge, UpperConfidenceBound
from conformance import METRIC, Loop
from ray import tune

from horovod_tune.search import BayesOptSearch
from horovod_tune.search.acquisition import portfolio_of
from horovod_tune.search.belief import FittedModel, ModelOptions
from horovod_tune.search.hedge import draw, gains_of
from horovod_tune.search.history import Ending, History, Trial
from horovod_tune.search.space import SearchSpace

SPACE = {"x": tune.uniform(0, 1), "y": tune.uniform(0, 1)}


def bowl(config: dict[str, Any]) -> float:
    return (config["x"] - 0.3) ** 2 + (config["y"] - 0.6) ** 2


class Worst(UpperConfidenceBound):
    """Looks for the worst point."""

    def base_acq(self, mean: Any, std: Any) -> Any:
        return -mean


def searcher(*members: Any, seed: int = 1) -> BayesOptSearch:
    hedge = GPHedge(members or [UpperConfidenceBound(), ExpectedImprovement(0.01)])
    return BayesOptSearch(metric=METRIC, mode="min", random_state=seed, acquisition_function=hedge)


def test_a_function_gains_what_the_model_thinks_of_its_candidates() -> None:
    space = SearchSpace(SPACE)
    points = np.random.default_rng(0).random((12, 2))
    model = FittedModel(points, -np.square(points - [0.3, 0.6]).sum(1), np.arange(2), ModelOptions())
    good, bad = (0.3, 0.6), (0.9, 0.1)
    history = History()
    for name, ending in [
        ("a", Ending.SCORED),
        ("b", Ending.FAILED),
        ("c", Ending.RUNNING),
        ("d", Ending.SCORED),
    ]:
        history.add(Trial(name, good, ending, candidates=(good, bad) if name != "d" else ()))
    hedge = GPHedge([UpperConfidenceBound(), ExpectedImprovement(0.0)])
    hedge.gains = np.array([0.0, 0.5])
    means = model.condition().predict(np.array([good, bad]))[0][:, 0]
    # Two rounds have ended; one is in flight, and one was before the model took over.
    expected = [2 * means[0], 0.5 + 2 * means[1]]
    assert gains_of(portfolio_of(hedge, None), model, space, history) == pytest.approx(expected)


def test_the_choice_is_drawn_from_the_softmax_of_the_gains() -> None:
    drawn = Counter(draw(np.log([1.0, 3.0]) + 700.0, seed) for seed in range(2000))
    assert drawn[1] / 2000 == pytest.approx(0.75, abs=0.03)


def test_the_function_with_the_better_candidates_is_followed() -> None:
    search = searcher(Worst(), ExpectedImprovement(0.01))
    Loop(search, SPACE).run(30, bowl)
    rounds = [trial for trial in search._history.trials.values() if trial.candidates]
    assert len(rounds) >= 20 and all(len(trial.candidates) == 2 for trial in rounds)
    followed = [trial.candidates.index(trial.point) for trial in rounds]
    assert sum(followed[-15:]) >= 14


def test_in_flight_the_order_of_endings_does_not_matter_and_no_point_repeats() -> None:
    searches = [searcher(), searcher()]
    for search, order in zip(searches, (1, -1), strict=True):
        search.set_search_properties(METRIC, "min", SPACE)
        for _ in range(4):
            live = {}
            for _ in range(4):
                trial_id = f"t{len(search._history.trials)}"
                live[trial_id] = search.suggest(trial_id)
            for trial_id in list(live)[::order]:
                search.on_trial_complete(trial_id, {METRIC: bowl(live[trial_id])})
    points = [[trial.point for trial in search._history.trials.values()] for search in searches]
    assert points[0] == points[1] and len(set(points[0])) == 16


def test_a_restored_search_goes_on_with_the_same_gains(tmp_path: Path) -> None:
    loop = Loop(searcher(), SPACE)
    loop.run(14, bowl)
    loop.start(), loop.start()
    loop.searcher.save(str(tmp_path / "s"))
    other = searcher(seed=9)
    other.set_search_properties(METRIC, "min", SPACE)
    other.restore(str(tmp_path / "s"))
    original = loop.searcher.searcher
    for search in (original, other):
        search.on_trial_complete("trial15", {METRIC: 0.01})
    assert other._history == original._history
    assert [other.suggest(str(i)) for i in range(3)] == [original.suggest(str(i)) for i in range(3)]
