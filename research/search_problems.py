"""The functions that `search_quality.py` searches: their spaces, their optima and what makes them hard.

All are minimised. `CHOSEN_ON` were used to choose the method, `HELD_OUT` were not, except that
`digits_table`, with other seeds, was used to choose the scales of `horovod_tune.search.gp.fitted_model`.
`AS_WRITTEN` came after the method: spaces and metrics as users write them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune

Config = dict[str, Any]
TABLE = Path(__file__).parent / "results" / "search_table.csv"


class TrialFailed(Exception):
    """The function cannot be evaluated here, like a training that runs out of memory."""


@dataclass(frozen=True)
class Problem:
    """A function to minimise; `true_value` is without noise and raises `TrialFailed` if it fails."""

    name: str
    kind: str
    space: Callable[[], Config]
    true_value: Callable[[Config], float]
    optimum: float
    noise: float = 0.0
    in_flight: int = 4
    #: The standard deviation of the noise at a configuration, if it is not `noise` everywhere.
    noise_at: Callable[[Config], float] | None = None
    #: The space for searchers that accept no domains within a choice: all parameters side by side.
    flat_space: Callable[[], Config] | None = None

    def observe(self, config: Config, generator: np.random.Generator) -> float:
        noise = self.noise if self.noise_at is None else self.noise_at(config)
        return self.true_value(config) + noise * float(generator.standard_normal())


def _box(dimension: int, low: float, high: float) -> Callable[[], Config]:
    return lambda: {f"x{i}": tune.uniform(low, high) for i in range(dimension)}


def _vector(config: Config) -> np.ndarray:
    return np.array([config[f"x{i}"] for i in range(len(config))])


def branin(config: Config) -> float:
    x, y = config["x0"], config["x1"]
    bowl = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6) ** 2
    return bowl + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


_H6_A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
_H6_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)
_H_ALPHA = np.array([1.0, 1.2, 3.0, 3.2])


def hartmann6(config: Config) -> float:
    x = _vector(config)
    return -float(_H_ALPHA @ np.exp(-(_H6_A * (x - _H6_P) ** 2).sum(axis=1)))


def lr_valley(config: Config) -> float:
    """A validation loss by learning rate, weight decay and momentum; beyond the edge it explodes."""
    effective = math.log10(config["lr"] / (1 - config["momentum"]))
    decay = math.log10(config["weight_decay"])
    loss = 0.2 + 0.15 * (effective + 1.3) ** 2 + 0.02 * (decay + 4 + 0.5 * effective) ** 2
    return loss + (5.0 * (effective - 0.2) if effective > 0.2 else 0.0)


def mixed_network(config: Config) -> float:
    """Depth, width, an activation, and an optimizer, on which the best learning rate depends."""
    best_lr = {"sgd": -1.0, "adam": -3.0, "rmsprop": -3.5}[config["optimizer"]]
    floor = {"sgd": 0.08, "adam": 0.0, "rmsprop": 0.05}[config["optimizer"]]
    act = {"relu": 0.0, "tanh": 0.06, "gelu": 0.02, "sigmoid": 0.3}[config["activation"]]
    depth = 0.03 * (config["layers"] - 4) ** 2 * (0.5 if config["skip"] else 1.0)
    width = 0.1 * (math.log2(config["width"]) - 7.0) ** 2
    return floor + act + depth + width + 0.12 * (math.log10(config["lr"]) - best_lr) ** 2


def _mixed_network_space() -> Config:
    return {
        "optimizer": tune.choice(["sgd", "adam", "rmsprop"]),
        "activation": tune.choice(["relu", "tanh", "gelu", "sigmoid"]),
        "skip": tune.choice([True, False]),
        "layers": tune.randint(1, 11),
        "width": tune.lograndint(8, 1025),
        "lr": tune.loguniform(1e-5, 1.0),
    }


def tilted_bowl(config: Config) -> float:
    x = _vector(config)
    centre = np.array([0.3, 0.7, 0.55])
    return float(np.sum(np.array([1.0, 2.0, 4.0]) * (x - centre) ** 2) + 0.8 * (x[0] - 0.3) * (x[1] - 0.7))


def memory_cliff(config: Config) -> float:
    """A larger batch and a wider network are better until they no longer fit."""
    batch, width = math.log2(config["batch_size"]), math.log2(config["width"])
    if batch + width > 15.5:
        raise TrialFailed("out of memory")
    return (
        0.05 * (16 - batch - width) ** 2
        + 0.02 * (batch - width + 1) ** 2
        + 0.1 * (math.log10(config["lr"]) + 2.5) ** 2
    )


def ackley(config: Config) -> float:
    x = _vector(config)
    waves = np.exp(np.mean(np.cos(2 * math.pi * x)))
    return float(-20 * np.exp(-0.2 * math.sqrt(np.mean(x**2))) - waves + 20 + math.e)


def levy(config: Config) -> float:
    w = 1 + (_vector(config) - 1) / 4
    middle = np.sum((w[:-1] - 1) ** 2 * (1 + 10 * np.sin(math.pi * w[:-1] + 1) ** 2))
    last = (w[-1] - 1) ** 2 * (1 + np.sin(2 * math.pi * w[-1]) ** 2)
    return float(math.sin(math.pi * w[0]) ** 2 + middle + last)


def rosenbrock(config: Config) -> float:
    x = _vector(config)
    return float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2))


def boosting(config: Config) -> float:
    """Modelled on gradient boosting: trees and learning rate trade off, depth and loss interact."""
    trees, lr = math.log10(config["trees"]), math.log10(config["lr"])
    depth = config["model"]["depth"]
    best_depth = {"square": 5, "absolute": 7, "huber": 6}[config["model"]["loss"]]
    base = {"square": 0.1, "absolute": 0.05, "huber": 0.0}[config["model"]["loss"]]
    sample = 0.4 * (config["subsample"] - 0.7) ** 2
    return (
        base
        + 0.3 * (trees + lr - 1.0) ** 2
        + 0.03 * (lr + 1.6) ** 2
        + 0.01 * (depth - best_depth) ** 2
        + sample
    )


def _boosting_space() -> Config:
    return {
        "trees": tune.lograndint(10, 2001),
        "lr": tune.loguniform(1e-4, 1.0),
        "subsample": tune.quniform(0.1, 1.0, 0.05),
        "model": {"depth": tune.randint(1, 16), "loss": tune.choice(["square", "absolute", "huber"])},
    }


def camel(config: Config) -> float:
    x, y = config["x0"], config["x1"]
    return (4 - 2.1 * x**2 + x**4 / 3) * x**2 + x * y + (-4 + 4 * y**2) * y**2


def diverging(config: Config) -> float:
    """Two failing corners: a learning rate too high for its momentum, and a schedule too long."""
    lr, momentum = math.log10(config["lr"]), config["momentum"]
    if lr > -0.6 - 1.2 * momentum or config["warmup"] * 10 + lr > 7.2:
        raise TrialFailed("the loss is nan")
    best = -1.0 - 1.2 * momentum
    return 0.3 * (lr - best) ** 2 + 0.4 * (momentum - 0.85) ** 2 + 0.2 * (config["warmup"] - 0.4) ** 2


def _read_table() -> dict[tuple[Any, ...], float]:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (
            int(row["log2_width"]),
            float(row["log10_lr"]),
            int(row["batch_size"]),
            float(row["momentum"]),
            row["activation"],
        ): float(row["log_loss"])
        for row in rows
    }


_table: dict[tuple[Any, ...], float] = {}


def digits_table(config: Config) -> float:
    """Validation loss of a real training run (see search_table.py); a diverged one fails."""
    if not _table:
        _table.update(_read_table())
    loss = _table[
        int(config["log2_width"]),
        round(2 * config["log10_lr"]) / 2,
        config["batch_size"],
        config["momentum"],
        config["activation"],
    ]
    if math.isnan(loss):
        raise TrialFailed("diverged")
    return loss


def _table_space() -> Config:
    return {
        "log2_width": tune.randint(3, 7),
        "log10_lr": tune.quniform(-4.0, 0.0, 0.5),
        "batch_size": tune.choice([16, 64, 256]),
        "momentum": tune.choice([0.0, 0.9, 0.99]),
        "activation": tune.choice(["relu", "tanh", "logistic"]),
    }


def _table_optimum() -> float:
    return min(v for v in _read_table().values() if not math.isnan(v)) if TABLE.exists() else math.nan


def _bowl_of_rates(config: Config, rate: float, decay: float) -> float:
    away = math.log10(config["lr"]) - rate
    return 0.2 * away**2 + 0.05 * (math.log10(config["weight_decay"]) - decay) ** 2 + 0.1 * max(0.0, away)


def forgotten_log(config: Config) -> float:
    """Good learning rates are around 0.002, and the space is declared without a logarithm."""
    return 0.1 + _bowl_of_rates(config, -2.7, -4.0) + 0.3 * (config["momentum"] - 0.9) ** 2


def cliff(config: Config) -> float:
    """Better and better towards an edge of two parameters, beyond which it is much worse."""
    x = _vector(config)
    edge = x[0] + 0.5 * x[1] - 1.1
    return float(0.6 * (1.1 - x[0] - 0.5 * x[1]) ** 2 + np.sum((x[1:] - 0.4) ** 2) + 2.0 * (edge > 0))


_OPTIMIZERS = {"sgd": (0.05, -1.0), "adam": (0.0, -3.0), "rmsprop": (0.03, -3.5)}


def optimizers11(config: Config) -> float:
    """Three optimizers, whose rates and other parameters differ; seven more parameters, four of no effect."""
    floor, rate = _OPTIMIZERS[config["optimizer"]]
    loss = floor + 0.15 * (math.log10(config["lr"]) - rate) ** 2
    centre = {"sgd": 0.9, "adam": 0.3, "rmsprop": 0.6}[config["optimizer"]]
    loss += 0.4 * (config["a"] - centre) ** 2 + 0.2 * (config["b"] - 0.5) ** 2
    loss += 0.05 * abs(math.log2(config["batch_size"]) - 6) + 0.1 * (config["schedule"] != "cosine")
    return loss + 0.02 * (config["layers"] - 3) ** 2


def _optimizers11_space() -> Config:
    idle = {name: tune.uniform(0.0, 1.0) for name in ("c", "d", "e", "f")}
    return {
        "optimizer": tune.choice(["sgd", "adam", "rmsprop"]),
        "lr": tune.loguniform(1e-5, 1.0),
        "a": tune.uniform(0.0, 1.0),
        "b": tune.uniform(0.0, 1.0),
        "batch_size": tune.choice([16, 32, 64, 128, 256]),
        "schedule": tune.choice(["constant", "step", "cosine", "linear"]),
        "layers": tune.randint(1, 8),
        **idle,
    }


def conditional(config: Config) -> float:
    """Two models, each with parameters of its own, and a batch size that both have."""
    model = config["model"]
    if isinstance(model, str):
        inner = {
            name.partition("_")[2]: value for name, value in config.items() if name.startswith(model + "_")
        }
        model = {"name": model, **inner}
    loss = 0.05 * (math.log2(config["batch_size"]) - 6) ** 2
    if model["name"] == "forest":
        return loss + 0.12 + 0.02 * (model["depth"] - 9) ** 2 + 0.2 * (math.log10(model["trees"]) - 2.3) ** 2
    loss += 0.15 * (math.log10(model["lr"]) + 2.2) ** 2 + 0.4 * (model["dropout"] - 0.2) ** 2
    return loss + 0.06 * (math.log2(model["width"]) - 8) ** 2


def _models() -> dict[str, Config]:
    return {
        "forest": {"depth": tune.randint(2, 21), "trees": tune.lograndint(10, 1001)},
        "network": {
            "lr": tune.loguniform(1e-5, 1.0),
            "dropout": tune.uniform(0.0, 0.9),
            "width": tune.lograndint(8, 1025),
        },
    }


def _conditional_space() -> Config:
    options = [{"name": name, **inner} for name, inner in _models().items()]
    return {"model": tune.choice(options), "batch_size": tune.choice([16, 32, 64, 128, 256])}


def _flat_conditional_space() -> Config:
    inner = {
        f"{name}_{key}": domain for name, domains in _models().items() for key, domain in domains.items()
    }
    return {"model": tune.choice(list(_models())), "batch_size": tune.choice([16, 32, 64, 128, 256]), **inner}


def uneven(config: Config) -> float:
    """Large learning rates are the noisiest, and not the best."""
    return 0.1 + _bowl_of_rates(config, -2.5, -4.0) + 0.2 * (config["dropout"] - 0.3) ** 2


def failing_half(config: Config) -> float:
    """About half of the space runs out of memory, and the best is near where it begins to."""
    size = math.log2(config["width"]) + 0.5 * config["layers"] + math.log2(config["batch_size"])
    if size > 17.0:
        raise TrialFailed("out of memory")
    loss = 0.03 * (17.0 - size) ** 2 + 0.12 * (math.log10(config["lr"]) + 2.8) ** 2
    return loss + 0.05 * (math.log2(config["batch_size"]) - 5) ** 2


def _failing_half_space() -> Config:
    return {
        "width": tune.lograndint(16, 4097),
        "layers": tune.randint(1, 13),
        "batch_size": tune.choice([8, 16, 32, 64, 128, 256]),
        "lr": tune.loguniform(1e-5, 1.0),
    }


def reported_disaster(config: Config) -> float:
    """As `diverging`, but a diverged trial reports 1e6."""
    try:
        return diverging(config)
    except TrialFailed:
        return 1e6


def _diverging_space() -> Config:
    return {
        "lr": tune.loguniform(1e-5, 1e1),
        "momentum": tune.uniform(0.0, 0.99),
        "warmup": tune.uniform(0.0, 1.0),
    }


CHOSEN_ON = [
    Problem(
        "branin",
        "smooth, 2-D",
        lambda: {"x0": tune.uniform(-5, 10), "x1": tune.uniform(0, 15)},
        branin,
        0.397887,
    ),
    Problem("hartmann6", "smooth, 6-D", _box(6, 0, 1), hartmann6, -3.32237),
    Problem(
        "lr_valley",
        "log scales, 3-D",
        lambda: {
            "lr": tune.loguniform(1e-6, 1.0),
            "weight_decay": tune.loguniform(1e-7, 1e-1),
            "momentum": tune.uniform(0.0, 0.99),
        },
        lr_valley,
        0.2,
    ),
    Problem("mixed_network", "mixed, 6-D", _mixed_network_space, mixed_network, 0.0),
    Problem("noisy_bowl", "noisy, 3-D", _box(3, 0, 1), tilted_bowl, 0.0, noise=0.1),
    Problem(
        "memory_cliff",
        "failures, 3-D",
        lambda: {
            "batch_size": tune.lograndint(8, 1025),
            "width": tune.lograndint(16, 2049),
            "lr": tune.loguniform(1e-5, 1e-1),
        },
        memory_cliff,
        0.0125,
    ),
]
HELD_OUT = [
    Problem(
        "camel",
        "smooth, 2-D",
        lambda: {"x0": tune.uniform(-3, 3), "x1": tune.uniform(-2, 2)},
        camel,
        -1.031628,
    ),
    Problem("rosenbrock4", "curved valley, 4-D", _box(4, -2, 2), rosenbrock, 0.0),
    Problem("ackley5", "rugged, 5-D", _box(5, -11.3, 18.7), ackley, 0.0),
    Problem("levy10", "rugged, 10-D", _box(10, -10, 10), levy, 0.0),
    Problem("boosting", "mixed, nested, 5-D", _boosting_space, boosting, 0.0),
    Problem("noisy_hartmann6", "noisy, 6-D", _box(6, 0, 1), hartmann6, -3.32237, noise=0.2),
    Problem(
        "diverging",
        "failures, 3-D",
        _diverging_space,
        diverging,
        0.0,
    ),
    Problem("digits_table", "972 real runs, 5-D", _table_space, digits_table, _table_optimum()),
]
AS_WRITTEN = [
    Problem(
        "forgotten_log",
        "uniform for loguniform, 3-D",
        lambda: {
            "lr": tune.uniform(1e-5, 1.0),
            "weight_decay": tune.uniform(1e-7, 1e-1),
            "momentum": tune.uniform(0.0, 0.99),
        },
        forgotten_log,
        0.1,
    ),
    Problem("cliff", "a jump beside the best, 4-D", _box(4, 0, 1), cliff, 0.0),
    Problem("optimizers11", "categories, 11-D", _optimizers11_space, optimizers11, 0.0),
    Problem(
        "conditional",
        "parameters of an option, 6-D",
        _conditional_space,
        conditional,
        0.0,
        flat_space=_flat_conditional_space,
    ),
    Problem(
        "uneven_noise",
        "noise of 0.01 to 0.5, 3-D",
        lambda: {
            "lr": tune.loguniform(1e-5, 1.0),
            "weight_decay": tune.loguniform(1e-7, 1e-1),
            "dropout": tune.uniform(0.0, 0.9),
        },
        uneven,
        0.1,
        noise_at=lambda config: 0.01 + 0.49 * config["lr"] ** 0.3,
    ),
    Problem("failing_half", "failures, 4-D", _failing_half_space, failing_half, 0.0),
    Problem("diverging16", "failures, 16 in flight", _diverging_space, diverging, 0.0, in_flight=16),
    Problem("disaster", "diverged trials report 1e6", _diverging_space, reported_disaster, 0.0),
]
PROBLEMS = {problem.name: problem for problem in CHOSEN_ON + HELD_OUT + AS_WRITTEN}
