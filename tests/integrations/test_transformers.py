"""A Trainer's evaluations reach Tune from Horovod's ranks, torch_xla's, and those that Accelerate joins."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import ray
from processes import run_python
from worker_kinds import Workers, skip_unless_installed

from horovod_tune.errors import NotSynchronised, SpecError
from horovod_tune.messages import CheckpointPlace, Report

pytestmark = [pytest.mark.slow, pytest.mark.processes]  # but those without a trial start no process

pytest.importorskip("transformers")
from horovod_tune.integrations import transformers  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_trainer(max_steps: int, checkpoint: bool, *, use_cpu: bool = False, **options: Any) -> Any:
    """Make a Trainer of a very small GPT-2 on made-up bytes, which evaluates after every step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from horovod_tune.integrations.transformers import TuneReporterCallback

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    rows = [{"input_ids": [i % 16] * 8, "labels": [i % 16] * 8} for i in range(16)]
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir="trainer",
            use_cpu=use_cpu,
            max_steps=max_steps,
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=1,
            optim="adamw_torch",
            dataloader_pin_memory=False,
            dataloader_drop_last=True,
            report_to="none",
            disable_tqdm=True,
            **{"save_strategy": "no", "per_device_train_batch_size": 2, **options},
        ),
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[TuneReporterCallback(checkpoint=checkpoint)],
    )


def train(config: dict[str, Any]) -> None:
    from horovod_tune import get_checkpoint
    from horovod_tune.integrations.transformers import distribute
    from horovod_tune.session import session

    trainer = distribute(make_trainer(config["steps"], checkpoint=True))
    start = get_checkpoint()
    trainer.train(resume_from_checkpoint=start.path if start else None)
    live = session.current()
    assert live is not None
    at = trainer.state.global_step
    facts = {"reports": live.reports, "trainers_world": trainer.args.world_size, "at": at}
    Path(f"rank_{live.rank_info.rank}.json").write_text(json.dumps(facts))


@pytest.fixture(params=["gloo", "torch", "torch_xla"])
def workers(ray_session: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workers]:
    skip_unless_installed(request.param)
    made = Workers(request.param, tmp_path)
    yield made
    made.close()


def test_every_evaluation_is_one_report_with_its_checkpoint_and_a_trial_continues_from_it(
    workers: Workers, tmp_path: Path
) -> None:
    directory = workers.begin(train, steps=2)
    stored = tmp_path / "stored"
    reports: list[Report] = []
    while isinstance(event := workers.group.next_event(), Report):
        reports.append(event)
        assert event.checkpoint_path is not None
        assert {"model.safetensors", "trainer_state.json"} <= {
            each.name for each in Path(event.checkpoint_path).iterdir()
        }
        if event.index == 1:
            shutil.copytree(event.checkpoint_path, stored)
    assert [each.metrics["step"] for each in reports] == [1, 2]
    assert all(each.metrics["eval_loss"] > 0 for each in reports)
    facts = [json.loads(Path(directory, f"rank_{rank}.json").read_text()) for rank in range(workers.size)]
    joined = 2 if workers.kind == "torch" else 1
    assert facts == [{"reports": 2, "trainers_world": joined, "at": 2}] * workers.size
    assert workers.group.end_trial()
    here = ray.get_runtime_context().get_node_id()
    start = CheckpointPlace(str(stored), node_id=here)
    workers.begin(train, start=start, steps=3)
    steps = [event.metrics["step"] for event in workers.events() if isinstance(event, Report)]
    assert steps == [2, 3]


def test_without_a_trial_accelerates_launch_runs_the_same_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script.write_text(
        f"import sys; sys.path[:0] = {folders!r}\n"
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "import test_transformers\n"
        "trainer = test_transformers.make_trainer(2, checkpoint=True)\n"
        "trainer.train()\n"
        "print('evaluated', sum('eval_loss' in each for each in trainer.state.log_history))\n"
    )
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    ran = run_python(*launch, script, cwd=tmp_path, timeout_s=200)
    assert "evaluated 2" in ran.stdout
    assert ran.stderr.count("this training runs outside a trial") == 1


