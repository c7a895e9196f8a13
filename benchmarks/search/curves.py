"""Searches under ASHA on LCBench's learning curves, with workers whose clock is simulated.

The curves are YAHPO Gym's surrogate (Pfisterer et al., 2022; https://github.com/slds-lmu/yahpo_data, folder
`lcbench`, Apache-2.0) of LCBench (Zimmer, Lindauer & Hutter, 2021): funnel-shaped networks on tabular data, 7
hyperparameters, 52 epochs. It is an ONNX file, which is not in this repository, and needs `pip install
onnxruntime`. All schedulers have a grace period of 2 and a reduction factor of 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray import tune
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher

from benchmarks.search.functions import Config
from benchmarks.search.searchers import RandomSearch, ours
from horovod_tune.search import PromotingASHA

EPOCHS, WORKERS = 52, 4
# Regret is measured after as many epochs as this many whole trainings have.
TRAININGS = (5, 10, 20)
# The tasks that the search was developed on: their codes in the surrogate, and the least error in percent of
# 20,000 random points and a local search around the best of them, after 20, 35, 45 or 52 epochs.
TASKS = {
    3945: (34, 0.3417), 7593: (35, 8.3451), 34539: (33, 0.8536), 126025: (1, 0.5289),
    126026: (2, 0.2519), 126029: (3, 0.7200), 146212: (4, 0.8055), 167104: (6, 3.0109),
    167149: (7, 0.5156), 189354: (24, 4.3425), 189862: (25, 4.7725), 189865: (26, 1.0263),
    189866: (27, 5.3039), 189873: (28, 0.7582), 189905: (29, 3.1355), 189906: (30, 4.8197),
}  # fmt: skip
# In the surrogate's order. As in LCBench, weight_decay's axis is not logarithmic.
SPACE = {
    "batch_size": tune.lograndint(16, 513),
    "learning_rate": tune.loguniform(1e-4, 0.1),
    "momentum": tune.uniform(0.1, 0.99),
    "weight_decay": tune.uniform(1e-5, 0.1),
    "num_layers": tune.randint(1, 6),
    "max_units": tune.lograndint(64, 1025),
    "max_dropout": tune.uniform(0.0, 1.0),
}


class Task:
    """One OpenML task: errors are 100 minus the validation accuracy in percent."""

    def __init__(self, model: Path, task: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._code, self.best_error = TASKS[task]

    def curve(self, config: Config) -> tuple[np.ndarray, float]:
        """Return the error after each epoch, shape (epochs,), and the seconds that an epoch takes."""
        values = [float(config[name]) for name in SPACE]
        rows = np.array([[epoch, *values] for epoch in range(1, EPOCHS + 1)], dtype=np.float32)
        codes = np.full((EPOCHS, 1), self._code, dtype=np.int32)
        predicted = self._session.run(None, {"x_cat": codes, "x_cont": rows})[0]
        return 100.0 - predicted[:, 1], max(float(predicted[-1, 0]) / EPOCHS, 1e-3)


class TuneSearch:
    """A searcher of Tune's interface under Tune's ASHA or ours."""

    def __init__(self, searcher: Searcher, scheduler: Callable[..., Any]) -> None:
        searcher.set_search_properties("loss", "min", SPACE)
        arguments: dict[str, Any] = {"metric": "loss", "mode": "min", "time_attr": "training_iteration"}
        self._searcher = searcher
        self._scheduler = scheduler(grace_period=2, reduction_factor=3, max_t=EPOCHS, **arguments)
        self._trials: dict[str, Any] = {}
        # The part of Tune's controller that schedulers use.
        algorithm = SimpleNamespace(is_finished=lambda: False)
        self._controller = SimpleNamespace(search_alg=algorithm, get_trials=lambda: self._trials.values())

    def suggest(self) -> tuple[str, Config]:
        """Return the trial to train next; a paused one has its configuration already."""
        paused = self._scheduler.choose_trial_to_run(self._controller)
        if paused is not None:
            paused.status = "RUNNING"
            return paused.trial_id, {}
        name = f"t{len(self._trials)}"
        config = self._searcher.suggest(name)
        trial = SimpleNamespace(trial_id=name, status="RUNNING", checkpoint="saved", last_result={})
        self._trials[name] = trial
        self._scheduler.on_trial_add(self._controller, trial)
        return name, config

    def report(self, trial: str, epoch: int, error: float, seconds: float) -> str:
        """Record an error, and return Tune's decision."""
        known = self._trials[trial]
        result = {"loss": error, "training_iteration": epoch, "time_total_s": seconds}
        decision = self._scheduler.on_trial_result(self._controller, known, result)
        if decision == TrialScheduler.STOP or epoch == EPOCHS:
            # As in Tune, the searcher receives the last result only in `on_trial_complete`.
            self._scheduler.on_trial_complete(self._controller, known, result)
            self._searcher.on_trial_complete(known.trial_id, result | {"done": True})
            known.status = "TERMINATED"
            return TrialScheduler.STOP
        self._searcher.on_trial_result(known.trial_id, result)
        known.status = "PAUSED" if decision == TrialScheduler.PAUSE else known.status
        return decision


def simulate(task: Task, search: TuneSearch) -> list[float]:
    """Return the regret after the epochs of each of `TRAININGS`: the least error less the task's least.

    Each epoch that a worker trains counts once; a decision takes no time.
    """
    regrets: list[float] = []
    # Trial: its number, its errors, the seconds of an epoch, and the epochs trained.
    trials: dict[str, SimpleNamespace] = {}
    running: list[tuple[float, int, str]] = []
    clock, used, best = 0.0, 0, float("inf")
    while len(regrets) < len(TRAININGS):
        while len(running) < WORKERS:
            name, config = search.suggest()
            if name not in trials:
                errors, seconds = task.curve(config)
                trials[name] = SimpleNamespace(number=len(trials), errors=errors, seconds=seconds, epochs=0)
            heapq.heappush(running, (clock + trials[name].seconds, trials[name].number, name))
        clock, number, name = heapq.heappop(running)
        trial = trials[name]
        error = float(trial.errors[trial.epochs])
        trial.epochs, used, best = trial.epochs + 1, used + 1, min(best, error)
        if used in [EPOCHS * trainings for trainings in TRAININGS]:
            regrets.append(best - task.best_error)
        decision = search.report(name, trial.epochs, error, trial.epochs * trial.seconds)
        if decision == TrialScheduler.CONTINUE and trial.epochs < EPOCHS:
            heapq.heappush(running, (clock + trial.seconds, number, name))
    return regrets


METHODS: Mapping[str, Callable[[int], TuneSearch]] = {
    "horovod_tune_promoting": lambda seed: TuneSearch(ours(seed), PromotingASHA),
    "horovod_tune": lambda seed: TuneSearch(ours(seed), ASHAScheduler),
    "random": lambda seed: TuneSearch(RandomSearch(seed), ASHAScheduler),
}
