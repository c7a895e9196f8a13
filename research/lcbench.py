"""LCBench as functions to search: a surrogate's learning curves of funnel-shaped networks on tabular data.

The surrogate is YAHPO Gym's (Pfisterer et al., 2022; https://github.com/slds-lmu/yahpo_data, folder
`lcbench`, Apache-2.0), an ONNX file of LCBench (Zimmer, Lindauer & Hutter, 2021): 7 hyperparameters, 52
epochs, 34 OpenML tasks. It is not in this repository; programs take its path and need `pip install
onnxruntime`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

EPOCHS = 52
#: The tasks that the search is developed on, with their codes in the surrogate. Others are for evaluation.
TASKS = {
    3945: 34, 7593: 35, 34539: 33, 126025: 1, 126026: 2, 126029: 3, 146212: 4, 167104: 6, 167149: 7,
    189354: 24, 189862: 25, 189865: 26, 189866: 27, 189873: 28, 189905: 29, 189906: 30,
}  # fmt: skip
#: The hyperparameters in the surrogate's order.
NAMES = (
    "batch_size",
    "learning_rate",
    "momentum",
    "weight_decay",
    "num_layers",
    "max_units",
    "max_dropout",
)
#: Those searched on a log scale. As in LCBench's own search space, `weight_decay` is not one of them.
LOGARITHMIC = {"batch_size", "learning_rate", "max_units"}
_TIME, _ACCURACY = 0, 1


def space() -> dict[str, Any]:
    """Return the search space of LCBench as Tune's domains."""
    from ray import tune  # here, as peers run this file in environments without Ray

    decay = tune.loguniform if "weight_decay" in LOGARITHMIC else tune.uniform
    return {
        "batch_size": tune.lograndint(16, 513),
        "learning_rate": tune.loguniform(1e-4, 0.1),
        "momentum": tune.uniform(0.1, 0.99),
        "weight_decay": decay(1e-5, 0.1),
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
        self._code, self.task = TASKS[task], task

    def _evaluate(self, rows: np.ndarray) -> np.ndarray:
        codes = np.full((len(rows), 1), self._code, dtype=np.int32)
        return self._session.run(None, {"x_cat": codes, "x_cont": rows.astype(np.float32)})[0]

    def curve(self, config: dict[str, Any]) -> tuple[np.ndarray, float]:
        """Return the error after each epoch, shape (epochs,), and the seconds that an epoch takes."""
        values = [float(config[name]) for name in NAMES]
        found = self._evaluate(np.array([[epoch, *values] for epoch in range(1, EPOCHS + 1)]))
        return 100.0 - found[:, _ACCURACY], max(float(found[-1, _TIME]) / EPOCHS, 1e-3)

    @cached_property
    def best_error(self) -> float:
        """The smallest error that was found."""
        return self.least_error((20, 35, 45, EPOCHS))

    def least_error(self, epochs: Sequence[int]) -> float:
        """Return the least error after any of `epochs`, by 20,000 random points and a local search."""
        generator = np.random.default_rng(self.task)
        low = np.array([np.log(16), np.log(1e-4), 0.1, 1e-5, 1, np.log(64), 0.0])
        high = np.array([np.log(512), np.log(0.1), 0.99, 0.1, 5, np.log(1024), 1.0])

        def errors(points: np.ndarray) -> np.ndarray:
            rows = low + points * (high - low)
            rows[:, [0, 1, 5]] = np.exp(rows[:, [0, 1, 5]])
            rows[:, [0, 4, 5]] = np.rint(rows[:, [0, 4, 5]])
            at = [np.column_stack([np.full(len(rows), epoch), rows]) for epoch in epochs]
            return np.min([100.0 - self._evaluate(r)[:, _ACCURACY] for r in at], axis=0)

        # Half of them crowd at the ends of the axes, where optima of axes that should be logarithmic lie.
        points = generator.random((20_000, 7))
        points[:5_000] **= 6
        points[5_000:10_000, :] = np.where(
            generator.random((5_000, 7)) < 0.5, points[5_000:10_000] ** 6, 1 - points[5_000:10_000] ** 6
        )
        found = errors(points)
        for spread in (0.1, 0.05, 0.02, 0.01, 0.005):
            best = points[np.argsort(found)[:50]]
            steps = spread * generator.standard_normal((40, 50, 7))
            near = np.clip(best + steps, 0, 1).reshape(-1, 7)
            points, found = np.concatenate([best, near]), np.concatenate([np.sort(found)[:50], errors(near)])
        return float(found.min())