class Live:
    """A rank's session that keeps the reports: step, metrics with a loss, checkpoint."""

    committed = True

    def __init__(self, rank: int, size: int = 2, start: str = "") -> None:
        self.rank_info, self.start = SimpleNamespace(rank=rank, size=size), start
        self.kept: list[tuple[int, list[str], str | None]] = []

    def get_checkpoint(self) -> Any:
        return SimpleNamespace(path=self.start)

    def report(self, metrics: dict[str, Any], checkpoint: str | None = None) -> None:
        losses = [name for name in metrics if name.endswith("_loss")]
        self.kept.append((metrics["step"], losses, checkpoint and Path(checkpoint).name))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reports_each_evaluation_whatever_the_trainer_saves(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(rank)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("horovod_tune.session.session.current", lambda: live)
    best = {"save_strategy": "best", "metric_for_best_model": "a_loss", "greater_is_better": True}
    trainer = make_trainer(3, True, use_cpu=True, learning_rate=0.1, **best)
    monkeypatch.setattr(transformers, "_trains_by_itself", lambda *_: False)  # `distribute` did the next line
    trainer.args.save_strategy = "best" if rank == 0 else "no"
    trainer.eval_dataset = {"a": trainer.eval_dataset, "b": trainer.eval_dataset}
    trainer.train()
    trainer.evaluate(trainer.eval_dataset["a"])
    trainer.evaluate(trainer.eval_dataset["a"], metric_key_prefix="test")
    both = ["eval_a_loss", "eval_b_loss"]
    # The loss falls, so the first evaluation is the best.
    saved = "checkpoint-1" if rank == 0 else None
    assert live.kept == [(1, both, saved), (2, both, None), (3, both, None), (3, ["eval_loss"], None)]


@pytest.mark.parametrize(("rows", "batch", "accumulated"), [(2, 1, 1), (8, 2, 2), (2, 2, 1)])
def test_a_checkpoint_continues_with_this_trials_rates_if_an_epoch_has_as_many_steps_as_before(
    rows: int, batch: int, accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(rows: int, **options: Any) -> Any:
        trainer = make_trainer(-1, True, use_cpu=True, num_train_epochs=2, **options)
        trainer.train_dataset = trainer.train_dataset[:rows]
        return trainer

    monkeypatch.chdir(tmp_path)
    start = str(tmp_path / "trainer" / "checkpoint-2")
    monkeypatch.setattr("horovod_tune.session.session.current", lambda: Live(0, size=1, start=start))
    made(4, learning_rate=1e-3, weight_decay=0.1).train()  # of two steps per epoch
    steps = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": batch}
    rates = {"learning_rate": 1e-2, "weight_decay": 0.3, "lr_scheduler_type": "constant"}
    trainer = made(rows, **steps, **rates)
    if rows == batch * accumulated:
        with pytest.raises(SpecError, match=r"1 epochs in 2 steps, got one with 1 steps per epoch"):
            trainer.train(resume_from_checkpoint=start)
        return
    trainer.train(resume_from_checkpoint=start)
    groups = [(group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups]
    assert groups == [(pytest.approx(1e-2), 0.3), (pytest.approx(1e-2), 0.0)]
    assert trainer.state.global_step == 4


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The names that this rank, the second of two, broadcasts; the other rank's gradients are zeros."""
    names: list[list[str]] = []
    hvd = SimpleNamespace(
        init=lambda: None,
        rank=lambda: 1,
        size=lambda: 2,
        Average=None,
        broadcast_parameters=lambda tensors, root_rank: names.append(list(tensors)),
        grouped_allreduce_=lambda tensors, **_: [each.div_(2) for each in tensors],
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("horovod_tune.session.session.current", lambda: Live(1))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    horovod = pytest.importorskip("horovod")
    monkeypatch.setattr(horovod, "torch", hvd, raising=False)
    return names


def test_ranks_evaluate_with_rank_0s_buffers(sent: list[list[str]]) -> None:
    import torch

    trainer = make_trainer(2, False, use_cpu=True)
    trainer.model.register_buffer("mean", torch.zeros(1))
    trainer.model.register_buffer("mask", torch.zeros(1, dtype=torch.bool))
    transformers.distribute(trainer).train()
    trainer.evaluate()
    assert {"mean", "mask"} < set(sent[0]) and sent[1:] == [["mean"]] * 2


def test_a_trainer_is_distributed_once_and_each_by_itself(sent: list[list[str]]) -> None:
    trainer = make_trainer(1, False, use_cpu=True)
    assert transformers.distribute(transformers.distribute(trainer)) is trainer
    assert len(trainer.train_dataset) == 8
    trainer.train()
    other = make_trainer(1, False, use_cpu=True)
    other.args = trainer.args
    with pytest.raises(NotSynchronised, match=r"trainer = distribute\(trainer\)"):
        other.train()
    other.model.bfloat16()
    with pytest.raises(TypeError, match=r"'transformer\.wte\.weight', which is bfloat16: load .*float32"):
        transformers.distribute(other).train()


def test_a_gradient_that_any_rank_has_is_on_all(
    sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def add_to_last(tensors: list[Any], **_: Any) -> None:
        tensors[-1].add_(torch.tensor([0.0, 1.0, 0.0])).div_(2)  # The other rank has the second.

    monkeypatch.setattr(sys.modules["horovod.torch"], "grouped_allreduce_", add_to_last)
    layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    (layers[0].weight * 0).sum().backward()
    transformers._average_gradients(layers)
    assert [each.weight.grad is not None for each in layers] == [True, True, False]


def test_only_rank_0_saves_and_logs(sent: list[list[str]], tmp_path: Path) -> None:
    trainer = transformers.distribute(make_trainer(1, False, use_cpu=True))
    assert not trainer.is_local_process_zero() and not trainer.state.is_local_process_zero
    trainer.save_model("model")
    trainer.save_state()
    assert not list(tmp_path.rglob("*.*"))


def test_horovods_ranks_train_one_model_on_their_shares_of_the_data(ray_session: Any, tmp_path: Path) -> None:
    skip_unless_installed("gloo")
    workers = Workers("gloo", tmp_path)

    def train_and_compare(config: dict[str, Any]) -> None:
        import horovod.torch as hvd
        import torch

        from horovod_tune import get_world
        from horovod_tune.errors import NotSynchronised
        from horovod_tune.integrations.transformers import distribute

        trainer = make_trainer(3, False)
        with pytest.raises(NotSynchronised, match=r"trainer = distribute\(trainer\)"):
            trainer.train()
        with torch.no_grad():
            next(trainer.model.parameters()).add_(float(get_world().rank))
        trainer = distribute(trainer)
        hvd.init()
        with pytest.raises(
            NotSynchronised, match=r"parameter 'transformer\.wte\.weight' of the model differs"
        ):
            get_world().check_synchronised(trainer.model)
        trainer.train()
        get_world().check_synchronised(trainer.model)
        rows = hvd.allgather_object([row["input_ids"][0] for row in trainer.train_dataset])
        assert sorted(rows[0] + rows[1]) == list(range(16))

    workers.begin(train_and_compare)
    reports = [event for event in workers.events() if isinstance(event, Report)]
    assert [each.metrics["step"] for each in reports] == [1, 2, 3]
    workers.close()
