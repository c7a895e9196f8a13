"""Random search over a DistributedDataParallel training on handwritten digits; needs no Horovod.

python examples/ddp_digits.py
"""

import argparse
import os
import tempfile

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray import tune
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report


def train(config):
    """Train for `max_epochs`; report accuracy and mean_loss on held-out digits after each epoch."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        epoch = state["epoch"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    while epoch < config["max_epochs"]:
        epoch += 1
        order = torch.randperm(1300, generator=torch.Generator().manual_seed(epoch))[rank::size]
        for batch in order.split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            scores, answers = model.module(images[1300 + rank :: size]), labels[1300 + rank :: size]
            means = torch.stack(
                [F.cross_entropy(scores, answers), (scores.argmax(1) == answers).float().mean()]
            )
        dist.all_reduce(means)
        loss, accuracy = (means / size).tolist()
        with tempfile.TemporaryDirectory() as directory:
            if rank == 0:
                state = {
                    "epoch": epoch,
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(state, os.path.join(directory, "state.pt"))
            report(mean_loss=loss, accuracy=accuracy, epoch=epoch, checkpoint=directory)


def main(num_samples=8, epochs=10, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, backend="torch", num_slots=2),
        name="ddp_digits",
        config={
            "lr": tune.loguniform(1e-3, 1),
            "momentum": tune.uniform(0, 0.95),
            "max_epochs": epochs,
        },
        metric="accuracy",
        mode="max",
        num_samples=num_samples,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="local", help="auto: the Ray cluster that this machine is in")
    address = parser.parse_args().address
    ray.init(address, num_cpus=max(2, os.cpu_count() or 1) if address == "local" else None)
    print("best_config:", main().best_config)
