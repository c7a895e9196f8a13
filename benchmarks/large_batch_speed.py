"""What an optimiser step of LARS and LAMB costs beside torch's, and what the noise scale costs of a step.

    OMP_NUM_THREADS=1 python -m benchmarks.large_batch_speed [--device cuda]

160 tensors, 25 million parameters. Rounds of all optimisers are interleaved; what is printed is the median of
the rounds' ratios, so that other work on the machine hits both sides.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch

from horovod_tune.large_batch import GradientAccumulator, Lamb, Lars, NoiseScale

# 54 weights as of layers and 106 vectors as of biases and normalisation: the make-up of a ResNet-50.
SHAPES = [(680, 680)] * 54 + [(680,)] * 106
AGAINST = {"LARS": "SGD", "LARS, foreach": "SGD", "LAMB": "AdamW", "LAMB, foreach": "AdamW"}


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
        "LARS, foreach": Lars(groups(), lr=1e-4, foreach=True),
        "AdamW": torch.optim.AdamW(groups(), lr=1e-4, foreach=True),
        "LAMB": Lamb(groups(), lr=1e-4),
        "LAMB, foreach": Lamb(groups(), lr=1e-4, foreach=True),
    }


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Return the seconds of one call: of this process's processors, on an accelerator of the wall clock."""
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

    Processor time, for the machine may do other work; the steps of the two alternate.
    """
    inputs = torch.randn(64, 680, device=device)
    pairs = [(torch.nn.Linear(680, 680), torch.nn.ReLU()) for _ in range(54)]
    start = torch.nn.Sequential(*[layer for pair in pairs for layer in pair])

    def training(meter: NoiseScale | None) -> Callable[[], object]:
        model = copy.deepcopy(start).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        accumulator = GradientAccumulator(optimizer, passes=4, local_batch_size=256, noise_scale=meter)

        def step() -> None:
            for _ in range(4):
                accumulator.backward(model(inputs).square().mean(), samples=64)
            accumulator.step()

        return step

    for every in (1, NoiseScale().every):
        without, with_it = training(None), training(NoiseScale(every=every))
        (
            seconds(without, device, 1),
            seconds(with_it, device, every),
        )  # So that a round ends with a measurement.
        ratios = []
        for _ in range(rounds):
            pairs_s = [(seconds(without, device, 1), seconds(with_it, device, 1)) for _ in range(every)]
            plain, measured = (sum(column) for column in zip(*pairs_s, strict=True))
            ratios.append(100 * (measured / plain - 1))
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(
            f"noise scale in every {every}th step: {middle:.2f} % of a step of 4 passes of 64 samples, "
            f"{low:.2f} to {high:.2f} in {rounds} rounds",
            flush=True,
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
