"""Real trials of 2 Horovod ranks: epochs and seconds until one has an accuracy of 98.5 % on held-out digits.

    python research/search_digits.py run                  # rows for the CSV
    python research/search_digits.py report

Ours and random search under our PromotingASHA; ours, Optuna's TPE and random search under Tune's ASHA; all
with the first rung after 2 of 54 epochs, reduction factor 3 and 4 trials at a time. A search ends with the
first report of 98.5 %, or after as many epochs as 20 whole trainings have. Three of 400 random configurations
reach it. Epochs are counted over all trials. The seconds are those of `Tuner.fit`, which include starting the
processes of the first trials; the methods take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import ConcurrencyLimiter
from result_rows import ResultRows

from horovod_tune import DistributedTrainableCreator
from horovod_tune.search import BayesOptSearch

RESULTS = Path(__file__).parent / "results" / "search_digits.csv"
FIELDS = ["method", "seed", "reached", "epochs", "seconds", "trials", "best"]
GOAL, EPOCHS, TRAININGS, AT_ONCE = 0.985, 54, 20, 4
SPACE = {
    "lr": tune.loguniform(1e-4, 1.0),
    "momentum": tune.uniform(0.0, 0.99),
    "weight_decay": tune.loguniform(1e-6, 1e-2),
    "dropout": tune.uniform(0.0, 0.5),
    "batch_size": tune.choice([16, 32, 64, 128]),
    "width": tune.choice([16, 32, 64, 128]),
}


def train(config: dict[str, Any]) -> None:
    import os
    import tempfile

    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    from horovod_tune import get_checkpoint, report

    hvd.init()
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images, answers = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(digits)[order]
    (images, held_out), (answers, held_out_answers) = (
        (each[:1280], each[1280:]) for each in (images, answers)
    )
    mine = slice(hvd.rank(), None, hvd.size())
    model = torch.nn.Sequential(
        torch.nn.Linear(64, config["width"]),
        torch.nn.ReLU(),
        torch.nn.Dropout(config["dropout"]),
        torch.nn.Linear(config["width"], 10),
    )
    plain = torch.optim.SGD(
        model.parameters(),
        lr=config["lr"],
        momentum=config["momentum"],
        weight_decay=config["weight_decay"],
    )
    done = 0
    if (checkpoint := get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        done = state["epoch"]
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    for epoch in range(done + 1, config["epochs"] + 1):
        model.train()
        shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))[mine]
        for batch in shuffled.split(config["batch_size"] // hvd.size()):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), answers[batch]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(held_out[mine]).argmax(1) == held_out_answers[mine]).sum()
        accuracy = hvd.allreduce(right.float(), op=hvd.Sum).item() / len(held_out)
        with tempfile.TemporaryDirectory() as folder:
            if hvd.rank() == 0:
                state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(folder, "state.pt"))
            report(accuracy=accuracy, checkpoint=folder)


class Goal(tune.Stopper):
    """Ends a search when a trial reaches `GOAL`, or when the epochs are used up."""

    def __init__(self) -> None:
        self.epochs, self.best = 0, 0.0

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        if not self.stop_all():
            self.epochs += 1
            self.best = max(self.best, result["accuracy"])
        return bool(result["training_iteration"] >= EPOCHS)

    def stop_all(self) -> bool:
        return self.best >= GOAL or self.epochs >= TRAININGS * EPOCHS


def _asha() -> Any:
    return ASHAScheduler(max_t=EPOCHS, grace_period=2, reduction_factor=3)


def _promoting() -> Any:
    from horovod_tune.search import PromotingASHA

    return PromotingASHA(max_t=EPOCHS, grace_period=2, reduction_factor=3)


def _ours(seed: int) -> Any:
    return ConcurrencyLimiter(BayesOptSearch(random_state=seed), AT_ONCE)


def _random(seed: int) -> Any:
    from ray.tune.search.basic_variant import BasicVariantGenerator

    return BasicVariantGenerator(random_state=seed, max_concurrent=AT_ONCE)


def tpe(seed: int, **aim: str) -> Any:
    """Return Optuna's TPE; `aim` has the metric and the mode if no tuner passes them."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True)
    return OptunaSearch(sampler=sampler, **aim)


def _tpe(seed: int) -> Any:
    return ConcurrencyLimiter(tpe(seed), AT_ONCE)


METHODS: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
    "horovod_tune_promoting": (_ours, _promoting),
    "horovod_tune": (_ours, _asha),
    "random_promoting": (_random, _promoting),
    "optuna_tpe": (_tpe, _asha),
    "random": (_random, _asha),
}


def search(method: str, seed: int) -> dict[str, Any]:
    """Run one search; return its row's figures."""
    searcher, scheduler = METHODS[method]
    goal = Goal()
    with tempfile.TemporaryDirectory() as storage:
        tuner = tune.Tuner(
            DistributedTrainableCreator(train, num_slots=2),
            param_space=SPACE | {"epochs": EPOCHS},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=1000,
                search_alg=searcher(seed),
                scheduler=scheduler(),
            ),
            run_config=tune.RunConfig(storage_path=storage, stop=goal, verbose=0),
        )
        began_s = time.monotonic()
        results = tuner.fit()
        seconds = time.monotonic() - began_s
    if results.errors:
        raise RuntimeError(f"{method}, seed {seed}: {results.errors[0]}")
    return {
        "reached": int(goal.best >= GOAL),
        "epochs": goal.epochs,
        "seconds": f"{seconds:.1f}",
        "trials": len(results),
        "best": f"{goal.best:.4f}",
    }


def run(methods: list[str], seeds: int, output: Path, label: str) -> None:
    rows = ResultRows(output, FIELDS, keys=2)
    ray.init("local", num_cpus=2 * AT_ONCE, include_dashboard=False, log_to_driver=False)
    for seed in range(seeds):
        for method in methods:
            if not rows.has(method + label, seed):
                rows.add({"method": method + label, "seed": seed} | search(method, seed))
    ray.shutdown()


def report(output: Path) -> None:
    """Print medians and quartiles over the seeds; a search that misses the goal counts as infinite."""
    import pandas as pd

    rows = pd.read_csv(output)
    print("| method | seeds | got there | epochs | seconds | trials |")
    print("|---|---|---|---|---|---|")
    for method, part in rows.groupby("method", sort=False):
        cells = []
        for name in ("epochs", "seconds"):
            values = part[name].where(part["reached"] == 1, float("inf"))
            low, middle, high = (values.quantile(q, interpolation="nearest") for q in (0.25, 0.5, 0.75))
            cells.append(f"{middle:.0f} ({low:.0f} to {high:.0f})".replace("inf", "more"))
        cells.append(f"{part['trials'].median():.0f}")
        print(f"| {method} | {len(part)} | {part['reached'].sum()} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    runner.add_argument("--seeds", type=int, default=11)
    runner.add_argument("--label", default="", help="added to the methods' names, to distinguish versions")
    for command in (runner, commands.add_parser("report")):
        command.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.methods, arguments.seeds, arguments.output, arguments.label)
    else:
        report(arguments.output)


if __name__ == "__main__":
    main()
