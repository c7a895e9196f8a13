"""Tune a small convolutional network on handwritten digits: 2 Horovod ranks per trial, Bayesian optimisation.

python examples/bayesopt_digits.py
python examples/bayesopt_digits.py --num-slots 4 --num-samples 32 --max-concurrent 2 --use-gpu
python examples/bayesopt_digits.py --address auto --num-hosts 3      # on a Ray cluster
python examples/bayesopt_digits.py --resume mine       # the same command again continues the search
"""

import argparse
import os
import tempfile

import horovod.torch as hvd
import numpy as np
import ray
import torch
import torch.nn.functional as F
from ray import tune
from ray.tune.search import ConcurrencyLimiter
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report, resume_or_start
from horovod_tune.search import BayesOptSearch

SPACE = {
    "lr": tune.loguniform(1e-3, 0.5),
    "momentum": tune.uniform(0.0, 0.95),
    "weight_decay": tune.loguniform(1e-6, 1e-2),
    "batch_size": tune.choice([16, 32, 64]),
    "width": tune.lograndint(16, 65),
    "epochs": 12,
}


def digits():
    """Return scikit-learn's 1,797 digits as train, validation and test sets (1,200, 300 and 297 digits)."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16.0, dtype=torch.float32).unsqueeze(1)
    targets = torch.tensor(data.target[order])
    parts = (slice(0, 1200), slice(1200, 1500), slice(1500, None))
    return [TensorDataset(images[part], targets[part]) for part in parts]


class Network(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.convolutions = torch.nn.Sequential(
            torch.nn.Conv2d(1, width, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(width, 2 * width, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
        )
        self.classifier = torch.nn.Linear(8 * width, 10)

    def forward(self, images):
        return self.classifier(self.convolutions(images).flatten(1))


def accuracy(model, dataset, device="cpu"):
    images, targets = dataset[:]
    with torch.no_grad():
        return (model(images.to(device)).argmax(1) == targets.to(device)).float().mean().item()


def train(config):
    """The function to tune, which runs on each rank."""
    hvd.init()
    torch.manual_seed(0)
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = "cuda"
    train_set, validation_set, _ = digits()
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    batches = DataLoader(train_set, batch_size=config["batch_size"], sampler=sampler)
    mine = torch.utils.data.Subset(validation_set, range(hvd.rank(), len(validation_set), hvd.size()))

    model = Network(config["width"]).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config["lr"],
        momentum=config["momentum"],
        weight_decay=config["weight_decay"],
    )
    first_epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(first_epoch, config["epochs"]):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:  # decays to nearly 0, so that the last epoch is the best
            group["lr"] = config["lr"] * (1 - epoch / config["epochs"])
        for images, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
        score = hvd.allreduce(torch.tensor(accuracy(model, mine, device)), name="accuracy").item()
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(directory, "state.pt"))
            report({"accuracy": score, "epoch": epoch}, checkpoint=directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-hosts", type=int, default=1, help="machines that a trial runs on")
    parser.add_argument("--num-slots", type=int, default=2, help="ranks per machine")
    parser.add_argument("--num-samples", type=int, default=24, help="trials")
    parser.add_argument("--max-concurrent", type=int, default=1, help="trials at a time")
    parser.add_argument("--epochs", type=int, default=SPACE["epochs"])
    parser.add_argument("--use-gpu", action="store_true", help="one GPU per rank")
    parser.add_argument("--address", help="address of a Ray cluster, e.g. auto; default: only this machine")
    parser.add_argument("--storage-path", help="where results go, a directory or URI (default ~/ray_results)")
    parser.add_argument("--at-least", type=float, default=0.0, help="fail if the accuracy is below this")
    parser.add_argument("--resume", metavar="NAME", help="continue the experiment of this name, or start it")
    args = parser.parse_args()
    if args.storage_path and "://" not in args.storage_path:
        args.storage_path = os.path.abspath(args.storage_path)

    if args.address:
        ray.init(address=args.address)
    else:
        # A machine with fewer cores than ranks still runs the example: ranks share them.
        ranks = args.num_hosts * args.num_slots * args.max_concurrent
        ray.init("local", num_cpus=max(ranks, os.cpu_count() or 1), include_dashboard=False)

    trainable = DistributedTrainableCreator(
        train, num_hosts=args.num_hosts, num_slots=args.num_slots, use_gpu=args.use_gpu
    )
    search = ConcurrencyLimiter(BayesOptSearch(random_state=1), max_concurrent=args.max_concurrent)
    tuner = (resume_or_start if args.resume else tune.Tuner)(
        trainable,
        param_space={**SPACE, "epochs": args.epochs},
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", search_alg=search, num_samples=args.num_samples
        ),
        run_config=tune.RunConfig(name=args.resume, storage_path=args.storage_path),
    )
    results = tuner.fit()
    if not any("accuracy" in (each.metrics or {}) for each in results):
        parser.exit(1, "no trial has reported an accuracy; the trials' errors are above\n")

    columns = ["accuracy", "training_iteration", *(f"config/{name}" for name in SPACE)]
    table = results.get_dataframe(filter_metric="accuracy", filter_mode="max")
    table = table.sort_values("accuracy", ascending=False)
    print(table[columns].to_string(index=False, float_format="{:.4g}".format))
    best = results.get_best_result()
    print("best_config:", best.config)

    model = Network(best.config["width"])
    with best.get_best_checkpoint("accuracy", "max").as_directory() as directory:
        model.load_state_dict(torch.load(os.path.join(directory, "state.pt"), map_location="cpu")["model"])
    test_set = digits()[2]
    reached = accuracy(model, test_set)
    print(f"accuracy on {len(test_set)} held-out digits: {reached:.1%}")
    if reached < args.at_least:
        parser.exit(1, f"that is less than --at-least {args.at_least}\n")


if __name__ == "__main__":
    main()
