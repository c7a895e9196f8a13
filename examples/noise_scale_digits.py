"""ASHA ends three of four trials, and the best one gets their CPUs: it grows from 1 rank to 4.

It grows because it can use more samples per step: its batch is far below its gradient noise scale.

python examples/noise_scale_digits.py
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits_mlp import connect_to_ray, digits
from ray import tune
from ray.tune.schedulers import ASHAScheduler, ResourceChangingScheduler

from horovod_tune import DistributedTrainableCreator, commit, get_state, large_batch, report
from horovod_tune.search import DistributeByNoiseScale


def train(config):
    hvd.init()
    torch.manual_seed(0)
    images, labels, held_out, answers = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    # The batch and the rate follow the number of ranks. The noise scale needs two passes, or two ranks.
    setup = large_batch.from_config(
        model, config, num_samples=len(images), elastic=True, noise_scale=large_batch.NoiseScale(every=1)
    )
    state = get_state() or {"epoch": 0, "last": config["epochs"]}
    epoch, last = state["epoch"], state["last"]
    if "model" in state:
        model.load_state_dict(state["model"])
        setup.load_state_dict(state["setup"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    while epoch < last:
        epoch += 1
        if hvd.size() < 4:  # train long enough to see the trial grow
            last = min(epoch + 3, 100 * config["epochs"])
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for passes in setup.batches(order):
            for rows in passes:
                setup.backward(F.cross_entropy(model(images[rows]), labels[rows]), samples=len(rows))
            setup.step()
        with torch.no_grad():
            scores = model(held_out)
            loss = F.cross_entropy(scores, answers).item()
            accuracy = (scores.argmax(1) == answers).float().mean().item()
        report(epoch=epoch, loss=loss, accuracy=accuracy, **setup.metrics())
        commit({"epoch": epoch, "last": last, "model": model.state_dict(), "setup": setup.state_dict()})


class ShowGrowth(tune.Callback):
    """Prints a line when a trial's number of ranks changes."""

    def __init__(self):
        self.sizes = {}

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if self.sizes.get(trial.trial_id) != result["world_size"]:
            self.sizes[trial.trial_id] = result["world_size"]
            facts = f"epoch {result['epoch']:3}  lr {trial.config['lr']:<6} loss {result['loss']:.3f}"
            batch, noise = result["global_batch_size"], result.get("noise_scale", 0)
            print(
                f"{facts}  batch {batch:3}  noise scale {noise:5.0f}  ranks {result['world_size']}",
                flush=True,
            )

    def on_trial_complete(self, iteration, trials, trial, **info):
        print(f"the trial with lr {trial.config['lr']} is over", flush=True)


def main(epochs=20, storage_path=None):
    asha = ASHAScheduler(max_t=100 * epochs, grace_period=2, reduction_factor=2)
    return tune.run(
        DistributedTrainableCreator(train, num_slots=1, min_workers=1),
        name="noise_scale_digits",
        config={
            "lr": tune.grid_search([0.05, 0.001, 0.0001, 0.00001]),
            "local_batch_size": 8,
            "max_micro_batch_size": 4,
            "base_batch_size": 8,
            "schedule": "constant",
            "epochs": epochs,
        },
        metric="loss",
        mode="min",
        scheduler=ResourceChangingScheduler(
            asha,
            DistributeByNoiseScale(max_workers=4, noise_scale="noise_scale", batch_size="local_batch_size"),
        ),
        storage_path=storage_path,
        callbacks=[ShowGrowth()],
        verbose=0,
    )


if __name__ == "__main__":
    connect_to_ray(num_cpus=4, log_to_driver=False)
    print("best_config:", main().best_config)
