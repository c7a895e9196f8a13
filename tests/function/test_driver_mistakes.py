"""What the driver sees of mistakes with Horovod: an error or a warning that has the line to write."""

from __future__ import annotations

import importlib
import io
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray
import torch
import torch.distributed as dist
from ray import tune

from horovod_tune import DistributedTrainableCreator
from horovod_tune.errors import OutsideTune, SerializationError
from horovod_tune.function import pickling, shipping
from horovod_tune.function.shipping import ShippedFunction
from horovod_tune.function.with_parameters import pack_values

hvd = pytest.importorskip("horovod.torch")


def in_script(source: str) -> Callable[[dict[str, Any]], Any]:
    """Return ``train`` of a script's source: what it defines reaches the ranks as code."""
    script = types.ModuleType("__main__")
    exec(source, script.__dict__)
    train: Callable[[dict[str, Any]], Any] = script.train  # type: ignore[attr-defined]
    return train


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"}, "horovodrun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2"}, "torchrun"),
    ],
)
def test_a_search_is_not_started_by_a_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launcher: str
) -> None:
    monkeypatch.delenv("HOROVOD_TUNE_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        OutsideTune, match=rf"^{launcher} has started 2 copies of this program .* without {launcher}"
    ):
        DistributedTrainableCreator(print, num_slots=2)
    monkeypatch.setenv("HOROVOD_TUNE_RANK", "0:1")  # a rank that imports the script
    assert DistributedTrainableCreator(print, num_slots=2)


def test_a_world_of_the_driver_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = ShippedFunction(in_script("def train(config): pass"), "slips")
    # What hvd.init() and hvd.shutdown() leave.
    monkeypatch.setattr(hvd.global_process_set, "ranks", [0])
    monkeypatch.setattr(shipping, "_has_warned", False)
    with pytest.warns(UserWarning, match=r"hvd\.size\(\) is 1.* Move hvd\.init\(\)") as warned:
        shipped.pickled()
        shipped.pickled()
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("train", "where"),
    [
        (
            "def step(): optimizer.step()\ndef train(config): step()",
            "global variable 'step', global variable 'optimizer'",
        ),
        ("of = {'a': [optimizer]}\ndef train(config): of", "global variable 'of'['a'][0]"),
        (
            "class Of:\n"
            "    def __init__(self): self.own = optimizer\n"
            "    def train(self, config): pass\n"
            "train = Of().train",
            "bound object.own",
        ),
        (
            "class Of: pass\nof = Of()\nof.own = optimizer\ndef train(config): of",
            "global variable 'of'.own",
        ),
    ],
)
def test_an_optimizer_of_the_driver_is_refused_by_name(train: str, where: str) -> None:
    source = (
        "import horovod.torch as hvd, torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "class Kept(torch.optim.SGD): __module__ = 'horovod.torch.optimizer'\n"
        "optimizer = Kept(model.parameters(), lr=0.1)\n"
    )
    # By way of Ray, which replaces the text of a TypeError or a PicklingError.
    text = (
        f"^train cannot be sent .*its {re.escape(where)}, which is of .*: it is an hvd.DistributedOptimizer"
    )
    with pytest.raises(SerializationError, match=text):
        tune.register_trainable("slips", DistributedTrainableCreator(in_script(source + train), num_slots=1))


@pytest.mark.parametrize(
    ("send", "where"),
    [
        (pack_values, r"^parameter 'of' of with_parameters .* its \['a'\]\.own, which"),
        (pickling.refuse_horovod_of_driver, r"^config .* config\['of'\]\['a'\]\.own, which"),
    ],
)
def test_an_optimizer_of_the_driver_is_refused_beside_the_function_too(send, where) -> None:
    kind = type("Kept", (), {"__module__": "horovod.torch.optimizer"})
    with pytest.raises(SerializationError, match=where):
        send({"data": list(range(1000)), "of": {"a": types.SimpleNamespace(own=kind())}})


MESH = "from torch.distributed.device_mesh import init_device_mesh\nmesh = init_device_mesh('cpu', (1,))\n"
SHARDED = f"{MESH}from torch.distributed.fsdp import fully_shard\nmodel = fully_shard(model, mesh=mesh)\n"


