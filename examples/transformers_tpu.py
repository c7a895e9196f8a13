"""HyperOpt and ASHA tune a small Hugging Face transformer, with one XLA process per TPU chip.

pip install 'horovod_tune[tpu,transformers,hyperopt]' 'transformers>=5'
python examples/transformers_tpu.py --address auto        on TPU hosts, in a Ray cluster of them
PJRT_DEVICE=CPU python examples/transformers_tpu.py       anywhere, on torch_xla's CPU device

The model is built from a configuration and trained on the bytes of tides.txt: nothing is downloaded.
"""

import argparse
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from horovod_tune import DistributedTrainableCreator, get_checkpoint, with_parameters
from horovod_tune.search import HyperOptSearch

SPACE = {
    "learning_rate": tune.loguniform(1e-6, 1e-2),
    "warmup_ratio": tune.uniform(0, 0.1),
    "num_train_epochs": tune.uniform(2, 5),
}
WINDOW_BYTES = 64


def train(config, text):
    """Train a 2-layer GPT-2 on the first nine tenths of ``text``, and evaluate on the rest at every epoch."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from horovod_tune.integrations.transformers import TuneReporterCallback

    data = windows_of(text)
    border = len(data) * 9 // 10
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=WINDOW_BYTES,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="trainer",
            learning_rate=config["learning_rate"],
            warmup_steps=config["warmup_ratio"],  # a value below 1 is a fraction of all steps
            num_train_epochs=config["num_train_epochs"],
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            optim="adamw_torch",  # the fused kernels do not support XLA tensors
            dataloader_pin_memory=False,
            dataloader_drop_last=True,  # one shape, so that XLA compiles one graph
            eval_strategy="epoch",
            logging_strategy="epoch",
            save_strategy="no",  # the callback requests a save at each evaluation
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data[:border],
        eval_dataset=data[border:],
        callbacks=[TuneReporterCallback(checkpoint=True)],
    )
    start = get_checkpoint()
    trainer.train(resume_from_checkpoint=start.path if start else None)


def windows_of(text):
    """Cut a text into windows of WINDOW_BYTES bytes, each of which overlaps the next by half."""
    data = list(text.encode())
    starts = range(0, len(data) - WINDOW_BYTES, WINDOW_BYTES // 2)
    return [{"input_ids": data[i : i + WINDOW_BYTES], "labels": data[i : i + WINDOW_BYTES]} for i in starts]


def main(num_hosts=None, num_slots=None, tpu_type=None, time_budget_s=300, num_samples=-1, storage_path=None):
    text = (Path(__file__).parent / "tides.txt").read_text()
    return tune.run(
        DistributedTrainableCreator(
            with_parameters(train, text=text),
            use_tpu=True,
            num_hosts=num_hosts,
            num_slots=num_slots,
            tpu_type=tpu_type,
        ),
        name="transformers_tpu",
        config=SPACE,
        metric="eval_loss",
        mode="min",
        time_budget_s=time_budget_s,
        num_samples=num_samples,
        search_alg=HyperOptSearch(metric="eval_loss", mode="min"),
        scheduler=ASHAScheduler(max_t=5, grace_period=1, reduction_factor=2),
        storage_path=storage_path,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-hosts", type=int, help="hosts of a TPU slice that a trial takes (default: 1)")
    parser.add_argument("--num-slots", type=int, help="chips of a host that a trial takes (default: all)")
    parser.add_argument("--tpu-type", help="the type of slice that a trial takes, such as v4-32")
    parser.add_argument("--time-budget-s", type=float, default=300)
    parser.add_argument("--num-samples", type=int, default=-1)
    parser.add_argument(
        "--address", default="local", help="address of a Ray cluster, e.g. auto; local: start one"
    )
    arguments = parser.parse_args()
    ray.init(address=arguments.address)
    analysis = main(
        arguments.num_hosts,
        arguments.num_slots,
        arguments.tpu_type,
        arguments.time_budget_s,
        arguments.num_samples,
    )
    print("best_config:", analysis.best_config)
    print("eval_loss:", analysis.best_result["eval_loss"])
