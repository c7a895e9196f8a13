"""with_parameters: what it refuses, what it ships, and what ranks get."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest
import torch

import horovod_tune
from horovod_tune import DistributedTrainableCreator, with_parameters
from horovod_tune.errors import NotInTraining, SerializationError, TrainingFunctionError
from horovod_tune.function.with_parameters import load_values, pack_values, parameters_of

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])


LOCK = threading.Lock()


def train(config: dict[str, Any], model: Any, name: str = "") -> dict[str, Any]:
    return {"sum": sum(each.sum().item() for each in model.parameters()), "name": name}


def test_called_directly_the_function_gets_the_objects_themselves() -> None:
    def steps(config: dict[str, Any], count: int) -> Any:
        yield from range(count)

    model = torch.nn.Linear(2, 1)
    assert with_parameters(train, model=model, name="a")({})["name"] == "a"
    assert list(with_parameters(steps, count=3)({})) == [0, 1, 2], "a generator function too"


def test_a_function_that_does_not_take_its_parameters_or_is_unsuitable_with_them_is_refused() -> None:
    with pytest.raises(TrainingFunctionError, match=r"cannot be called with \(config, modle=\.\.\.\)"):
        with_parameters(train, modle=1)
    with pytest.raises(TrainingFunctionError, match="checkpoint_dir"):
        with_parameters(lambda config, checkpoint_dir=None, data=None: None, data=1)


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (torch.empty(1, device="meta"), TrainingFunctionError, "must be on the CPU, got one on meta"),
        (LOCK, SerializationError, r".*: it is of type _thread\.lock: .*pickle"),
        ({"of": [LOCK]}, SerializationError, r".* its \['of'\]\[0\], which is of"),
    ],
)
def test_a_parameter_that_cannot_be_sent_is_named(value: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=rf"parameter 'x' {said}"):
        pack_values({"fine": 1, "x": value})


def test_the_function_travels_without_its_objects() -> None:
    bound = with_parameters(train, model=torch.nn.Linear(1000, 1000))
    shipped = cloudpickle.dumps(bound)
    assert len(shipped) < 100_000
    with pytest.raises(NotInTraining, match="were not sent with the function"):
        cloudpickle.loads(shipped)({})


def test_parameters_are_found_below_partial_which_has_the_name_of_its_function() -> None:
    bound = with_parameters(train, model=torch.nn.Linear(1, 1))
    assert parameters_of(partial(bound)) is parameters_of(bound) is not None
    assert parameters_of(train) is None
    below = with_parameters(partial(train, name="a"), model=1)
    assert (below.__name__, below.__module__) == ("train", __name__)


def test_the_objects_are_put_once_into_each_ray_that_they_are_sent_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped = parameters_of(with_parameters(train, model=torch.nn.Linear(1, 1)))
    assert shipped is not None
    numbers = itertools.count(1)
    monkeypatch.setattr("ray.put", lambda packed: next(numbers))
    found = []
    for session in ("first", "first", "second"):
        monkeypatch.setattr("horovod_tune.function.with_parameters._session", lambda session=session: session)
        found.append(shipped.reference())
    assert found == [1, 1, 2]


@pytest.mark.slow
def test_a_function_of_tunes_own_with_parameters_is_refused_with_the_cure(ray_session: Any) -> None:
    from ray import tune

    with pytest.raises(TrainingFunctionError, match=r"use horovod_tune\.with_parameters"):
        DistributedTrainableCreator(partial(tune.with_parameters(train, model=1)))


def test_what_two_parameters_share_stays_shared(tmp_path: Any) -> None:
    shared = torch.ones(3)
    file = tmp_path / "packed"
    file.write_bytes(pack_values({"a": [shared], "b": {"x": shared}, "f": lambda: 7}))
    values = load_values(str(file))
    values["a"][0][0] = 5.0
    assert values["b"]["x"][0] == 5.0 and values["f"]() == 7
    assert torch.equal(load_values(str(file))["a"][0], torch.ones(3)), "the file itself is as it was"


def file_at(address: int) -> str:
    """Return the inode and the name of the file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(each, 16) for each in line.split()[0].split("-"))
        if low <= address < high:
            return " ".join(line.split()[4:6])
    return ""


@pytest.mark.slow
def test_the_ranks_of_a_host_map_one_copy_and_changes_are_their_own(tune_run: Callable[..., Any]) -> None:
    def spoil(config: dict[str, Any], model: Any, array: Any) -> None:
        import torch.distributed as dist

        def gather(value: Any) -> list[Any]:
            values = [None] * dist.get_world_size()
            dist.all_gather_object(values, value)
            return values

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        before = float(model.weight.detach().sum()), float(array.sum())
        dist.barrier()
        with torch.no_grad():
            model.weight.fill_(rank + 1.0)
        array[:] = rank + 1.0
        dist.barrier()
        seen = gather((before, float(model.weight.mean()), float(array.mean())))
        horovod_tune.report(seen=seen, files=gather(file_at(model.weight.data_ptr())))

    model, array = torch.nn.Linear(512, 512), numpy.ones(1000)
    bound = with_parameters(spoil, model=model, array=array)
    analysis = tune_run(
        DistributedTrainableCreator(bound, num_slots=2, backend="torch"),
        num_samples=2,
        max_concurrent_trials=1,
    )
    before = float(model.weight.detach().sum()), 1000.0
    for trial in analysis.trials:
        assert trial.last_result["seen"] == [(before, 1.0, 1.0), (before, 2.0, 2.0)]
        (file,) = set(trial.last_result["files"])
        assert file.endswith("memfd:horovod_tune_parameters"), "one for both ranks"
    assert array.sum() == 1000.0


@pytest.mark.slow
def test_a_function_too_large_to_be_sent_is_an_error_and_its_parameters_may_be_larger(
    tune_run: Callable[..., Any],
) -> None:
    large = torch.zeros(40 << 20)  # 160 MB

    def closes_over(config: dict[str, Any]) -> None:
        horovod_tune.report(size=len(large))

    def takes(config: dict[str, Any], data: Any) -> None:
        horovod_tune.report(size=len(data))

    with pytest.raises(SerializationError, match=r"Pass large objects with horovod_tune\.with_parameters"):
        tune_run(DistributedTrainableCreator(closes_over, num_slots=1))
    trainable = DistributedTrainableCreator(with_parameters(takes, data=large), num_slots=1)
    (trial,) = tune_run(trainable).trials
    assert trial.last_result["size"] == 40 << 20
