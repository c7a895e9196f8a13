"""The programs that users come with, changed by nothing but what README.md and docs/coming_from.md list.

`guides/` has them as printed: Horovod's guide to Ray Tune, a post on BOHB under Slurm, one on TPUs, and
Accelerate's page on TPUs. They leave out models and data, and need GPUs, TPUs or hours: `Program.stand_ins`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import run_python

ROOT = Path(__file__).resolve().parent.parent
GUIDES = Path(__file__).parent / "guides"


@dataclass(frozen=True)
class Program:
    """`rows` are the left cells of the rows to apply.

    `before` is what a document leaves out, `variant` what it says to change itself.
    """

    files: tuple[str, ...]
    rows: tuple[str, ...]
    before: str = ""
    variant: tuple[tuple[str, str], ...] = ()
    stand_ins: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()


HOROVOD = """
from typing import Dict
import horovod.torch as hvd
import numpy as np
from ray import tune
from horovod_tune import DistributedTrainableCreator
use_gpu = False
class Model:
    def __init__(self, learning_rate): pass
"""
BERT = """
import torch
from accelerate import Accelerator
from ray import tune
from torch.optim import AdamW
from transformers import BertConfig, BertForSequenceClassification
from horovod_tune import DistributedTrainableCreator, with_parameters
hyperparameters = {"train_batch_size": 4, "eval_batch_size": 4, "learning_rate": 0.01, "num_epochs": 1}
class AutoModelForSequenceClassification:
    @staticmethod
    def from_pretrained(name, num_labels):
        size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        return BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=num_labels, **size))
def create_dataloaders(train_batch_size, eval_batch_size):
    row = {"input_ids": torch.arange(5), "labels": torch.tensor(1)}
    return [torch.utils.data.DataLoader([row] * 8, batch_size=train_batch_size)] * 2
"""
CREATOR = "from ray.tune.integration.horovod import DistributedTrainableCreator"
METRIC = "tune.run(trainable, …)"
PROGRAMS = {
    "horovod, first": Program(
        ("horovod_first",),
        (CREATOR, METRIC),
        HOROVOD.replace("from horovod_tune import DistributedTrainableCreator", CREATOR),
        stand_ins=(("time.sleep(1)", "time.sleep(0.01)"),),
    ),
    "horovod, BayesOptSearch": Program(
        ("horovod_bayesopt",),
        (
            CREATOR,
            "from ray.tune.suggest.bayesopt import BayesOptSearch",
            "from ray.tune.suggest import ConcurrencyLimiter",
            "tune.run(training_function, …)",
        ),
        HOROVOD.replace("from horovod_tune import DistributedTrainableCreator", CREATOR),
        stand_ins=(("    ...", "    hvd.init()\n    tune.report(mean_loss=config['lr'])"),),
    ),
    "horovod, the rest": Program(
        ("horovod_gpus", "horovod_grid", "horovod_space", "horovod_results"),
        ("analysis.best_logdir", METRIC),
        HOROVOD
        + """
import horovod_tune
from ray.tune.search import BasicVariantGenerator
algo = BasicVariantGenerator()
def training_function(config):
    hvd.init()
    tune.report(test=1.0)
""",
        stand_ins=(("use_gpu=True)", "use_gpu=False)  # a machine without GPUs"),),
    ),
    "slurm, trainer.py": Program(
        ("slurm_trainer",),
        ("ray.services.get_node_ip_address()",),
        stand_ins=(("range(60)", "range(2)"),),
        arguments=("2",),
    ),
    "slurm, BOHB": Program(
        ("slurm_bohb", "slurm_dataframe"),
        (
            "from ray.tune.suggest.bohb import TuneBOHB",
            "tune.run(train_cgconv, …)",
            'resources_per_trial={"gpu": 1, "cpu": 2}',
            "config_space.add_hyperparameter(…)",
        ),
        """
