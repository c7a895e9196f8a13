"""The recipe of docs/integrations.md: a LightningModule with manual optimization on Horovod's ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from horovod_tune import DistributedTrainableCreator, get_world, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("pytorch_lightning")

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    hvd.init()

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layer = torch.nn.Linear(1, 1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            hvd.broadcast_parameters(self.state_dict(), root_rank=0)
            return hvd.DistributedOptimizer(optimizer, named_parameters=self.named_parameters())

        def training_step(self, batch: Any, _: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.loss = (self.layer(batch[0]) - 3).square().mean()
            self.manual_backward(self.loss)
            optimizer.step()

        def on_train_epoch_end(self) -> None:
            get_world().check_synchronised(self)
            report(loss=self.loss.item())

    torch.manual_seed(hvd.rank())
    data = TensorDataset(torch.rand(32, 1))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        devices=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=4, sampler=sampler))


def test_a_lightning_module_trains_on_horovods_ranks(tune_run: Callable[..., Any]) -> None:
    (trial,) = tune_run(DistributedTrainableCreator(train, num_slots=2)).trials
    assert trial.last_result["training_iteration"] == 5
    assert trial.last_result["loss"] < 1