@pytest.fixture
def world_of_the_driver() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("made", "where"),
    [
        ("from torch.utils.data import DistributedSampler as D\nof = D(range(8))", "DistributedSampler"),
        (
            "from torch.utils.data import DataLoader, DistributedSampler as D\n"
            "of = DataLoader(range(8), sampler=D(range(8)))",
            ".sampler",
        ),
        (f"{MESH}of = mesh", "DeviceMesh"),
        ("of = torch.distributed.group.WORLD", "ProcessGroup"),
        ("of = torch.nn.SyncBatchNorm(2, process_group=torch.distributed.group.WORLD)", ".process_group"),
        (
            "from torch.distributed.optim import ZeroRedundancyOptimizer as Z\n"
            "of = Z(model.parameters(), torch.optim.SGD, lr=0.1)",
            "ZeroRedundancyOptimizer",
        ),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as F\n"
            "of = F(model, device_id=torch.device('cpu'))",
            "FullyShardedDataParallel",
        ),
        (f"{SHARDED}of = model", "FSDPLinear"),
        (f"{SHARDED}of = torch.optim.SGD(model.parameters(), lr=0.1)", ".param_groups[0]['params'][0]"),
        ("from horovod.torch.elastic import ElasticSampler as E\nof = E.__new__(E)", "ElasticSampler"),
        ("accelerate = need('accelerate')\nof = accelerate.Accelerator(cpu=True)", "Accelerator"),
        ("fabric = need('lightning.fabric')\nof = fabric.Fabric(accelerator='cpu')", "Fabric"),
        (
            "lightning = need('lightning.pytorch')\n"
            "of = lightning.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False)",
            "Trainer",
        ),
    ],
)
def test_what_holds_the_drivers_rank_is_refused_by_name(
    world_of_the_driver: None, made: str, where: str
) -> None:
    """A sampler would give each rank all samples, and a Trainer train each rank alone, without an error."""
    start = "import pytest, torch\nneed = pytest.importorskip\n"
    train = in_script(f"{start}model = torch.nn.Linear(2, 2)\n{made}\ndef train(config): return of\n")
    with pytest.raises(SerializationError, match=r"it was made in the driver.* inside") as caught:
        pickling.dumps(train)
    place, kind = str(caught.value).partition("its global variable ")[2].split(", which is of type ")
    # The part itself is named, and nothing in it.
    named = place.removeprefix("'of'") or kind.partition(": it was made")[0]
    assert named == where or named.endswith(f".{where}")


def test_horovods_functions_are_sent_by_their_names() -> None:
    train = in_script(
        "from horovod.torch import init, rank, size, allreduce\n"
        "def train(config): return init, rank, size, allreduce\n"
    )
    assert cloudpickle.loads(pickling.dumps(train))({}) == (hvd.init, hvd.rank, hvd.size, hvd.allreduce)


def test_a_cached_function_of_the_script_is_sent_whole() -> None:
    train = in_script(
        "import functools\n"
        "@functools.lru_cache(maxsize=7)\n"
        "def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
        "def train(config): return fibonacci\n"
    )
    pickled = pickling.dumps(train)
    fibonacci = cloudpickle.loads(pickled)({})
    assert fibonacci(30) == 832040
    assert fibonacci.cache_parameters()["maxsize"] == 7


@pytest.mark.parametrize("pickler", [cloudpickle, ray.cloudpickle])
def test_a_package_that_is_registered_to_travel_by_value_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickler: Any
) -> None:
    source = "import functools\n@functools.lru_cache\ndef two(): return 2\ndef train(config): return two()\n"
    source += "class Data: pass\n"
    (tmp_path / "of_the_driver").mkdir()
    (tmp_path / "of_the_driver" / "sub.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("of_the_driver.sub")
    shipped = ShippedFunction(module.train, "by value")
    assert shipped.modules() == ["of_the_driver.sub"]
    package = sys.modules["of_the_driver"]
    pickler.register_pickle_by_value(package)
    try:
        assert shipped.modules() == []
        pickled, values = shipped.pickled(), pack_values({"data": module.Data()})
    finally:
        pickler.unregister_pickle_by_value(package)
    monkeypatch.setattr(sys, "path", [])
    for name in ("of_the_driver.sub", "of_the_driver"):
        monkeypatch.delitem(sys.modules, name)
    assert cloudpickle.loads(pickled)({}) == 2
    assert torch.load(io.BytesIO(values), weights_only=False)["data"]