import argparse
import torch
from horovod_tune import DistributedTrainableCreator
num_epochs, device, loader_train, loader_dev = 3, "cpu", None, None
def my_neural_network(width, classes, conv_dim): return torch.nn.Linear(width, classes)
def train(loader, optimizer, model): return 0.5
def validate(loader, model): return float(model.weight.detach().square().mean())
""",
        stand_ins=(
            # The document's own slips: an indentation, and a function of two names.
            ('   """Trains my', '    """Trains my'),
            ("if __name__", "train_cgconv = train_network\n\nif __name__"),
            (' + ":6379"', ""),
            ("num_samples=100", "num_samples=6"),
            ('"/home/username/', 'os.environ["HOME"] + "/'),
            ("import pandas as pd", "import os, pandas as pd"),
            ("exp_df = exp.dataframe()", "exp_df = exp.dataframe()\nassert len(exp_df) == 6"),
        ),
        arguments=("--ray-address", "ADDRESS"),
    ),
    "tpu, HyperOpt": Program(
        ("tpu_search",),
        ("from ray.tune.suggest.hyperopt import HyperOptSearch", "rt.run(train_fun, …)"),
        """
import functools as ft
from typing import Dict
from ray.tune.schedulers import ASHAScheduler
from ray.tune.suggest.hyperopt import HyperOptSearch
from horovod_tune import DistributedTrainableCreator
""",
        stand_ins=(
            ("use_tpu=True", 'backend="torch", num_slots=2'),  # a machine without TPUs
            ("def run_train(config: Dict):\n    ...", "def run_train(data, config: Dict):"),
            (
                'in config["num_train_epochs"]:\n        ...',
                'in range(int(config["num_train_epochs"]) // 10):',
            ),
            ("eval_loss=...", 'eval_loss=config["learning_rate"] / (epoch + 1)'),
            ("partial(run_train, ...)", 'partial(run_train, "data")'),
            ("    ...\n)", "    num_samples=3,\n)"),
        ),
    ),
    "accelerate, launcher": Program(
        ("accelerate_notebook",),
        ("def training_function():", "notebook_launcher(training_function)"),
        BERT,
    ),
    "accelerate, one model": Program(
        ("accelerate_notebook",),
        ("def training_function(model):", "notebook_launcher(training_function, (model,))"),
        BERT
        + """
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
""",
        variant=(
            ("def training_function():", "def training_function(model):"),
            ("    model = AutoModelForSequenceClassification.from_pretrained", "    # model = "),
            ("notebook_launcher(training_function)", "notebook_launcher(training_function, (model,))"),
        ),
    ),
}


def documented() -> dict[str, str]:
    """Return the right cells of the tables by their left cells; "" for a cell that begins with "nothing"."""
    text = "".join((ROOT / page).read_text() for page in ("README.md", "docs/coming_from.md"))
    rows = re.findall(r"^\| `([^`]+)`[^|]*\| (?:`([^`]+)`|nothing)", text, re.M)
    return dict(rows)


def applied(text: str, then: str, now: str) -> str:
    """Replace code by a row of the documentation, in which "…" is whatever follows."""
    assert then.count("…") == now.count("…") <= 1, then
    then, now = then.partition("…")[0], now.partition("…")[0]
    tokens = re.findall(r"\w+|[^\w\s]", then)
    # White space may be anywhere, but must be between two words.
    pattern = "".join(
        re.escape(one)
        + (r"\s+" if one[-1:].isalnum() and following[:1].isalnum() else r"\s*" if following else "")
        for one, following in zip(tokens, [*tokens[1:], ""], strict=True)
    )
    if not now:
        pattern += r"\s*,?"
    assert re.search(pattern, text), f"{then!r} is not in the program"
    return re.sub(pattern, lambda found: now.rstrip() + (" " if now.endswith(", ") else ""), text)


def replaced(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    for there, instead in changes:
        assert there in text, there
        text = text.replace(there, instead)
    return text


def ported(program: Program) -> str:
    """Return the program as its user has it after the rows of the documentation."""
    printed = "\n".join((GUIDES / f"{name}.txt").read_text() for name in program.files)
    text = program.before + replaced(printed, program.variant)
    for then in program.rows:
        text = applied(text, then, documented()[then])
    return replaced(text, program.stand_ins)


def run(text: str, address: str, tmp_path: Path, *arguments: str) -> Any:
    program = tmp_path / "program.py"
    program.write_text(text)
    own = {"HOME": str(tmp_path), "RAY_ADDRESS": address, "ip_head": address}
    # Its results go below its home, where the Ray's token is not.
    token = {"RAY_AUTH_TOKEN_PATH": f"{Path.home()}/.ray/auth_token"}
    ran = run_python(
        str(program), *arguments, cwd=tmp_path, env={**token, **os.environ, **own}, timeout_s=400
    )
    assert not list(tmp_path.glob("ray_results/*/*/error.txt"))
    return ran


@pytest.mark.example
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_with_the_documented_changes(name: str, ray_session: Any, tmp_path: Path) -> None:
    if "BOHB" in name:
        pytest.importorskip("hpbandster", reason="pip install 'horovod_tune[bohb]'")
    if "HyperOpt" in name:
        pytest.importorskip("hyperopt", reason="pip install 'horovod_tune[hyperopt]'")
    if "accelerate" in name:
        pytest.importorskip("accelerate")
    address = ray_session.get_runtime_context().gcs_address
    arguments = [address if word == "ADDRESS" else word for word in PROGRAMS[name].arguments]
    ran = run(ported(PROGRAMS[name]), address, tmp_path, *arguments)
    assert "instead of" not in ran.stderr, "a hint that a function lacks DistributedTrainableCreator"
    assert name == "slurm, trainer.py" or list(tmp_path.glob("ray_results/*/*/params.json"))


def test_every_program_of_the_documents_is_run() -> None:
    used = {name for program in PROGRAMS.values() for name in program.files}
    assert used == {path.stem for path in GUIDES.glob("*.txt")}


def test_the_rows_that_readme_promises_suffice_for_the_guides_three_programs() -> None:
    text = (ROOT / "README.md").read_text()
    first_five = re.findall(r"^\| `([^`]+)`", text.split("| then | now |")[1], re.M)[:5]
    (promise,) = re.findall(r"Its three programs run with the first (\w+)\s", text)
    assert promise == "five"
    needed = {row for name in ("horovod, first", "horovod, BayesOptSearch") for row in PROGRAMS[name].rows}
    assert needed == set(first_five)


# Syne Tune's program cannot be changed line by line; this is it after the table of docs/coming_from.md.
SYNE_TUNE = """
import sys, types
import ray
from ray import tune
from ray.tune import loguniform, randint
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator
import horovod_tune
from horovod_tune import DistributedTrainableCreator, analyze
from horovod_tune.analysis import plots

