"""The searchers that are compared: the peers need `pip install optuna ax-platform==1.3.1`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ray.tune import choice
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.sample import Categorical, Domain, Integer, LogUniform, Quantized
from ray.tune.utils import flatten_dict
from ray.tune.utils.util import unflatten_dict

from horovod_tune.search import BayesOptSearch


def flat_space(space: Mapping[str, Any]) -> dict[str, Domain]:
    """Return the domains by name; those in an option as `optimizer[0]/lr`, as if they always existed."""
    flat = {}
    for name, domain in flatten_dict(dict(space)).items():
        options = getattr(domain, "categories", ())
        flat[name] = domain
        if any(isinstance(option, dict) for option in options):
            flat[name] = choice([str(number) for number in range(len(options))])
            for number, option in enumerate(options):
                inner = {key: each for key, each in option.items() if isinstance(each, Domain)}
                flat |= {f"{name}[{number}]/{key}": each for key, each in inner.items()}
    return flat


def config_of(values: Mapping[str, Any], space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for a value of each domain of `flat_space`."""
    config = {}
    for name, domain in flatten_dict(dict(space)).items():
        config[name] = values[name]
        options = getattr(domain, "categories", ())
        if any(isinstance(option, dict) for option in options):
            chosen = f"{name}[{values[name]}]"
            config[name] = {
                key: values.get(f"{chosen}/{key}", each) for key, each in options[int(values[name])].items()
            }
    return unflatten_dict(config)


class RandomSearch(Searcher):
    """Draws from Tune's domains."""

    def __init__(self, seed: int) -> None:
        super().__init__(metric="loss", mode="min")
        self._generator = np.random.default_rng(seed)

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        self._space, self._flat = config, flat_space(config)
        return True

    def suggest(self, trial_id: str) -> dict[str, Any]:
        draws = {name: domain.sample(random_state=self._generator) for name, domain in self._flat.items()}
        return config_of(draws, self._space)

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
        self._space, domains = config, flat_space(config)
        self._names = {f"p{i}": name for i, name in enumerate(domains)}
        self._client.configure_experiment(
            [_ax_parameter(p, domains[name]) for p, name in self._names.items()]
        )
        self._client.configure_optimization(objective="-loss")
        return True

    def suggest(self, trial_id: str) -> dict[str, Any]:
        [(index, point)] = self._client.get_next_trials(max_trials=1).items()
        self._indices[trial_id] = index
        return config_of({self._names[short]: value for short, value in point.items()}, self._space)

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


class FlatOptuna(OptunaSearch):
    """Optuna's samplers, for which parameters of options always exist."""

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        self._nested = config
        return super().set_search_properties(metric, mode, unflatten_dict(flat_space(config)), **spec)

    def suggest(self, trial_id: str) -> dict[str, Any]:
        return config_of(flatten_dict(super().suggest(trial_id)), self._nested)


def _optuna(seed: int, sampler: str, **arguments: Any) -> Searcher:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = getattr(optuna.samplers, sampler)(seed=seed, **arguments)
    return FlatOptuna(metric="loss", mode="min", sampler=made)


SEARCHERS: dict[str, Callable[[int], Searcher]] = {
    "horovod_tune": ours,
    "ax": AxSearch,
    "optuna_gp": lambda seed: _optuna(seed, "GPSampler"),
    "optuna_tpe": lambda seed: _optuna(seed, "TPESampler", constant_liar=True, multivariate=True),
    "random": RandomSearch,
}
