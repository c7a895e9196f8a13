"""A trial that shrinks and grows: one of 3 ranks is killed, the others continue, and a new one joins.

python examples/elastic_digits.py
"""

import os
import signal
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits_mlp import connect_to_ray, digits
from ray import tune

from horovod_tune import DistributedTrainableCreator, commit, get_state, report


def train(config):
    hvd.init()
    torch.manual_seed(0)
    images, labels, held_out, answers = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    # The state that the trial committed last: the same on every rank, also on one that has just joined.
    state = get_state()
    epoch, last = 0, config["epochs"]
    if state is not None:
        epoch, last = state["epoch"], state["last"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    while epoch < last:
        epoch += 1
        if hvd.size() < 3:  # train long enough to see a third rank join
            last = min(epoch + 3, 20 * config["epochs"])
        began = time.monotonic()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order[hvd.rank() :: hvd.size()].split(max(1, config["batch_size"] // hvd.size())):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        if epoch == 5 and hvd.rank() == 1 and state is None:
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            accuracy = (model(held_out).argmax(1) == answers).float().mean()
        report(epoch=epoch, accuracy=accuracy.item(), pid=os.getpid(), seconds=time.monotonic() - began)
        # Commit after the report: when the world changes, code after the commit is not reached.
        commit(
            {"epoch": epoch, "last": last, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        )


class ShowWorld(tune.Callback):
    """Prints a line per epoch: the number of ranks, and why it changed."""

    def on_trial_result(self, iteration, trials, trial, result, **info):
        why = result["world_change"] if result["world_changes"] != getattr(self, "changes", 0) else ""
        self.changes = result["world_changes"]
        ranks = "#" * result["world_size"]
        print(
            f"epoch {result['epoch']:3}  ranks {ranks:4} accuracy {result['accuracy']:.3f}  {why}", flush=True
        )


def main(epochs=12, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, num_slots=3, min_workers=2),
        name="elastic_digits",
        config={"lr": 0.1, "batch_size": 96, "epochs": epochs},
        metric="accuracy",
        mode="max",
        storage_path=storage_path,
        callbacks=[ShowWorld()],
        verbose=0,
    )


if __name__ == "__main__":
    connect_to_ray(num_cpus=4, log_to_driver=False)
    print("accuracy:", round(main().best_result["accuracy"], 3))
