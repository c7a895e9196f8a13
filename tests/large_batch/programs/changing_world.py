"""Runs in each process of test_worlds.py: one training through worlds of 3, 2 and 3 ranks.

The objects stay; `follow_world` is all that is called after a world has changed.
"""

from __future__ import annotations

import json
import os

import horovod.torch as hvd
import torch

from horovod_tune.large_batch import BatchGrowth, FixedGrowth, from_config

torch.set_num_threads(1)
SAMPLES = 60
ROWS = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CONFIG = {
    "lr": 0.05,
    "epochs": 9,
    "base_batch_size": 8,
    "warmup_epochs": 2,
    "warmup_start": 0.5,
    "scaling": "linear",
}
CONFIG |= {"max_micro_batch_size": 4, "max_norm": 5.0}


def new_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)]
    return torch.nn.Sequential(*layers).double()


class Training:
    """With ``global_batch_size`` or ``local_batch_size``; the batch doubles in the third epoch."""

    def __init__(self, **batch: int) -> None:
        self.model = new_model()
        self.setup = from_config(self.model, {**CONFIG, **batch}, num_samples=SAMPLES, elastic=True)
        self.growth = BatchGrowth(FixedGrowth([3]), self.setup.batch, max_global_batch_size=64)
        self.epochs = 0

    def train(self, epochs: int) -> list[dict[str, float]]:
        found = []
        for _ in range(epochs):
            self.epochs += 1
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epochs))
            for passes in self.setup.batches(order):
                for part in passes:
                    loss = (self.model(ROWS[part]) - ROWS[part].sum(1, keepdim=True)).square().mean()
                    self.setup.backward(loss, samples=len(part))
                self.setup.step()
            self.growth.update()
            weights = float(sum((each.detach() ** 2).sum() for each in self.model.parameters()))
            split = self.setup.split
            found.append({"weights": weights, "passes": split.passes, "world": split.world_size})
            found[-1] |= self.setup.metrics()
        return found


def enter(number: int) -> bool:
    """Enter a world of those that the test has prepared; return whether it has a place for this process."""
    size, port = json.loads(os.environ["WORLDS"])[number]
    os.environ |= {"HOROVOD_SIZE": str(size), "HOROVOD_LOCAL_SIZE": str(size)}
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
    if int(os.environ["HOROVOD_RANK"]) >= size:
        return False
    hvd.init()
    return True


results: dict[str, object] = {}
if os.environ["HOROVOD_RANK"] == "0":
    # Alone, with the whole batch, before there is a world.
    results["alone"] = Training(global_batch_size=20).train(9)
trainings: dict[str, Training] = {}
for world in range(3):
    if not enter(world):
        continue
    if world == 0:
        trainings = {"global": Training(global_batch_size=20), "local": Training(local_batch_size=8)}
    for name, training in trainings.items():
        if world > 0:
            training.setup.follow_world()
        if world == 2:
            # The third process missed an epoch: it takes up what the first has, as after a commit.
            state = [training.epochs, training.model.state_dict(), training.setup.state_dict()]
            state = hvd.broadcast_object([*state, training.growth.state_dict()], root_rank=0)
            training.epochs = state[0]
            training.model.load_state_dict(state[1])
            training.setup.load_state_dict(state[2])
            training.growth.load_state_dict(state[3])
        results.setdefault(name, []).extend(training.train(3))
        if training.setup.split.passes > 1:  # A group that the world does not live to finish.
            training.setup.backward(training.model(ROWS[:2]).sum(), samples=2)
    hvd.shutdown()
print(json.dumps(results), flush=True)
