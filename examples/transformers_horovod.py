"""A small GPT-2 on two Horovod ranks per trial, trained by Transformers' Trainer and tuned with ASHA.

pip install 'horovod_tune[transformers]'
python examples/transformers_horovod.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from horovod_tune import DistributedTrainableCreator, get_checkpoint, with_parameters


def train(config, text):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from horovod_tune.integrations.transformers import TuneReporterCallback, distribute

    length = 32
    rows = [list(text[i : i + length]) for i in range(0, len(text) - length, length)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    held_out = len(data) // 8
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=length, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="trainer",
            learning_rate=config["lr"],
            per_device_train_batch_size=4,
            num_train_epochs=config["epochs"],
            eval_strategy="epoch",
            save_strategy="no",
            dataloader_drop_last=True,
            dataloader_pin_memory=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data[held_out:],
        eval_dataset=data[:held_out],
        callbacks=[TuneReporterCallback(checkpoint=True)],
    )
    # All ranks train one model, each on its share of the data.
    trainer = distribute(trainer)
    start = get_checkpoint()
    trainer.train(resume_from_checkpoint=start.path if start else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="local", help="address of a Ray cluster; local: start one")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    ray.init(arguments.address, **({"num_cpus": 2} if arguments.address == "local" else {}))
    text = Path(__file__).with_name("tides.txt").read_bytes()
    tuner = tune.Tuner(
        DistributedTrainableCreator(with_parameters(train, text=text), num_slots=2),
        param_space={"lr": tune.loguniform(1e-4, 1e-1), "epochs": arguments.epochs},
        tune_config=tune.TuneConfig(
            metric="eval_loss",
            mode="min",
            num_samples=arguments.samples,
            scheduler=ASHAScheduler(grace_period=1, max_t=arguments.epochs),
        ),
        run_config=tune.RunConfig(
            name="transformers_horovod", checkpoint_config=tune.CheckpointConfig(num_to_keep=1)
        ),
    )
    best = tuner.fit().get_best_result()
    print(f"best evaluation loss {best.metrics['eval_loss']:.3f} with lr={best.config['lr']:.2g}")


if __name__ == "__main__":
    main()
