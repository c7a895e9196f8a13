"""In a process that the training function starts, `report()` raises an error with advice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray
from worker_kinds import Workers, skip_unless_installed

from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import CheckpointPlace, Report

pytestmark = [pytest.mark.processes, pytest.mark.slow]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=["gloo", "torch_xla"])
def workers(
    ray_session: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    skip_unless_installed(request.param)
    made = Workers(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


def test_report_in_a_child_process_of_a_rank_is_an_error(workers: Workers, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        import multiprocessing
        import subprocess

        import torch
        from ray import tune

        import horovod_tune

        def ask(call: Any, answers: Any) -> None:
            try:
                call()
                answers.put("nothing was said")
            except Exception as error:
                answers.put(f"{type(error).__name__}: {error}")

        def in_a_fork(call: Any) -> str:
            context = multiprocessing.get_context("fork")
            answers = context.SimpleQueue()
            process = context.Process(target=ask, args=(call, answers))
            process.start()
            answer = str(answers.get())
            process.join()
            return answer

        class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return 1

            def __getitem__(self, index: int) -> str:
                answers = multiprocessing.get_context("fork").SimpleQueue()
                ask(lambda: horovod_tune.report(x=1), answers)
                return str(answers.get())

        loader = torch.utils.data.DataLoader(
            Data(), num_workers=1, batch_size=None, multiprocessing_context="fork"
        )
        script = "import horovod_tune\ntry: horovod_tune.report(x=1)\n"
        script += "except horovod_tune.errors.NotInTraining as error: print('NotInTraining:', error)"
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        horovod_tune.report(
            forked=in_a_fork(lambda: horovod_tune.report(x=1)),
            by_tune=in_a_fork(lambda: tune.report({"x": 1})),
            get_checkpoint=in_a_fork(horovod_tune.get_checkpoint),
            data_loader=next(iter(loader)),
            script=ran.stdout,
        )

    here = ray.get_runtime_context().get_node_id()
    workers.begin(train, start=CheckpointPlace(str(tmp_path), node_id=here))
    report, _ = workers.events()
    assert isinstance(report, Report)
    for how, said in report.metrics.items():
        caller = "get_checkpoint()" if how == "get_checkpoint" else "report()"
        assert said.startswith(f"NotInTraining: {caller} was called in process "), (how, said)
        assert "which the training function of rank 0 (process " in said
        assert "pass the function that it launches to DistributedTrainableCreator" in said
    assert workers.group.end_trial()


def test_a_function_that_launches_processes_itself_fails_with_the_advice(workers: Workers) -> None:
    def inner(ordinal: int) -> None:
        import horovod_tune

        horovod_tune.report(loss=1.0)

    def launches(config: dict[str, Any]) -> None:
        if config["with_torch_xla"]:
            import torch_xla

            torch_xla.launch(inner, start_method="fork")
        else:
            import torch.multiprocessing

            torch.multiprocessing.start_processes(inner, nprocs=2, start_method="fork")

    workers.begin(launches, with_torch_xla=workers.kind == "torch_xla")
    with pytest.raises(TrainingFailed, match=r"(?s)rank \d of \d on .* failed") as caught:
        workers.events()
    with_torch_xla = "the function that you pass to torch_xla.launch"
    otherwise = "pass the function that it launches to DistributedTrainableCreator"
    assert (with_torch_xla if workers.kind == "torch_xla" else otherwise) in str(caught.value)
    assert "in launches" in str(caught.value)
    workers.group.close()
