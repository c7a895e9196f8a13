"""Which parameters have no layer-wise rate and no decay, in models of many kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from horovod_tune.large_batch import parameter_groups


def names(model: nn.Module) -> tuple[set[str], set[str]]:
    """The names of those with, and of those without, a layer-wise rate."""
    groups = {group["layer_wise"]: set(group["names"]) for group in parameter_groups(model, weight_decay=0.1)}
    return groups.get(True, set()), groups.get(False, set())


class OwnRMSNorm(nn.Module):
    """A user's normalisation, with a scale of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.decode = nn.Linear(8, 11, bias=False)
        self.decode.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("model", "layer_wise"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4)), {"0.weight"}),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm([4, 4]), OwnRMSNorm()), {"0.weight"}),
        (nn.GroupNorm(2, 4), set()),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), {"in_proj_weight", "out_proj.weight"}),
        (
            nn.LSTM(3, 4, num_layers=2),
            {f"weight_{kind}_l{layer}" for kind in ("ih", "hh") for layer in (0, 1)},
        ),
        (Tied(), {"embed.weight"}),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), {"parametrizations.weight.original1"}),
        (nn.Bilinear(2, 3, 4), {"weight"}),
        (
            nn.TransformerEncoderLayer(8, 2, 16),
            {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_biases_and_normalisation_are_found(model: nn.Module, layer_wise: set[str]) -> None:
    found, excluded = names(model)
    assert found == layer_wise
    assert found | excluded == {name for name, _ in model.named_parameters()}


def test_decay_is_for_the_first_group_only_and_options_for_both() -> None:
    first, second = parameter_groups(nn.Linear(2, 2), weight_decay=0.1, lr=0.3)
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert first["lr"] == second["lr"] == 0.3


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    (group,) = parameter_groups(model)
    assert group["names"] == ["bias"]
