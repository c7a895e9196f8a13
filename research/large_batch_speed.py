"""The cost of an optimiser step of LARS and LAMB relative to torch's, and of the noise scale in a step.

    OMP_NUM_THREADS=1 python research/large_batch_speed.py [--device cuda]

160 tensors, 25 million parameters. Rounds of all optimisers are interleaved, and the median of the rounds'
ratios is printed, so that other work on the machine affects both sides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from horovod_tune.large_batch import GradientAccumulator, Lamb, Lars, NoiseScale, accumulation
from horovod_tune.large_batch.noise_scale import GradientNorms

# As in a ResNet-50: 54 weights of layers, and 106 vectors of biases and normalisation.
SHAPES = [(680, 680)] * 54 + [(680,)] * 106
AGAINST = {"LARS": "SGD", "LAMB": "AdamW"}


def optimizers(device: str) -> dict[str, torch.optim.Optimizer]:
    """Return each optimiser with its own parameters and gradients."""

    def groups() -> list[dict]:
        params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
        for parameter in params:
            parameter.grad = torch.randn_like(parameter)
        decay, none = {"weight_decay": 1e-4}, {"weight_decay": 0.0}
        return [{"params": params[:54], **decay}, {"params": params[54:], **none, "layer_wise": False}]

    return {
        "SGD": torch.optim.SGD(groups(), lr=1e-4, momentum=0.9, foreach=True),
        "LARS": Lars(groups(), lr=1e-4),
        "AdamW": torch.optim.AdamW(groups(), lr=1e-4, foreach=True),
        "LAMB": Lamb(groups(), lr=1e-4),
    }


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Return the seconds of one call: CPU time of this process, or wall-clock time on an accelerator."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    started = clock()
    for _ in range(repeats):
        work()
    if device != "cpu":
        torch.cuda.synchronize()
    return (clock() - started) / repeats


def steps(device: str, rounds: int) -> None:
    """Print milliseconds and ratios of the optimisers' steps."""
    measured = optimizers(device)
    for each in measured.values():
        each.step()
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(rounds):
        for name, optimizer in measured.items():
            taken[name].append(seconds(optimizer.step, device, 3))
    for name, values in taken.items():
        line = f"{name:16} {1e3 * statistics.median(values):8.2f} ms"
        if name in AGAINST:
            ratios = [own / other for own, other in zip(values, taken[AGAINST[name]], strict=True)]
            line += f"   {statistics.median(ratios):.2f} x {AGAINST[name]}(foreach=True)"
        print(line)


def noise_scale(device: str, rounds: int) -> None:
    """Print what the noise scale adds to a step of four passes of a network of 25 million weights.

    A round is the steps from one measurement to the next. The noise scale is timed within the run: the
    difference of two runs would be smaller than the effect of other work on the machine.
    """
    inputs = torch.randn(64, 680, device=device)
    pairs = [(torch.nn.Linear(680, 680), torch.nn.ReLU()) for _ in range(54)]
    model = torch.nn.Sequential(*[layer for pair in pairs for layer in pair]).to(device)
    own = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal own
            result = None

            def run() -> None:
                nonlocal result
                result = function(*arguments)

            own += seconds(run, device, 1)
            return result

        return call

    meter = NoiseScale()
    meter.update = timed(meter.update)  # type: ignore[method-assign]
    with (
        patch.object(GradientNorms, "_record", timed(GradientNorms._record)),
        patch.object(GradientNorms, "take", timed(GradientNorms.take)),
        patch.object(accumulation, "norms", timed(accumulation.norms)),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        accumulator = GradientAccumulator(optimizer, passes=4, local_batch_size=256, noise_scale=meter)

        def step() -> None:
            for _ in range(4):
                accumulator.backward(model(inputs).square().mean(), samples=64)
            accumulator.step()

        parts = []
        for _ in range(rounds):
            own = 0.0
            whole = seconds(step, device, meter.every) * meter.every
            parts.append(100 * own / (whole - own))
    print(
        f"noise scale, in every {meter.every}th step: {statistics.median(parts):.2f} % of the time of a step "
        f"of 4 passes of 64 samples, {min(parts):.2f} to {max(parts):.2f} in {rounds} rounds"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="+", default=["steps", "noise_scale"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "steps" in options.parts:
        steps(options.device, options.rounds)
    if "noise_scale" in options.parts:
        noise_scale(options.device, options.rounds)
