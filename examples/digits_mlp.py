"""The function that the algorithm examples tune: a small network on handwritten digits, on Horovod ranks.

It is a plain Horovod training function that resumes from its checkpoint, so that schedulers can pause,
resume and clone its trials.
"""

import argparse
import os
import tempfile

import horovod.torch as hvd
import ray
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from horovod_tune import get_checkpoint, report


def connect_to_ray(num_cpus=None, **settings):
    """Connect to the Ray cluster at `--address`, or start one on this machine; print how large it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="local", help="auto: the Ray cluster that this machine is in")
    address = parser.parse_args().address
    # Only a cluster that starts here takes num_cpus. On a machine with one CPU, two ranks share it.
    local_cpus = num_cpus or max(2, os.cpu_count() or 1)
    ray.init(address, num_cpus=local_cpus if address == "local" else None, **settings)
    nodes = sum(node["Alive"] for node in ray.nodes())
    print(f"Ray at {address}: {nodes} node(s), {ray.cluster_resources().get('CPU', 0):.0f} CPUs")


def digits():
    """Return images, labels, held-out images and held-out labels, shapes (1300, 64), (1300,), …"""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return images[:1300], labels[:1300], images[1300:], labels[1300:]


def train(config):
    """Train for `max_epochs` (10); report accuracy and mean_loss on held-out digits after each epoch."""
    hvd.init()
    torch.manual_seed(0)
    images, labels, held_out, answers = digits()
    mine = slice(hvd.rank(), None, hvd.size())
    model = torch.nn.Sequential(
        torch.nn.Linear(64, config.get("width", 32)),
        torch.nn.ReLU(),
        torch.nn.Linear(config.get("width", 32), 10),
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config["lr"],
        momentum=config.get("momentum", 0.9),
        weight_decay=config.get("weight_decay", 0.0),
    )
    epoch = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        epoch = state["epoch"]
        model.load_state_dict(state["model"])
        # Only the momentum is restored: population based training may have changed the learning rate.
        optimizer.load_state_dict(
            {**state["optimizer"], "param_groups": optimizer.state_dict()["param_groups"]}
        )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    while epoch < config.get("max_epochs", 10):
        epoch += 1
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))[mine]
        for batch in order.split(int(config.get("batch_size", 64))):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            scores = model(held_out[mine])
            loss = F.cross_entropy(scores, answers[mine])
            accuracy = (scores.argmax(1) == answers[mine]).float().mean()
        metrics = {
            "mean_loss": hvd.allreduce(loss, name="loss").item(),
            "accuracy": hvd.allreduce(accuracy, name="accuracy").item(),
            "epoch": epoch,
        }
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, os.path.join(directory, "state.pt"))
            report(metrics, checkpoint=directory)
