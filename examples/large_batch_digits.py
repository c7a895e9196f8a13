"""A search over batch size, learning rate, warm-up and optimiser together, as Horovod's guide lists them.

python examples/large_batch_digits.py
"""

import os
import tempfile

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits_mlp import connect_to_ray, digits
from ray import tune
from ray.tune.search import ConcurrencyLimiter

from horovod_tune import DistributedTrainableCreator, get_checkpoint, large_batch, report
from horovod_tune.search import BayesOptSearch, large_batch_space


def train(config):
    hvd.init()
    torch.manual_seed(0)
    images, labels, held_out, answers = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    setup = large_batch.from_config(model, config, num_samples=len(images))
    checkpoint = get_checkpoint()
    epoch = 0
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        epoch = state["epoch"]
        model.load_state_dict(state["model"])
        setup.load_state_dict(state["setup"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    while epoch < config["epochs"]:
        epoch += 1
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for passes in setup.batches(order):
            for rows in passes:
                setup.backward(F.cross_entropy(model(images[rows]), labels[rows]), samples=len(rows))
            setup.step()
        with torch.no_grad():
            accuracy = (model(held_out).argmax(1) == answers).float().mean()
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                state = {"epoch": epoch, "model": model.state_dict(), "setup": setup.state_dict()}
                torch.save(state, os.path.join(directory, "state.pt"))
            report(accuracy=accuracy.item(), epoch=epoch, checkpoint=directory, **setup.metrics())


def main(num_samples=16, epochs=10, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="large_batch_digits",
        config=large_batch_space(epochs=epochs, global_batch_sizes=[128, 256, 512], base_batch_size=64),
        metric="accuracy",
        mode="max",
        search_alg=ConcurrencyLimiter(BayesOptSearch(random_state=0), max_concurrent=1),
        num_samples=num_samples,
        storage_path=storage_path,
        verbose=1,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().best_config)
