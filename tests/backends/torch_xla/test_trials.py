"""Real trials of real torch_xla on its CPU device: search, schedulers, checkpoints, deaths."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import last_results, rank_processes, see_them_gone, template_processes
from ray import tune

import horovod_tune
from horovod_tune import DistributedTrainableCreator
from horovod_tune.function.with_parameters import with_parameters

pytest.importorskip("torch_xla")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("ray_session")


def train(config: dict[str, Any]) -> None:
    """Bring one weight to 1 with torch_xla's own tools; reports every step, with a checkpoint if asked."""
    import tempfile

    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    weight = torch.zeros(1)
    step = 0
    checkpoint = horovod_tune.get_checkpoint()
    if checkpoint is not None:
        state = torch.load(Path(checkpoint.path, "state.pt"))
        weight, step = state["weight"], state["step"]
        assert weight.device.type == "cpu"
    weight = weight.to(device).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=config["lr"])
    while step < config["steps"]:
        loss = ((weight - 1) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        step += 1
        metrics = {"loss": loss.item(), "step": step, "process": os.getpid()}
        if not config.get("save"):
            horovod_tune.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            xm.save({"weight": weight.detach(), "step": step}, Path(directory, "state.pt"))
            horovod_tune.report(metrics, checkpoint=directory)
        if step == config.get("dies_after"):
            marker = Path(f"{config['marker']}{config['signal']}")
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), config["signal"])


def test_asha_searches_and_stops_trials_at_their_report(
    tune_run: Callable[..., Any],
) -> None:
    from ray.tune.schedulers import ASHAScheduler

    analysis = tune_run(
        DistributedTrainableCreator(train, use_tpu=True),
        config={"lr": tune.grid_search([0.4, 0.01, 0.001]), "steps": 6},
        metric="loss",
        mode="min",
        scheduler=ASHAScheduler(max_t=6, grace_period=2, reduction_factor=3),
        max_concurrent_trials=1,
    )
    assert analysis.best_config["lr"] == 0.4
    assert [result["step"] for result in last_results(analysis)] == [6, 2, 2]
    assert [result["training_iteration"] for result in last_results(analysis)] == [6, 2, 2]
    assert len({result["process"] for result in last_results(analysis)}) == 3


def test_a_trial_whose_process_died_continues_from_its_checkpoint(
    tune_run: Callable[..., Any], tmp_path: Path
) -> None:
    numbers = [signal.SIGKILL, signal.SIGSEGV]
    analysis = tune_run(
        DistributedTrainableCreator(train, use_tpu=True),
        config={
            "lr": 0.1,
            "steps": 5,
            "save": True,
            "dies_after": 3,
            "signal": tune.grid_search([int(number) for number in numbers]),
            "marker": str(tmp_path / "died_by_"),
        },
        max_failures=1,
        max_concurrent_trials=1,
    )
    said_of = {signal.SIGKILL: "memory", signal.SIGSEGV: "lack of memory"}
    for trial, number in zip(analysis.trials, numbers, strict=True):
        assert (trial.last_result["step"], trial.last_result["training_iteration"]) == (5, 5)
        text = Path(trial.error_file).read_text()
        assert "rank 0 of 1" in text and f"was ended by {number.name}" in text and said_of[number] in text


def own_functions(model: Any) -> dict[str, Any]:
    from ray import tune

    context = tune.get_context()
    assert tune.get_checkpoint() is None
    return {"id": context.get_trial_id(), "name": context.get_experiment_name()}


def count_compilations(model: Any) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics

    x = torch.ones(8, 8, device=torch_xla.device())
    y = (x @ x).relu().sum() * 3
    torch_xla.sync(wait=True)
    return {
        "value": y.item(),
        "compiled": metrics.counter_value("UncachedCompile") or 0,
    }


def spoil(model: Any) -> dict[str, Any]:
    import torch
    import torch_xla

    before = model.weight.sum().item()
    with torch.no_grad():
        model.weight.zero_()
    moved = model.to(torch_xla.device())
    return {"before": before, "after": moved.weight.sum().item()}


def autocast(model: Any) -> dict[str, Any]:
    import torch
    import torch_xla

    device = torch_xla.device()
    model = torch.nn.Linear(4, 4).to(device)
    x = torch.ones(2, 4, device=device)
    with torch.autocast("xla", dtype=torch.bfloat16):
        cast = model(x).dtype
    return {"autocast": str(cast), "model": str(model.to(torch.bfloat16)(x.bfloat16()).dtype)}


def in_old_bf16(model: Any) -> dict[str, Any]:
    os.environ["XLA_USE_BF16"] = "1"
    return more_than_one(model)


def more_than_one(model: Any) -> dict[str, Any]:
    import torch
    import torch_xla

    x = torch.tensor([1.0 + 2**-10], device=torch_xla.device())
    return {"more_than_one": (x * 1.0).item() > 1.0}


