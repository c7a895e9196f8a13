"""The problems of `large_batch_accuracy.py`: digits, and spirals that take many steps to learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A data set, a network and the budget of a training.

    Attributes:
        name: The name in tables and pictures.
        data: Returns training inputs and labels, held-out inputs and labels.
        widths: Widths of the network's layers.
        base_batch_size: The batch size called 1x.
        epochs: Epochs of every training, whatever its batch.
    """

    name: str
    data: Callable[[], Data]
    widths: tuple[int, ...]
    base_batch_size: int
    epochs: int

    def model(self, seed: int) -> torch.nn.Module:
        """Return a new network."""
        torch.manual_seed(seed)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in zip(self.widths, self.widths[1:], strict=False):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])


def digits() -> Data:
    """Return the digits of scikit-learn, split at random: 1280 to train on, 517 held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    inputs = torch.tensor(images[order], dtype=torch.float32) / 16
    targets = torch.tensor(labels[order])
    return inputs[:1280], targets[:1280], inputs[1280:], targets[1280:]


def spirals() -> Data:
    """Return five arms of a spiral in the plane, 4096 points to train on and 2048 held out."""
    draw = np.random.default_rng(0)
    arms = draw.integers(0, 5, 6144)
    radius = np.sqrt(draw.uniform(0.02, 1, 6144))
    angle = 2 * np.pi * arms / 5 + 5 * radius + draw.normal(0, 0.12, 6144)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    inputs, targets = torch.tensor(points, dtype=torch.float32), torch.tensor(arms)
    return inputs[:4096], targets[:4096], inputs[4096:], targets[4096:]


PROBLEMS = {
    each.name: each
    for each in (
        Problem("digits", digits, (64, 64, 10), 16, 12),
        Problem("spirals", spirals, (2, 64, 64, 5), 32, 20),
    )
}
