"""The searchers that are compared: the peers need `pip install optuna ax-platform==1.3.1`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from ray.tune.search import Searcher
from ray.tune.search.sample import Categorical, Integer, LogUniform, Quantized
from ray.tune.utils import flatten_dict
from ray.tune.utils.util import unflatten_dict

from horovod_tune.search import BayesOptSearch


class RandomSearch(Searcher):
    """Draws from Tune's domains."""

    def __init__(self, seed: int) -> None:
        super().__init__(metric="loss", mode="min")
        self._generator = np.random.default_rng(seed)

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        self._space = flatten_dict(config)
        return True

    def suggest(self, trial_id: str) -> dict[str, Any]:
        draws = {name: domain.sample(random_state=self._generator) for name, domain in self._space.items()}
        return unflatten_dict(draws)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        pass


class AxSearch(Searcher):
    """Ax 1.x with its own choice of a strategy; Ray's own AxSearch does not run with it."""

    def __init__(self, seed: int) -> None:
        from ax.api.client import Client

        super().__init__(metric="loss", mode="min")
        logging.getLogger("ax").setLevel(logging.ERROR)
        self._client = Client(random_seed=seed)
        self._indices: dict[str, int] = {}

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        self._names = {f"p{i}": name for i, name in enumerate(flatten_dict(config))}
        domains = flatten_dict(config)
        self._client.configure_experiment(
            [_ax_parameter(p, domains[name]) for p, name in self._names.items()]
        )
        self._client.configure_optimization(objective="-loss")
        return True

    def suggest(self, trial_id: str) -> dict[str, Any]:
        [(index, point)] = self._client.get_next_trials(max_trials=1).items()
        self._indices[trial_id] = index
        return unflatten_dict({self._names[short]: value for short, value in point.items()})

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        index = self._indices.pop(trial_id)
        if error or not result:
            self._client.mark_trial_failed(index)
        else:
            self._client.complete_trial(index, raw_data={"loss": float(result["loss"])})


def _ax_parameter(name: str, domain: Any) -> Any:
    from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

    if isinstance(domain, Categorical):
        kind = type(domain.categories[0]).__name__
        return ChoiceParameterConfig(
            name=name, values=domain.categories, parameter_type=kind, is_ordered=False
        )
    step, sampler, integer = None, domain.get_sampler(), isinstance(domain, Integer)
    if isinstance(sampler, Quantized):
        step, sampler = sampler.q, sampler.get_sampler()
    return RangeParameterConfig(
        name=name,
        bounds=(domain.lower, domain.upper - integer),
        parameter_type="int" if integer else "float",
        scaling="log" if isinstance(sampler, LogUniform) else None,
        step_size=step,
    )


def ours(seed: int) -> Searcher:
    return BayesOptSearch(metric="loss", mode="min", random_state=seed)


def _optuna(seed: int, sampler: str, **arguments: Any) -> Searcher:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = getattr(optuna.samplers, sampler)(seed=seed, **arguments)
    return OptunaSearch(metric="loss", mode="min", sampler=made)


SEARCHERS: dict[str, Callable[[int], Searcher]] = {
    "horovod_tune": ours,
    "ax": AxSearch,
    "optuna_gp": lambda seed: _optuna(seed, "GPSampler"),
    "optuna_tpe": lambda seed: _optuna(seed, "TPESampler", constant_liar=True, multivariate=True),
    "random": RandomSearch,
}
