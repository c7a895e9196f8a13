"""The functions that are searched: their spaces, their optima and what makes them hard. All are minimised.

`CHOSEN_ON` were used to choose the method; `HELD_OUT` were not; `moved` have their optimum at a random place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.tune import choice, lograndint, loguniform, quniform, randint, uniform

Config = dict[str, Any]


class TrialFailed(Exception):
    """The function cannot be evaluated here, like a training that runs out of memory."""


@dataclass(frozen=True)
class Problem:
    """A function to minimise; `true_value` is without noise and raises `TrialFailed` if it fails.

    `right` has the best option of each category that matters; see `options`.
    """

    name: str
    space: Config
    true_value: Callable[[Config], float]
    optimum: float = 0.0
    noise: float = 0.0
    right: Mapping[str, str] = field(default_factory=dict)

    def is_right(self, config: Config) -> bool:
        """Return True if a configuration has the best options."""
        chosen = {name: config[name] for name in self.right}
        names = {name: next(iter(c.values())) if isinstance(c, dict) else c for name, c in chosen.items()}
        return names == self.right

    def observe(self, config: Config, generator: np.random.Generator) -> float:
        return self.true_value(config) + self.noise * float(generator.standard_normal())


def _box(dimension: int, low: float = 0.0, high: float = 1.0) -> Config:
    return {f"x{i}": uniform(low, high) for i in range(dimension)}


def _vector(config: Config) -> np.ndarray:
    return np.array([config[f"x{i}"] for i in range(len(config))])


def branin(config: Config) -> float:
    x, y = config["x0"], config["x1"]
    bowl = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6) ** 2
    return bowl + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


# fmt: off
_H6_A = [
    [10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14],
    [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14],
]
_H6_P = [
    [1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
    [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381],
]
# fmt: on


def hartmann6(config: Config) -> float:
    distances = (np.array(_H6_A) * (_vector(config) - 1e-4 * np.array(_H6_P)) ** 2).sum(axis=1)
    return -float(np.array([1.0, 1.2, 3.0, 3.2]) @ np.exp(-distances))


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


def tilted_bowl(config: Config) -> float:
    x, y, z = _vector(config) - [0.3, 0.7, 0.55]
    return float(x**2 + 2 * y**2 + 4 * z**2 + 0.8 * x * y)


def memory_cliff(config: Config) -> float:
    """A larger batch and a wider network are better until they no longer fit."""
    batch, width = math.log2(config["batch_size"]), math.log2(config["width"])
    if batch + width > 15.5:
        raise TrialFailed("out of memory")
    rate = math.log10(config["lr"]) + 2.5
    return 0.05 * (16 - batch - width) ** 2 + 0.02 * (batch - width + 1) ** 2 + 0.1 * rate**2


def ackley(x: np.ndarray) -> float:
    waves = np.exp(np.mean(np.cos(2 * math.pi * x)))
    return float(-20 * np.exp(-0.2 * math.sqrt(np.mean(x**2))) - waves + 20 + math.e)


def levy(w: np.ndarray) -> float:
    middle = np.sum((w[:-1] - 1) ** 2 * (1 + 10 * np.sin(math.pi * w[:-1] + 1) ** 2))
    last = (w[-1] - 1) ** 2 * (1 + np.sin(2 * math.pi * w[-1]) ** 2)
    return float(math.sin(math.pi * w[0]) ** 2 + middle + last)


def rosenbrock(x: np.ndarray) -> float:
    return float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2))


def boosting(config: Config) -> float:
    """Modelled on gradient boosting: trees and learning rate trade off, depth and loss interact."""
    trees, lr = math.log10(config["trees"]), math.log10(config["lr"])
    depth = config["model"]["depth"]
    best_depth = {"square": 5, "absolute": 7, "huber": 6}[config["model"]["loss"]]
    base = {"square": 0.1, "absolute": 0.05, "huber": 0.0}[config["model"]["loss"]]
    base += 0.4 * (config["subsample"] - 0.7) ** 2 + 0.01 * (depth - best_depth) ** 2
    return base + 0.3 * (trees + lr - 1.0) ** 2 + 0.03 * (lr + 1.6) ** 2


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


_VALLEY_SPACE = {
    "lr": loguniform(1e-6, 1),
    "weight_decay": loguniform(1e-7, 0.1),
    "momentum": uniform(0, 0.99),
}
_NETWORK_SPACE = {
    "optimizer": choice(["sgd", "adam", "rmsprop"]),
    "activation": choice(["relu", "tanh", "gelu", "sigmoid"]),
    "skip": choice([True, False]),
    "layers": randint(1, 11),
    "width": lograndint(8, 1025),
    "lr": loguniform(1e-5, 1.0),
}
_CLIFF_SPACE = {
    "batch_size": lograndint(8, 1025),
    "width": lograndint(16, 2049),
    "lr": loguniform(1e-5, 1e-1),
}
_BOOSTING_SPACE = {
    "trees": lograndint(10, 2001),
    "lr": loguniform(1e-4, 1.0),
    "subsample": quniform(0.1, 1.0, 0.05),
    "model": {"depth": randint(1, 16), "loss": choice(["square", "absolute", "huber"])},
}
_DIVERGING_SPACE = {"lr": loguniform(1e-5, 1e1), "momentum": uniform(0, 0.99), "warmup": uniform(0.0, 1.0)}
CHOSEN_ON = [
    Problem("branin", {"x0": uniform(-5, 10), "x1": uniform(0, 15)}, branin, 0.397887),
    Problem("hartmann6", _box(6), hartmann6, -3.32237),
    Problem("lr_valley", _VALLEY_SPACE, lr_valley, 0.2),
    Problem("mixed_network", _NETWORK_SPACE, mixed_network),
    Problem("noisy_bowl", _box(3), tilted_bowl, noise=0.1),
    Problem("memory_cliff", _CLIFF_SPACE, memory_cliff, 0.0125),
]
HELD_OUT = [
    Problem("camel", {"x0": uniform(-3, 3), "x1": uniform(-2, 2)}, camel, -1.031628),
    Problem("rosenbrock4", _box(4, -2, 2), lambda config: rosenbrock(_vector(config))),
    Problem("ackley5", _box(5, -11.3, 18.7), lambda config: ackley(_vector(config))),
    Problem("levy10", _box(10, -10, 10), lambda config: levy(1 + (_vector(config) - 1) / 4)),
    Problem("boosting", _BOOSTING_SPACE, boosting),
    Problem("noisy_hartmann6", _box(6), hartmann6, -3.32237, noise=0.2),
    Problem("diverging", _DIVERGING_SPACE, diverging),
]
FUNCTIONS = {problem.name: problem for problem in CHOSEN_ON + HELD_OUT}

# The number of parameters of each function whose optimum is at a random place.
MOVED = dict(bowl=4, ackley=4, rosenbrock=4, levy=6, three_of_ten=10, corner=5, noisy=3, narrow=3)


def moved(kind: str, seed: int) -> Problem:
    """Return a function on the unit cube whose optimum, weights and rotation are drawn with `seed`."""
    generator, dimension = np.random.default_rng([seed, 99]), MOVED[kind]
    best = generator.random(dimension)
    turned = np.linalg.qr(generator.standard_normal((dimension, dimension)))[0]
    weights = 10.0 ** generator.uniform(-1, 1, dimension)

    def bowl(x: np.ndarray) -> float:
        return float(np.sum(weights * (turned @ (x - best)) ** 2))

    def narrow(x: np.ndarray) -> float:
        z = x - best
        return float(1 - np.exp(-10 * np.sum(weights * z**2)) + 0.1 * np.sum(np.abs(z)))

    functions: dict[str, Callable[[np.ndarray], float]] = {
        "bowl": bowl,
        "noisy": bowl,
        "narrow": narrow,
        "ackley": lambda x: ackley(turned @ (x - best) * 20),
        "rosenbrock": lambda x: rosenbrock(1 + (x - best) * 4),
        "levy": lambda x: levy(1 + (x - best) * 5),
        "three_of_ten": lambda x: float(np.sum((weights * (x - best) ** 2)[:3])),
        "corner": lambda x: float(np.sum(weights * np.abs(x - np.rint(best)))),
    }
    noise = 0.02 if kind == "noisy" else 0.0
    return Problem(kind, _box(dimension), lambda config: functions[kind](_vector(config)), noise=noise)
