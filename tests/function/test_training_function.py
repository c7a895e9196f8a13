"""What the factory accepts as a training function, what it refuses, and how it names the function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
import threading
from collections import UserDict
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray
from processes import run_python
from ray import tune

import horovod_tune
from horovod_tune import DistributedTrainableCreator
from horovod_tune.errors import OutsideTune, SerializationError, SpecError, TrainingFunctionError
from horovod_tune.function import pickling, shipping
from horovod_tune.function.training_function import check_config, check_training_function, function_name
from horovod_tune.ray_compat import queries


class Trainer:
    def __init__(self, width=1):
        self.width = width

    def __call__(self, config):
        return None

    def fit(self, config):
        return None


class AsyncTrainer:
    async def __call__(self, config):
        return None


def _train(config):
    return None


def _needs_two(config, data):
    return None


def _old(config, checkpoint_dir=None):
    return None


async def _coroutine(config):
    return None


async def _async_generator(config):
    yield 1


@ray.remote(num_cpus=2)
def _remote(config):
    return None


def test_a_function_without_a_signature_is_accepted():
    check_training_function(max)


def test_what_is_bound_is_not_asked_for_again():
    def train(config, model): ...

    train.__signature__ = inspect.signature(train)  # as decorators set it
    check_training_function(horovod_tune.with_parameters(train, model=1))
    check_training_function(functools.partial(lambda checkpoint_dir, config: None, "/x"))


@pytest.mark.parametrize(
    ("func", "parts"),
    [
        (_needs_two, ["_needs_two(config)", "data"]),
        (functools.partial(_needs_two, more=1), ["_needs_two(config, data)", "functools.partial", "more"]),
        (_old, ["checkpoint_dir", "get_checkpoint()"]),
        (lambda: None, ["lambda(config)"]),
        (_coroutine, ["_coroutine", "coroutine", "asyncio.run()"]),
        (functools.partial(_coroutine), ["_coroutine", "coroutine"]),
        (AsyncTrainer(), ["AsyncTrainer", "coroutine"]),
        (_async_generator, ["_async_generator", "coroutine"]),
        (3, ["func must be a function", "int 3"]),
        (Trainer, ["the class Trainer", "pass one: Trainer(...)"]),
        (_remote, ["_remote is decorated with @ray.remote", "remove the decorator"]),
        (tune.with_resources(lambda config: None, {"cpu": 8, "gpu": 1}), ["num_cpus_per_slot", "'GPU': 1.0"]),
        (tune.with_resources(Trainer().fit, {"cpu": 8}), ["tune.with_resources", "num_slots"]),
        (tune.with_resources(lambda config: None, lambda config: None), ["a function of config", "use_gpu"]),
        (functools.partial(tune.with_resources(lambda config: None, {"cpu": 8})), ["tune.with_resources"]),
    ],
)
def test_what_cannot_be_a_training_function_is_refused_with_the_cure(func, parts):
    with pytest.raises(TrainingFunctionError) as raised:
        check_training_function(func)
    for part in parts:
        assert part in str(raised.value)


def test_resources_are_refused_below_with_parameters_too():
    with pytest.raises(TrainingFunctionError, match="num_cpus_per_slot"):
        horovod_tune.with_parameters(tune.with_resources(lambda config, x: None, {"cpu": 2}), x=1)


def test_a_trainable_is_not_wrapped_twice():
    with pytest.raises(TrainingFunctionError, match="_train, which is already a Tune trainable"):
        DistributedTrainableCreator(DistributedTrainableCreator(_train))


def test_tunes_wrappers_around_the_trainable_are_refused_with_the_cure():
    trainable = DistributedTrainableCreator(_train, num_slots=2)
    with pytest.raises(SpecError, match=r"num_hosts and num_slots .* num_cpus_per_slot"):
        tune.with_resources(trainable, {"cpu": 8})
    with pytest.raises(TrainingFunctionError, match=r"horovod_tune\.with_parameters\(train"):
        tune.with_parameters(trainable, data=1)


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (functools.partial(functools.partial(_needs_two, data=1)), "_needs_two"),
        (lambda config: None, "lambda"),
        (Trainer(), "Trainer"),
        (Trainer().fit, "fit"),
        (functools.partial(Trainer()), "Trainer"),
    ],
)
def test_a_trainable_is_named_after_the_users_own_function(func, name):
    assert function_name(func) == name
    assert DistributedTrainableCreator(func).__name__ == name


def test_the_error_of_a_trainable_without_tune_shows_how_to_run_it(ray_session):
    trainable = DistributedTrainableCreator(_train)
    with pytest.raises(OutsideTune, match=r"tune\.run\(_train, config=\.\.\.\)"):
        trainable({})


@pytest.fixture
def as_in_a_script():
    """Have this module's functions travel by value."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Holder:
    def __init__(self):
        self.name = "a holder"
        self.guard = threading.Lock()


HOLDER = Holder()


def reads_a_global(config):
    return [lambda: HOLDER.name for _ in range(2)]


def _reads_a_closure():
    settings = {"lr": 0.1, "locks": [1, threading.Lock()]}

    def train(config):
        return settings["lr"]

    return train


