"""SMAC's multi-fidelity facade, as `lcbench_budgets.py` drives it: Hyperband, with random forests.

    pip install smac==2.4.1 onnxruntime

Needs an environment of its own (Python 3.11); Ray need not be there. Set PYTHONHASHSEED=0: a seed alone does
not make its runs repeatable.
"""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from typing import Any

from ConfigSpace import ConfigurationSpace, Float, Integer
from lcbench import EPOCHS, LOGARITHMIC
from lcbench_clock import Config
from smac import MultiFidelityFacade, Scenario
from smac.runhistory import TrialInfo, TrialValue

# As many trials as fit into 20 trainings' epochs; SMAC draws the first quarter of them at random, 70 at most.
_TRIALS = 100


def space(seed: int) -> ConfigurationSpace:
    """Return the search space of LCBench as SMAC's, whose upper bounds are inclusive."""
    space = ConfigurationSpace(seed=seed)
    space.add(
        Integer("batch_size", (16, 512), log=True),
        Float("learning_rate", (1e-4, 0.1), log=True),
        Float("momentum", (0.1, 0.99)),
        Float("weight_decay", (1e-5, 0.1), log="weight_decay" in LOGARITHMIC),
        Integer("num_layers", (1, 5)),
        Integer("max_units", (64, 1024), log=True),
        Float("max_dropout", (0.0, 1.0)),
    )
    return space


class SmacPeer:
    """SMAC with its defaults; budgets are 2, 6, 17 and 52 epochs."""

    def __init__(self, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        scenario = Scenario(
            space(seed),
            output_directory=self._folder.name,  # type: ignore[arg-type]
            deterministic=True,
            n_trials=_TRIALS,
            # A little less than 52 / 27, so that there are four rungs despite rounding.
            min_budget=1.92,
            max_budget=EPOCHS,
            seed=seed,
        )
        self._smac = MultiFidelityFacade(scenario, _not_called, overwrite=True, logging_level=False)
        self._asked: dict[Hashable, TrialInfo] = {}

    def ask(self) -> tuple[Hashable, Config, int]:
        info = self._smac.ask()
        config: dict[str, Any] = dict(info.config)
        trial = tuple(config.values())
        self._asked[trial] = info
        return trial, config, round(info.budget or EPOCHS)

    def tell(self, trial: Hashable, error: float) -> None:
        self._smac.tell(self._asked.pop(trial), TrialValue(cost=error), save=False)


def _not_called(config: Any, seed: int, budget: float) -> float:
    raise AssertionError("SMAC must not run trials itself: it is used through ask() and tell()")
