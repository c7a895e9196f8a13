"""Ax 1.x behind Tune's searcher API; Ray's own AxSearch does not run with it."""

from __future__ import annotations

import logging
from typing import Any

from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ray.tune.search import Searcher
from ray.tune.search.sample import Categorical, Integer, LogUniform, Quantized
from ray.tune.utils import flatten_dict
from ray.tune.utils.util import unflatten_dict


class AxClientSearch(Searcher):
    """Ax with its own choice of a generation strategy: Sobol, then BoTorch."""

    def __init__(self, seed: int) -> None:
        super().__init__(metric="loss", mode="min")
        logging.getLogger("ax").setLevel(logging.ERROR)
        self._client = Client(random_seed=seed)
        self._indices: dict[str, int] = {}

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        self._names = {f"p{i}": name for i, name in enumerate(flatten_dict(config))}
        parameters = [_parameter(short, flatten_dict(config)[name]) for short, name in self._names.items()]
        self._client.configure_experiment(parameters)
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


def _parameter(name: str, domain: Any) -> RangeParameterConfig | ChoiceParameterConfig:
    sampler = domain.get_sampler()
    if isinstance(domain, Categorical):
        kind = {bool: "bool", int: "int", float: "float", str: "str"}[type(domain.categories[0])]
        return ChoiceParameterConfig(
            name=name, values=domain.categories, parameter_type=kind, is_ordered=False
        )
    step = None
    if isinstance(sampler, Quantized):
        step, sampler = sampler.q, sampler.get_sampler()
    integer = isinstance(domain, Integer)
    return RangeParameterConfig(
        name=name,
        bounds=(domain.lower, domain.upper - integer),
        parameter_type="int" if integer else "float",
        scaling="log" if isinstance(sampler, LogUniform) else None,
        step_size=step,
    )