def _in_a_default(config, lock=threading.Lock()):  # noqa: B008
    return None


def _recursive():
    loop = asyncio.new_event_loop()
    loop.close()

    def helper():
        return loop

    def train(config):
        return helper()

    return train


@pytest.mark.parametrize(
    ("func", "parts"),
    [
        (reads_a_global, ["reads_a_global cannot be sent", "global variable 'HOLDER'.guard", "lock"]),
        (_reads_a_closure(), ["variable 'settings' of the enclosing function['locks'][1]"]),
        (_in_a_default, ["default of the argument 'lock'"]),
        (_recursive(), ["variable 'helper'", "variable 'loop'"]),
        (functools.partial(_needs_two, data=Holder()), ["argument 'data' of functools.partial.guard"]),
        (HOLDER.__class__.__init__.__get__(HOLDER), ["bound object.guard"]),
    ],
)
def test_what_keeps_a_function_from_being_sent_is_named(func, parts, as_in_a_script):
    with pytest.raises(SerializationError) as raised:
        pickling.dumps(func)
    for part in parts:
        assert part in str(raised.value)


WEIGHTS = b"0" * 5000


def _reads_weights():
    return WEIGHTS


def reads_a_large_global(config):
    return _reads_weights()


def test_the_module_of_a_partial_is_its_functions():
    shipped = shipping.ShippedFunction(functools.partial(math.gcd, 2), "a partial")
    assert shipped.modules() == ["math"]


@pytest.mark.parametrize(
    ("func", "parts"),
    [
        (reads_a_large_global, ["global variable '_reads_weights', global variable 'WEIGHTS'", "bytes"]),
        (functools.partial(_needs_two, data=[WEIGHTS]), ["argument 'data' of functools.partial of", "list"]),
        (Trainer(WEIGHTS).fit, ["bound object of type", "Trainer"]),
        (lambda config, parts=(WEIGHTS[:2000], WEIGHTS[:2000]): None, ["argument 'parts'"]),
    ],
)
def test_what_makes_a_function_too_large_to_be_sent_is_named(func, parts, as_in_a_script):
    assert shipping.ShippedFunction(func, "fits", max_bytes=10_000).pickled()
    with pytest.raises(SerializationError) as raised:
        shipping.ShippedFunction(func, "too large", max_bytes=3000).pickled()
    for part in [*parts, "at most 0.0 MB", "with_parameters", function_name(func)]:
        assert part in str(raised.value)


def test_the_bound_of_a_functions_size_is_below_rays_own():
    from ray._private.ray_constants import FUNCTION_SIZE_ERROR_THRESHOLD

    assert queries.most_bytes_of_a_function() > 0.99 * FUNCTION_SIZE_ERROR_THRESHOLD
    assert queries.most_bytes_of_a_function() < FUNCTION_SIZE_ERROR_THRESHOLD


def test_an_object_that_raises_when_it_is_pickled_is_named():
    class Stubborn:
        def __reduce__(self):
            raise KeyError("no")

    stubborn = {"deep": [Stubborn()]}

    def train(config):
        return stubborn

    with pytest.raises(SerializationError, match=r"'stubborn' .*\['deep'\]\[0\].*Stubborn: 'no'"):
        pickling.dumps(train)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"layers": {"sizes": [{1: 64, "last": 10}]}},
            r"of parameter 'layers'\['sizes'\]\[0\] must all .* int, str",
        ),
        ({"lr": 0.1, 1: 2}, "of config must all be strings or all be numbers"),
        ({"weights": {("a", "b"): 1}}, "of parameter 'weights' must all .* tuple"),
    ],
)
def test_a_config_that_tune_cannot_write_is_refused(config: dict[Any, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        check_config(config)
    check_config({"opt/lr": 0.1, "layers": {1: 64, 2.5: [{}]}, "names": {None: 1}})


def test_only_dicts_of_a_config_are_looked_into() -> None:
    """Tune writes Hydra's DictConfigs as text; reading one may raise, for a value that is missing."""

    class Settings(UserDict):  # type: ignore[type-arg]
        def __getitem__(self, name: Any) -> Any:
            raise ValueError(f"{name} is missing")

    check_config({"model": Settings(layers=3)})


@pytest.mark.processes
def test_objects_of_the_config_have_the_classes_that_the_function_knows(tmp_path: Path) -> None:
    """Both arrive by value, the config as Ray sends it."""
    sends = """
import enum, sys
from ray import cloudpickle
from horovod_tune.function.pickling import dumps
class Mode(enum.Enum):
    FAST = 1
def train(config):
    return config["mode"] is Mode.FAST and isinstance(config["mode"], Mode)
open("function", "wb").write(dumps(train))
open("config", "wb").write(cloudpickle.dumps({"mode": Mode.FAST}))
"""
    receives = """
import pickle
function, config = (pickle.load(open(name, "rb")) for name in ("function", "config"))
print(function(config))
"""
    run_python("-c", sends, cwd=tmp_path)
    assert run_python("-c", receives, cwd=tmp_path).stdout.strip() == "True"