def hpo_objective_lenet(config):
    for epoch in range(1, config["max_epochs"] + 1):
        validation_error = 1.0 / epoch + config["learning_rate"]  # d2l's LeNet
        horovod_tune.report(epoch=epoch, validation_error=float(validation_error))

min_number_of_epochs, max_number_of_epochs, eta = 2, 10, 2
config_space = {"learning_rate": loguniform(1e-2, 1), "batch_size": randint(32, 257)}
config_space["max_epochs"] = max_number_of_epochs
initial_config = {"learning_rate": 0.1, "batch_size": 128}
results = tune.run(
    DistributedTrainableCreator(hpo_objective_lenet, num_slots=2),
    config=config_space,
    metric="validation_error",
    mode="min",
    time_budget_s=200,
    num_samples=8,
    scheduler=ASHAScheduler(
        time_attr="epoch",
        max_t=max_number_of_epochs,
        grace_period=min_number_of_epochs,
        reduction_factor=eta,
    ),
    search_alg=BasicVariantGenerator(points_to_evaluate=[initial_config], max_concurrent=2),
)
first = results.trials[0].config
assert (first["learning_rate"], first["batch_size"]) == (0.1, 128)
assert plots.best_so_far(analyze(results)).data
history = analyze(results).history()
lengths = history.groupby("trial_id")["epoch"].max()
assert set(lengths) <= {2, 4, 8, 10} and len(set(lengths)) > 1, lengths
"""


@pytest.mark.example
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_syne_tunes_asha_runs_after_its_table(ray_session: Any, tmp_path: Path) -> None:
    run(SYNE_TUNE, ray_session.get_runtime_context().gcs_address, tmp_path)