CASES = {
    each.__name__: each for each in (own_functions, count_compilations, spoil, autocast, in_old_bf16)
} | {"more_than_one": more_than_one}
# One trial after another: none finds what those before it have left.
ORDER = [
    "own_functions",
    *("count_compilations", "spoil") * 2,
    "autocast",
    "in_old_bf16",
    "more_than_one",
]


@pytest.fixture(scope="module")
def model() -> Any:
    import torch

    return torch.nn.Linear(4, 4)


@pytest.fixture(scope="module")
def trials(ray_session: Any, model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The trials of ORDER in one experiment, by name."""

    def run(config: dict[str, Any], model: Any) -> None:
        name = ORDER[config["number"]]
        horovod_tune.report(CASES[name](model), case=name)

    analysis = tune.run(
        DistributedTrainableCreator(with_parameters(run, model=model), use_tpu=True),
        config={"number": tune.grid_search(list(range(len(ORDER))))},
        max_concurrent_trials=1,
        storage_path=str(tmp_path_factory.mktemp("cases")),
        name="experiment",
        verbose=0,
    )
    found: dict[str, list[Any]] = {}
    for name, trial in zip(ORDER, analysis.trials, strict=True):
        found.setdefault(name, []).append(trial)
        assert trial.last_result.get("case") == name, trial.error_file
    return found


def results_of(trials: dict[str, list[Any]], name: str) -> list[dict[str, Any]]:
    return [trial.last_result for trial in trials[name]]


def test_ray_tunes_own_functions_work_in_an_xla_process(trials: dict[str, list[Any]]) -> None:
    (trial,) = trials["own_functions"]
    assert (trial.last_result["id"], trial.last_result["name"]) == (trial.trial_id, "experiment")


def test_a_trial_compiles_its_graphs(trials: dict[str, list[Any]]) -> None:
    """The CPU device reads none from the disk, see `test_compile_cache.py`."""
    for each in results_of(trials, "count_compilations"):
        assert each["value"] == 8 * 8 * 8 * 3 and each["compiled"] >= 1


def test_a_model_made_outside_reaches_the_ranks_and_is_whole_for_the_next_trial(
    trials: dict[str, list[Any]], model: Any
) -> None:
    expected = model.weight.sum().item()
    assert [(each["before"], each["after"]) for each in results_of(trials, "spoil")] == [(expected, 0.0)] * 2


def test_bf16_by_the_models_type_and_by_autocast(trials: dict[str, list[Any]]) -> None:
    (result,) = results_of(trials, "autocast")
    assert result["autocast"] == result["model"] == "torch.bfloat16"


def test_a_trial_that_switches_bf16_on_for_its_process_does_not_switch_it_on_for_the_next(
    trials: dict[str, list[Any]],
) -> None:
    (in_bf16,), (after,) = results_of(trials, "in_old_bf16"), results_of(trials, "more_than_one")
    assert (in_bf16["more_than_one"], after["more_than_one"]) == (False, True)


def test_two_ranks_in_one_process_as_on_a_tpu_v3_report_once(
    tune_run: Callable[..., Any], tmp_path: Path
) -> None:
    def two_devices(config: dict[str, Any]) -> None:
        import torch
        import torch_xla
        import torch_xla.runtime as xr

        x = torch.ones(2, device=torch_xla.device()) * (xr.global_ordinal() + 1)
        for _ in range(2):
            horovod_tune.report(
                ordinal=xr.global_ordinal(), world=xr.world_size(), value=x.sum().item(), process=os.getpid()
            )
        seen = Path(config["folder"], f"{config['number']}_{xr.global_ordinal()}")
        seen.write_text(f"{os.getpid()} {torch_xla.device()}")

    def init(trial: Any, *arguments: Any, **keywords: Any) -> None:
        from horovod_tune.backends.torch_xla.topology import LaunchPlan
        from horovod_tune.backends.torch_xla.xla_launcher import XlaLauncher

        # The CPU as two devices of one process; they dead-lock in a collective, so there is none here.
        plan = LaunchPlan(environment={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"})
        XlaLauncher._plans = lambda self, facts: [plan]  # type: ignore[method-assign]
        trainable.__init__(trial, *arguments, **keywords)

    trainable = DistributedTrainableCreator(two_devices, use_tpu=True)
    two = type("two", (trainable,), {"__init__": init})
    analysis = tune_run(
        two,
        config={"folder": str(tmp_path), "number": tune.grid_search([0, 1])},
        max_concurrent_trials=1,
        reuse_actors=True,
    )
    processes = set()
    for number, result in enumerate(last_results(analysis)):
        assert (result["ordinal"], result["world"], result["training_iteration"]) == (0, 2, 2)
        assert result["value"] == 2.0
        seen = [(tmp_path / f"{number}_{ordinal}").read_text().split() for ordinal in (0, 1)]
        assert {device for _, device in seen} == {"xla:0", "xla:1"}
        processes |= {process for process, _ in seen}
    assert len(processes) == 2


def test_when_an_experiment_has_ended_no_process_of_it_stays(ray_session: Any) -> None:
    see_them_gone([*template_processes(), *rank_processes()])
