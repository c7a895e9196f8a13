"""Training functions that leave something in their process; each reports what a new process would show.

`PROGRAMS[name](config)` returns what the trial reports. In a new process it is the same each time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS: dict[str, Callable[[dict[str, Any]], Any]] = {}

# Modules that programs import, by their path in a folder of the test's.
MODULES = {
    "site-packages/trainpkg/__init__.py": (
        "import functools\nimport torch\nSTEP = 0\nHISTORY = []\n"
        "@functools.lru_cache(None)\ndef get_model(width):\n"
        "    torch.manual_seed(0)\n    return torch.nn.Linear(width, 1)\n"
    ),
    "site-packages/closurepkg.py": (
        "def _make():\n    count = [0]\n    def step():\n        count[0] += 1\n        return count[0]\n"
        "    return step\nstep = _make()\n"
    ),
    "site-packages/registry_a/__init__.py": "NAMES = {}\nfrom registry_a import more\n",
    "site-packages/registry_a/more.py": (
        "import registry_a\ndef register(name):\n"
        "    if name in registry_a.NAMES: raise ValueError('already registered')\n"
        "    registry_a.NAMES[name] = 1\n"
    ),
    "beside/myops.py": (
        "import torch\nlib = torch.library.Library('outside_d', 'DEF')\n"
        "lib.define('twice(Tensor x) -> Tensor')\n"
        "@torch.library.impl(lib, 'twice', 'CompositeExplicitAutograd')\ndef twice(x): return 2 * x\n"
    ),
}


# Those of its folders that are on a trial's path.
FOLDERS = ("site-packages", "beside")


def write_modules(folder: Path) -> None:
    for name, text in MODULES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def program(function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    PROGRAMS[function.__name__] = function
    return function


def run(config: dict[str, Any]) -> None:
    """Run the program that the configuration names, and report what it has seen and its process."""
    from horovod_tune import report

    sys.path[:0] = [os.path.join(config["modules"], name) for name in FOLDERS]
    report(seen=repr(PROGRAMS[config["program"]](config)), pid=os.getpid())


@program
def wraps_a_function_of_torch(config):
    import torch

    clip = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = lambda parameters, norm: clip(parameters, norm * 2)
    weight = torch.nn.Parameter(torch.ones(4))
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 0.2)
    return weight.grad.tolist()


@program
def replaces_a_function_by_a_partial_of_it(config):
    import functools

    import torch

    seen = type(torch.load).__name__
    torch.load = functools.partial(torch.load, weights_only=False)
    return seen


@program
def uses_an_installed_package_with_state(config):
    import trainpkg

    model = trainpkg.get_model(2)
    seen = trainpkg.STEP, len(trainpkg.HISTORY), round(model.weight.sum().item(), 4)
    trainpkg.STEP += 1
    trainpkg.HISTORY.append(1)
    model.weight.data.zero_()
    return seen


@program
def uses_an_installed_package_with_a_closure(config):
    import closurepkg

    return closurepkg.step()


@program
def registers_in_an_installed_package(config):
    from registry_a.more import register

    register("mine")
    return True


@program
def registers_an_operator(config):
    import myops
    import torch

    return torch.ops.outside_d.twice(torch.ones(1)).tolist(), bool(myops)


@program
def registers_a_tree_node(config):
    import torch.utils._pytree as pytree

    class Pair:
        pass

    pytree.register_pytree_node(Pair, lambda p: ([], None), lambda c, x: Pair(), serialized_type_name="pair")
    return True


@program
def sets_the_fusion_threshold(config):
    import horovod.torch as hvd
    import torch

    os.environ["HOROVOD_FUSION_THRESHOLD"] = str((config["number"] + 1) << 20)
    hvd.init()
    for _ in range(3):
        hvd.grouped_allreduce([torch.ones(10), torch.ones(20)], name="grads")
    return True


@program
def writes_a_timeline(config):
    import horovod.torch as hvd
    import torch

    os.environ["HOROVOD_TIMELINE"] = "timeline.json"
    hvd.init()
    hvd.allreduce(torch.ones(3), name="x")
    return os.path.exists("timeline.json")


@program
def arms_a_watchdog(config):
    import faulthandler
    import time

    if config["number"] == 0:
        faulthandler.dump_traceback_later(1.5, exit=True)
    else:
        time.sleep(2)
    return True


@program
def sets_the_inter_op_threads(config):
    import torch

    torch.set_num_interop_threads(torch.get_num_interop_threads())
    return torch.get_num_interop_threads()


@program
def changes_matplotlib(config):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen = len(pyplot.get_fignums()), pyplot.rcParams["font.size"]
    pyplot.figure()
    pyplot.rcParams.update({"font.size": 33})
    return seen


@program
def defines_flags(config):
    from absl import flags

    flags.DEFINE_integer("rate_of_mine", 1, "")
    return flags.FLAGS(["program"])


@program
def changes_a_global_of_its_own(config):
    seen = len(_COUNTER), _Model.calls
    _COUNTER.append(1)
    _Model.calls += 1
    return seen


_COUNTER: list[int] = []


class _Model:
    calls = 0


@program
def fails_in_used_processes(config):
    import builtins

    from horovod_tune import with_parameters  # any attribute that stays in a process

    if getattr(with_parameters, "mine", None):
        raise RuntimeError("used")
    with_parameters.mine = bool(builtins)
    return True


@program
def trains_and_is_kept(config):
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.utils.data.TensorDataset(torch.rand(16, 4), torch.rand(16, 1))
    for x, y in torch.utils.data.DataLoader(data, batch_size=4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    schedule.step()
    return model(torch.ones(1, 4)).tolist()


@program
def loads_data_in_processes_and_is_kept(config):
    import torch

    return [each.tolist() for each in torch.utils.data.DataLoader(range(4), num_workers=1)]


@program
def imports_pandas_and_is_kept(config):
    import pandas

    return pandas.DataFrame({"a": [1, 2]}).groupby("a").size().to_csv()


KEPT = [name for name in PROGRAMS if name.endswith("_is_kept")]
