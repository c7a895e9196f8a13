"""Training functions as in public reports, which leave something in their process or might meet it there.

`PROGRAMS[name](config)` returns what the trial reports. In new processes it is the same each time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from os import environ
from pathlib import Path
from typing import Any

import ray
import torch
from horovod.torch import init, rank, size

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
    # Its name claims to be that of an extension module, with which a package stays in the process.
    "site-packages/extensionpkg.py": (
        "import functools\n__file__ = 'extensionpkg.so'\n"
        "@functools.lru_cache(None)\ndef get_model(width): return [0.0] * width\n"
        "class Cached:\n    @staticmethod\n    @functools.cache\n    def get(): return [0.0]\n"
        "def _make():\n    number = 0\n    def step():\n        nonlocal number\n        number += 1\n"
        "        return number\n    return step\nstep = _make()\n"
        "def _make_history():\n    seen = []\n    def add():\n        seen.append(1)\n"
        "        return len(seen)\n    return add\nadd = _make_history()\n"
        "def _memoize():\n    memo = {}\n    def weights(width):\n"
        "        return memo.setdefault(width, [0.0] * width)\n    return weights\nweights = _memoize()\n"
    ),
    "site-packages/pluginpkg.py": (
        "import functools, torch\n@functools.lru_cache(None)\ndef get_model(width): return [0.0] * width\n"
        "torch.utils.data.of_plugin = get_model\n"
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
    "beside/mypipe.py": (
        "from torch.utils.data import IterDataPipe, functional_datapipe\n"
        "@functional_datapipe('doubled_d')\nclass Doubled(IterDataPipe):\n"
        "    def __init__(self, source): self.source = source\n"
        "    def __iter__(self): return (2 * x for x in self.source)\n"
    ),
    "beside/mysearch.py": (
        "from ray import tune\nfrom horovod_tune import DistributedTrainableCreator\n"
        "trainable = DistributedTrainableCreator(lambda config: None)\n"
    ),
    "beside/mycache.py": ("import functools\n@functools.lru_cache\ndef load(width): return [0.0] * width\n"),
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


def outcome(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns, or the error that it raises: for errors that are expected."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


@program
def wraps_a_function_of_torch(config):

    clip = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = lambda parameters, norm: clip(parameters, norm * 2)
    weight = torch.nn.Parameter(torch.ones(4))
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 0.2)
    return weight.grad.tolist()


@program
def wraps_a_method_of_a_scheduler(config):
    import torch
    from torch.optim.lr_scheduler import StepLR

    real = StepLR.get_lr
    StepLR.get_lr = lambda self: [2 * rate for rate in real(self)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return StepLR(optimizer, 1).get_last_lr()


@program
def replaces_a_function_by_a_partial_of_it(config):
    import functools

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
def uses_caches_and_variables_of_packages_that_stay_and_is_kept(config):
    import extensionpkg
    import pluginpkg

    models = extensionpkg.get_model(2), extensionpkg.Cached.get(), pluginpkg.get_model(2)
    models += (extensionpkg.weights(2),)
    seen = [list(model) for model in models], extensionpkg.step()
    for model in models:
        model[0] += 1
    return seen


@program
def imports_the_module_of_its_search_and_is_kept(config):
    import mysearch

    return mysearch.trainable.__name__


@program
def uses_a_list_in_a_closure_of_a_package_that_stays(config):
    import extensionpkg

    return extensionpkg.add()


@program
def registers_in_an_installed_package(config):
    from registry_a.more import register

    register("mine")
    return True


@program
def registers_an_operator(config):
    import myops

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

    os.environ["HOROVOD_FUSION_THRESHOLD"] = str((config["number"] + 1) << 20)
    hvd.init()
    for _ in range(3):
        hvd.grouped_allreduce([torch.ones(10), torch.ones(20)], name="grads")
    return True


@program
def writes_a_timeline(config):
    import horovod.torch as hvd

    os.environ["HOROVOD_TIMELINE"] = "timeline.json"
    hvd.init()
    hvd.allreduce(torch.ones(3), name="x")
    return os.path.exists("timeline.json")


@program
def writes_the_log_of_autotuning(config):
    os.environ.update(HOROVOD_AUTOTUNE="1", HOROVOD_AUTOTUNE_LOG="tuned.log")
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(3), name="x")
    return os.path.exists("tuned.log")


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

    torch.set_num_interop_threads(torch.get_num_interop_threads())
    return torch.get_num_interop_threads()


@program
def adds_an_inter_op_thread(config):
    import torch

    torch.set_num_interop_threads(torch.get_num_interop_threads() + 1)
    return torch.get_num_interop_threads()


@program
def sets_a_variable_that_an_import_reads(config):
    if config["number"] == 1:
        os.environ["MPLBACKEND"] = "svg"
    import matplotlib

    return matplotlib.get_backend(auto_select=False) == ["agg", "svg"][config["number"]]


@program
def sets_a_variable_for_an_import_by_mock(config):
    from unittest import mock

    backend = ["svg", "agg"][config["number"]]
    with mock.patch.dict(os.environ, {"MPLBACKEND": backend}):
        import matplotlib

        return matplotlib.get_backend(auto_select=False) == backend


@program
def sets_a_variable_for_an_import_once(config):
    if config["number"] == 0:
        os.environ["MPLBACKEND"] = "svg"
    import matplotlib

    return matplotlib.get_backend(auto_select=False) == ["svg", "agg"][config["number"]]


@program
def sets_constant_variables_for_imports_and_is_kept(config):
    import matplotlib

    os.environ["MPLBACKEND"] = "svg"
    os.environ["OMP_NUM_THREADS"] = "2"
    import sklearn.linear_model
    import threadpoolctl

    seen = [each["num_threads"] for each in threadpoolctl.threadpool_info() if "scikit" in each["filepath"]]
    return bool(sklearn), matplotlib.get_backend(auto_select=False), seen


@program
def sets_a_variable_that_torch_reads_at_its_first_use(config):
    if config["number"] == 0:
        os.environ["ONEDNN_VERBOSE"] = "1"
    return os.environ.get("ONEDNN_VERBOSE") == ("1" if config["number"] == 0 else None)


@program
def sets_a_variable_once_and_catches_errors(config):
    import matplotlib

    try:
        if config["number"] == 1:
            os.environ["MPLBACKEND"] = "svg"
    except RuntimeError:
        return "caught"
    return bool(matplotlib)


@program
def uses_a_script_s_own_name_of_the_environment(config):
    return environ is os.environ


@program
def sets_a_variable_after_a_report(config):
    from horovod_tune import report

    report(seen="", pid=0)
    os.environ["OMP_NUM_THREADS"] = str(config["number"] + 2)
    import sklearn.linear_model
    import threadpoolctl

    seen = [each for each in threadpoolctl.threadpool_info() if "scikit" in each["filepath"]]
    return bool(sklearn), [each["num_threads"] == config["number"] + 2 for each in seen]


@program
def sets_the_threads_of_a_library(config):
    os.environ["OMP_NUM_THREADS"] = str(config["number"] + 2)
    import sklearn.linear_model
    import threadpoolctl

    seen = [each for each in threadpoolctl.threadpool_info() if "scikit" in each["filepath"]]
    return bool(sklearn), [each["num_threads"] == config["number"] + 2 for each in seen]


@program
def patches_ray_and_its_own_script(config):
    import __main__

    seen = hasattr(__main__, "Model"), ray.get.__module__
    __main__.Model = _Model
    ray.get = len
    return seen


@program
def sets_constant_variables_and_is_kept(config):
    import pandas

    os.environ["WANDB_NAME"] = "mine"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return bool(pandas)


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
def registers_a_data_pipe(config):
    import mypipe
    from torch.utils.data.datapipes.iter import IterableWrapper

    return list(IterableWrapper([1, 2]).doubled_d()), bool(mypipe)


@program
def caches_a_result(config):
    import mycache

    mycache.load(2).append(1.0)
    return mycache.load(2), mycache.load.cache_info()


@program
def registers_an_exit_handler(config):
    import atexit

    seen = atexit._ncallbacks()
    atexit.register(Path("handled").write_text, "")
    return seen


@program
def writes_files_after_a_report(config):
    from horovod_tune import get_checkpoint, report

    seen = sorted(os.listdir())
    report(seen="", pid=0)
    Path("picture").write_text("")
    return seen, get_checkpoint()


@program
def parses_arguments(config):
    import argparse

    return outcome(argparse.ArgumentParser().parse_args)


@program
def uses_functions_of_horovod_by_name(config):
    init()
    return rank(), size()


@program
def trains_an_optimizer_of_the_script(config):
    _optimizer.zero_grad()
    _model(torch.ones(1, 2)).sum().backward()
    _optimizer.step()
    return _model.weight.tolist(), len(_optimizer.state)


_model = torch.nn.Linear(2, 1)
_optimizer = torch.optim.SGD(_model.parameters(), lr=0.1, momentum=0.9)


class _Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(float(index))


def _load(start_method):
    settings = {"num_workers": 1, "multiprocessing_context": start_method}
    return outcome(lambda: list(torch.utils.data.DataLoader(_Data(), None, **settings)))


@program
def forks_processes_for_data(config):
    return _load("fork")


@program
def starts_a_fork_server_for_data(config):
    return _load("forkserver")


@program
def spawns_processes_for_data(config):
    return _load("spawn")


@program
def saves_a_class_of_the_script(config):
    return outcome(lambda: torch.save(_Data(), "data.pt"))


@program
def starts_a_task(config):
    return ray.get(ray.remote(lambda: 1).remote(), timeout=20)


@program
def calls_ray_train(config):
    import ray.train

    calls = lambda: ray.train.report({}), ray.train.get_checkpoint, ray.train.get_context
    return [outcome(call) for call in calls]


@program
def sets_up_mlflow(config):
    from ray.air.integrations import mlflow

    class Recorder:
        _mlflow = "a run"

        def setup_mlflow(self, **given):
            return True

        def start_run(self, **given):
            assert given["run_name"]

        def log_params(self, params):
            pass

    seen = mlflow._MLflowLoggerUtil.__name__
    mlflow._MLflowLoggerUtil = Recorder
    return seen, mlflow.setup_mlflow(config)


@program
def changes_settings_of_libraries(config):
    import pandas
    import transformers

    seen = [
        torch.backends.mkldnn.deterministic,
        torch.backends.cudnn.benchmark_limit,
        torch.backends.opt_einsum.strategy,
        torch.__future__.get_overwrite_module_params_on_conversion(),
        torch.distributions.Distribution._validate_args,
        getattr(torch.nn.Linear, "mine", None),
        pandas.get_option("display.max_rows"),
        transformers.logging.get_verbosity(),
    ]
    torch.backends.mkldnn.deterministic, torch.backends.cudnn.benchmark_limit = True, 3
    torch.backends.opt_einsum.strategy, torch.nn.Linear.mine = "greedy", 1
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.distributions.Distribution.set_default_validate_args(False)
    pandas.set_option("display.max_rows", 7)
    transformers.logging.set_verbosity_error()
    return seen


@program
def draws_random_numbers(config):
    import numpy

    torch.manual_seed(1)
    numpy.random.seed(1)
    return torch.rand(2).tolist(), numpy.random.rand(2).tolist()


@program
def has_parameters_with_odd_names(config):
    return {name: config["opt"].pop(name) for name in ("opt/lr", 1)}


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

    return [each.tolist() for each in torch.utils.data.DataLoader(range(4), num_workers=1)]


@program
def plots_a_table_and_is_kept(config):
    import pandas
    from matplotlib import pyplot

    table = pandas.DataFrame({"a": [1, 2]})
    table.to_parquet("table.parquet")
    figure, axes = pyplot.subplots()
    axes.plot(pandas.read_parquet("table.parquet").a)
    figure.savefig("plot.png")
    pyplot.close(figure)
    return table.groupby("a").size().to_csv(), pyplot.get_backend()


KEPT = [name for name in PROGRAMS if name.endswith("_is_kept")]
