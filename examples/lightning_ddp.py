"""A Lightning module on two ranks per trial, trained by Lightning's Trainer and tuned with ASHA.

pip install horovod_tune lightning
python examples/lightning_ddp.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch.utils.data import DataLoader, TensorDataset

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report


class Line(pl.LightningModule):
    """Learns y = 3x - 1."""

    def __init__(self, lr):
        super().__init__()
        self.lr, self.layer = lr, torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch, _):
        # The mean over all ranks.
        self.log("val_loss", self.training_step(batch, _), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class TuneReport(pl.Callback):
    """Reports each validation, on every rank, with a checkpoint."""

    def on_validation_end(self, trainer, module):
        if trainer.sanity_checking:
            return
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        with tempfile.TemporaryDirectory() as folder:
            # Every rank calls it, and rank 0 writes.
            trainer.save_checkpoint(Path(folder, "last.ckpt"))
            report(epoch=trainer.current_epoch + 1, **metrics, checkpoint=folder)


def train(config):
    torch.manual_seed(0)
    x = torch.rand(256, 1)
    data = TensorDataset(x, 3 * x - 1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        # The ranks run already: Lightning starts none.
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=config["epochs"],
        callbacks=[TuneReport()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    start = get_checkpoint()
    trainer.fit(
        Line(config["lr"]),
        # Lightning gives each rank its share.
        DataLoader(data, batch_size=16, shuffle=True),
        DataLoader(data, batch_size=64),
        ckpt_path=str(Path(start.path, "last.ckpt")) if start else None,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="local", help="address of a Ray cluster; local: start one")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    ray.init(arguments.address, **({"num_cpus": 2} if arguments.address == "local" else {}))
    tuner = tune.Tuner(
        DistributedTrainableCreator(train, backend="torch", num_slots=2, preload=["lightning.pytorch"]),
        param_space={"lr": tune.loguniform(1e-3, 1e-1), "epochs": arguments.epochs},
        tune_config=tune.TuneConfig(
            metric="val_loss",
            mode="min",
            num_samples=arguments.samples,
            scheduler=ASHAScheduler(max_t=arguments.epochs, grace_period=2),
        ),
    )
    best = tuner.fit().get_best_result()
    print(f"best evaluation loss: {best.metrics['val_loss']:.3f} with a rate of {best.config['lr']:.4f}")


if __name__ == "__main__":
    main()
