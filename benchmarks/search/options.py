"""Problems with categories, whose best options, rates and sizes are drawn with a seed. The least loss is 0.

`DEVELOPED_ON` were used to change the searcher; `CHECKED_ON` were not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from ray.tune import choice, lograndint, loguniform, randint, uniform

from benchmarks.search.functions import Config, Problem

RATE = loguniform(1e-5, 1.0)
#: A space, a loss, and the best option by parameter; an option with parameters of its own by its name.
Drawn = tuple[Config, Callable[[Config], float], Config]


def optimizers(draw: np.random.Generator) -> Drawn:
    """Three optimizers, whose best rates differ by factors of 8 and 63."""
    names = ["sgd", "adam", "lion"]
    rates, floors = draw.permutation([-1.1, -2.0, -2.9]), draw.permutation([0.0, 0.05, 0.1])
    width, depth, norm = draw.uniform(5, 9), int(draw.integers(2, 8)), bool(draw.integers(2))

    def loss(config: Config) -> float:
        which = names.index(config["optimizer"])
        shape = 0.05 * (math.log2(config["width"]) - width) ** 2 + 0.02 * (config["depth"] - depth) ** 2
        rate = 0.12 * (math.log10(config["lr"]) - rates[which]) ** 2
        return floors[which] + rate + shape + 0.04 * (config["norm"] != norm)

    space = {"optimizer": choice(names), "lr": RATE, "width": lograndint(16, 1025), "depth": randint(1, 9)}
    return space | {"norm": choice([True, False])}, loss, {"optimizer": names[floors.argmin()]}


def pair(draw: np.random.Generator) -> Drawn:
    """Three optimizers and four activations, which both move the best rate; beyond it the loss explodes."""
    names, activations = ["sgd", "adam", "lion"], ["relu", "tanh", "gelu", "sigmoid"]
    rates, floors = draw.permutation([-1.0, -2.2, -3.0]), draw.permutation([0.0, 0.05, 0.1])
    shifts, offsets = draw.permutation([-0.6, -0.2, 0.2, 0.6]), draw.permutation([0.0, 0.04, 0.08, 0.25])
    best_decay = draw.uniform(-5, -2)

    def loss(config: Config) -> float:
        one, two = names.index(config["optimizer"]), activations.index(config["activation"])
        away = math.log10(config["lr"]) - rates[one] - shifts[two]
        decay = 0.03 * (math.log10(config["weight_decay"]) - best_decay + 0.3 * away) ** 2
        return floors[one] + offsets[two] + 0.15 * away**2 + 2 * max(away - 0.7, 0) + decay

    space = {"optimizer": choice(names), "activation": choice(activations), "lr": RATE}
    right = {"optimizer": names[floors.argmin()], "activation": activations[offsets.argmin()]}
    return space | {"weight_decay": loguniform(1e-6, 0.1)}, loss, right


def inner(draw: np.random.Generator) -> Drawn:
    """Three optimizers with rates of their own, on ranges of their own, and one with a momentum too."""
    names, floors = ["sgd", "adam", "lamb"], draw.permutation([0.0, 0.06, 0.12])
    rates = [draw.uniform(-2, 0), draw.uniform(-4, -2), draw.uniform(-3, -1)]
    momentum, width = draw.uniform(0.3, 0.9), draw.uniform(5, 9)

    def loss(config: Config) -> float:
        chosen = config["optimizer"]
        which = names.index(chosen["name"])
        rate = 0.15 * (math.log10(chosen["lr"]) - rates[which]) ** 2
        own = 0.3 * (chosen["momentum"] - momentum) ** 2 if "momentum" in chosen else 0.0
        return floors[which] + rate + own + 0.05 * (math.log2(config["width"]) - width) ** 2

    options = [
        {"name": "sgd", "lr": loguniform(1e-3, 10.0), "momentum": uniform(0, 0.99)},
        {"name": "adam", "lr": loguniform(1e-5, 0.1)},
        {"name": "lamb", "lr": loguniform(1e-4, 1.0)},
    ]
    space = {"optimizer": choice(options), "width": lograndint(16, 1025)}
    return space, loss, {"optimizer": names[floors.argmin()]}


def narrow(draw: np.random.Generator) -> Drawn:
    """Three schedules; the best has a valley of rates a third as wide as the others have."""
    names, order = ["step", "cosine", "linear"], draw.permutation(3)
    rates, dropout = draw.uniform(-4, -1, size=3), draw.uniform(0.1, 0.6)

    def loss(config: Config) -> float:
        rank = order[names.index(config["schedule"])]
        away = (math.log10(config["lr"]) - rates[rank]) / (0.4, 1.2, 1.4)[rank]
        return (0.0, 0.12, 0.18)[rank] + 0.1 * math.log1p(away**2) + 0.3 * (config["dropout"] - dropout) ** 2

    space = {"schedule": choice(names), "lr": RATE, "dropout": uniform(0, 0.8)}
    return space, loss, {"schedule": names[order.argmin()]}


def six(draw: np.random.Generator) -> Drawn:
    """Six optimizers; far from its best rate, none does better than chance."""
    names = ["sgd", "adam", "lion", "lamb", "rmsprop", "adagrad"]
    rates, errors = draw.uniform(-4, -1, size=6), draw.permutation([0.0, 0.05, 0.07, 0.11, 0.15, 0.25])
    momentum = draw.uniform(0.5, 0.9)

    def loss(config: Config) -> float:
        which = names.index(config["optimizer"])
        away = math.log10(config["lr"]) - rates[which] - 0.3 * (math.log2(config["batch_size"]) - 6)
        better = math.exp(-(away**2) - 0.8 * (config["momentum"] - momentum) ** 2)
        return 0.9 - (0.9 - errors[which]) * better

    space = {"optimizer": choice(names), "lr": RATE, "batch_size": lograndint(16, 513)}
    return space | {"momentum": uniform(0, 0.99)}, loss, {"optimizer": names[errors.argmin()]}


def models(draw: np.random.Generator) -> Drawn:
    """Four kinds of model with sizes and rates of their own; results are noisy."""
    names, floors = ["conv", "mlp", "attention", "trees"], draw.permutation([0.0, 0.08, 0.12, 0.2])
    rates, sizes = draw.uniform(-3.5, -1, size=4), draw.integers(2, 6, size=4) / 7

    def loss(config: Config) -> float:
        chosen = config["model"]
        which = names.index(chosen["kind"])
        value = floors[which] + 0.2 * (config["dropout"] - 0.3) ** 2
        if "width" in chosen:
            value += 0.4 * ((math.log2(chosen["width"]) - 3) / 4 - sizes[which]) ** 2
        if "depth" in chosen:
            value += 0.4 * ((chosen["depth"] - 1) / 7 - sizes[which]) ** 2
        return value + 0.12 * (math.log10(chosen["lr"]) - rates[which]) ** 2

    options = [
        {"kind": "conv", "lr": RATE, "width": lograndint(8, 129)},
        {"kind": "mlp", "lr": RATE, "width": lograndint(8, 129), "depth": randint(1, 9)},
        {"kind": "attention", "lr": RATE, "depth": randint(1, 9)},
        {"kind": "trees", "lr": RATE},
    ]
    return {"model": choice(options), "dropout": uniform(0, 0.8)}, loss, {"model": names[floors.argmin()]}


def two(draw: np.random.Generator) -> Drawn:
    """Two optimizers, whose best rates differ by a factor of 300, and five losses; all ten pairs differ."""
    names, losses = ["sgd", "adam"], ["mse", "mae", "huber", "focal", "hinge"]
    ranks = draw.permutation(10).reshape(2, 5)
    rates, decay = draw.permutation([-0.8, -3.3]), draw.uniform(-5, -2)

    def loss(config: Config) -> float:
        one, two = names.index(config["optimizer"]), losses.index(config["loss"])
        away = math.log10(config["lr"]) - rates[one]
        floor = 0.05 * ranks[one, two] + 0.03 * (ranks[one, two] > 0)
        return floor + 0.3 * math.log1p(away**2) + 0.02 * (math.log10(config["weight_decay"]) - decay) ** 2

    one, best = np.unravel_index(ranks.argmin(), ranks.shape)
    space = {"optimizer": choice(names), "loss": choice(losses), "lr": RATE}
    right = {"optimizer": names[one], "loss": losses[best]}
    return space | {"weight_decay": loguniform(1e-6, 0.1)}, loss, right


def same(draw: np.random.Generator) -> Drawn:
    """Four augmentations that make no difference; all are right."""
    rate, dropout, width = draw.uniform(-4, -1), draw.uniform(0.1, 0.6), draw.uniform(5, 9)

    def loss(config: Config) -> float:
        shape = 0.05 * (math.log2(config["width"]) - width) ** 2 + 0.3 * (config["dropout"] - dropout) ** 2
        return 0.12 * (math.log10(config["lr"]) - rate) ** 2 + shape

    space = {"augmentation": choice(["none", "flip", "crop", "mixup"]), "lr": RATE}
    return space | {"width": lograndint(16, 1025), "dropout": uniform(0, 0.8)}, loss, {}


DEVELOPED_ON = {each.__name__: each for each in (optimizers, pair, inner, narrow)}
CHECKED_ON = {each.__name__: each for each in (six, models, two, same)}
OPTIONS = DEVELOPED_ON | CHECKED_ON


def drawn(kind: str, seed: int) -> Problem:
    """Return one of `OPTIONS`, drawn with `seed`."""
    space, loss, right = OPTIONS[kind](np.random.default_rng([seed, 59]))
    return Problem(kind, space, loss, noise=0.01 if kind == "models" else 0.0, right=right)
