"""NePS's bracket optimizers, as `lcbench_budgets.py` drives them.

    pip install neural-pipeline-search==0.17.0 onnxruntime

Needs an environment of its own (Python 3.11); Ray need not be there.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Hashable
from typing import Any

import neps
import numpy as np
import torch
from lcbench import EPOCHS, LOGARITHMIC
from lcbench_clock import Config

# No priors are given, so that PriorBand draws uniformly and around the best configuration. `gp` is NePS's
# variant that turns to a Gaussian process after 5 trainings' epochs. Its ASHA is not here: it promotes trials
# that are still running.
_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "neps_priorband": neps.algorithms.priorband,
    "neps_priorband_gp": lambda space: neps.algorithms.priorband(
        space, bayesian_optimization_kick_in_point=5
    ),
}


class Space(neps.PipelineSpace):
    """The search space of LCBench as NePS's, whose upper bounds are inclusive."""

    batch_size = neps.Integer(16, 512, log=True)
    learning_rate = neps.Float(1e-4, 0.1, log=True)
    momentum = neps.Float(0.1, 0.99)
    weight_decay = neps.Float(1e-5, 0.1, log="weight_decay" in LOGARITHMIC)
    num_layers = neps.Integer(1, 5)
    max_units = neps.Integer(64, 1024, log=True)
    max_dropout = neps.Float(0.0, 1.0)
    # A little less than 52 / 27, so that there are four rungs, which are rounded.
    epochs = neps.FloatFidelity(1.92, EPOCHS)


class NepsPeer:
    """One of NePS's optimizers with its defaults; budgets are 2, 6, 17 and 52 epochs."""

    def __init__(self, method: str, seed: int) -> None:
        logging.getLogger("neps").setLevel(logging.ERROR)
        # NePS draws from the global generators.
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._neps = neps.AskAndTell(_OPTIMIZERS[method](Space()))
        self._asked: dict[Hashable, Any] = {}

    def ask(self) -> tuple[Hashable, Config, int]:
        asked = self._neps.ask()
        # An id has the numbers of a configuration and of its rung: 12_rung_1.
        trial = asked.metadata.id.split("_")[0]
        self._asked[trial] = asked
        return trial, dict(asked.config), round(asked.config["epochs"])

    def tell(self, trial: Hashable, error: float) -> None:
        self._neps.tell(self._asked.pop(trial), error)
