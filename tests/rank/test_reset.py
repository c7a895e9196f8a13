"""What a trial changes in its process is restored, or the process is replaced; one process per leak."""

from __future__ import annotations

import collections.abc
import json
import logging
import os
import sys
import types
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import leaks
import pytest
from processes import run_python

from horovod_tune.rank.reset.environment import horovod_settings

pytestmark = [pytest.mark.processes, pytest.mark.contract]

PROGRAM = """
import json, os, sys, threading, traceback
import horovod.torch
from horovod_tune.rank.reset.baseline import Baseline
import leaks

def in_a_thread(function):
    # As training functions do, so that thread-local state is gone after it.
    answer = []
    thread = threading.Thread(target=lambda: answer.append(function()))
    thread.start()
    thread.join()
    return answer[0]

def plant_and_look(name):
    leaks.LEAKS[name][1]()
    return leaks.look(name)[name], leaks.generators()

def main():
    in_a_thread(leaks.look)  # what looking itself imports
    del sys.modules["users_own_module"]
    baseline = Baseline()
    answers = {}
    for name in leaks.LEAKS:
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                baseline._watch.accept({})  # what the fork itself has changed
                answer = plant_in(baseline, name)
            except BaseException:
                answer = traceback.format_exc()
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            answers[name] = json.loads(file.read())
        os.wait()
    with open(sys.argv[1], "w") as file:
        json.dump(answers, file)

def plant_in(baseline, name):
    before = in_a_thread(lambda: leaks.look(name))[name]
    planted, drawn = in_a_thread(lambda: plant_and_look(name))
    problems = baseline.restore() + baseline.memory_left()
    after = in_a_thread(lambda: leaks.look(name))[name]
    return before, planted, problems, after, drawn, leaks.generators()

main()
"""
# Common changes, after which processes have to be kept.
RESTORED = {
    *("a new environment variable", "the working directory", "sys.path", "sys.argv", "sys.stdout"),
    *("warning filters", "warning filters of a context", "the root logger's level", "a level's name"),
    *("the root logger's handlers", "a logger of the user's", "an attribute of a class of the script"),
    *("an attribute of a new logger", "the level of a handler that is removed"),
    "a handler without a hash",
    *("an attribute of a logger", "a class of loggers", "the level of a handler", "the filters of a handler"),
    *("the default dtype", "the number of threads", "grad mode", "torch's random state", "torch's seed"),
    *("cuDNN's flags", "deterministic algorithms", "the precision of float32 products", "TF32 in cuBLAS"),
    *("a function of the standard library", "a patched method of torch", "a method added to tensors"),
    *("a variable of C", "another os.environ", "an attribute of __main__", "file descriptor 0"),
    *("a function of psutil", "a function of Ray", "another sys.argv"),
    *("a module of the user's", "a built-in function", "autocast", "shared memory"),
}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was seen before a leak, with it, after the reset, and what the reset could not restore."""
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "users_own_module.py").write_text("STATE = 1\n")
    paths = [str(Path(__file__).parent), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    told = folder / "told.json"
    run_python("-c", PROGRAM, str(told), timeout_s=300, env=environment)
    return json.loads(told.read_text())


@pytest.mark.parametrize("leak", leaks.LEAKS)
def test_a_leak_is_restored_or_the_process_is_replaced(observed, leak):
    assert not isinstance(observed[leak], str), observed[leak]
    before, planted, problems, after, drawn, drawn_later = observed[leak]
    assert planted != before, "the leak was not planted"
    assert problems or after == before
    if leak in RESTORED:
        assert problems == []
    # The generators of Python and NumPy do not repeat their numbers.
    assert drawn != drawn_later


def test_memory_that_a_trial_leaves_in_a_library_replaces_the_process():
    # In a process of its own, since other tests allocate memory too.
    program = """
import json, sys
from horovod_tune.rank.reset.baseline import MAX_MEMORY_LEFT_MB, Baseline
def main():
    baseline = Baseline()
    kept = bytearray(b"x" * (150 << 20))  # as much as libraries cache
    few = baseline.restore() + baseline.memory_left()
    baseline.kept = bytearray(b"x" * (MAX_MEMORY_LEFT_MB << 20))
    print(json.dumps([few, baseline.memory_left()]))

main()
"""
    ran = run_python("-c", program)
    few, many = json.loads(ran.stdout)
    assert few == []
    assert len(many) == 1 and "MB more memory" in many[0]


def test_a_process_that_has_used_a_gpu_is_kept():
    import torch

    from horovod_tune.rank.reset.watch import Watch

    watch = Watch()
    watch.add([torch.cuda])
    with pytest.MonkeyPatch.context() as patch:  # as the first tensor on a GPU does
        patch.setattr(torch.cuda, "_initialized", True)
        patch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
        patch.setattr(torch.cuda, "_queued_calls", [])
        patch.setattr(torch.cuda, "_get_device_properties", torch._C._log_api_usage_once, raising=False)
        patch.setattr(torch.library, "_defs", {*torch.library._defs})
        patch.setattr(torch.library, "_impls", {*torch.library._impls})
        watch.add([torch.library])
        torch.library._defs.add("triton::_triton_bsr_dense_mm_out")
        torch.library._impls.add("triton/_triton_bsr_dense_mm_out/SparseCsrCUDA")
        assert watch.restore() == []
        assert hasattr(torch.cuda, "_get_device_properties")


def test_what_an_import_disables_in_logging_stays(monkeypatch):
    from horovod_tune.rank.reset.settings import Settings

    monkeypatch.setattr(logging.root.manager, "disable", 0)
    settings = Settings()
    before = settings.set_by_imports()
    logging.disable(logging.INFO)
    settings.accept(before)
    assert settings.restore() == []
    assert logging.root.manager.disable == logging.INFO


def test_a_filter_of_warnings_before_an_import_that_adds_one_is_no_change():
    """Most scripts silence warnings before they import pandas or scikit-learn."""
    from horovod_tune.rank.reset.settings import Settings
    from horovod_tune.rank.reset.watch import Watch

    with warnings.catch_warnings():
        settings, watch = Settings(), Watch()
        watch.add([warnings])
        warnings.simplefilter("ignore")
        before, differing = settings.set_by_imports(), watch.differing()
        warnings.filterwarnings("default", module="imported")
        settings.accept(before)
        watch.accept(differing)
        assert settings.restore() + watch.restore() == []
        assert [each[0] for each in warnings.filters[:1]] == ["default"]


def test_a_list_is_never_empty_while_it_is_restored(monkeypatch):
    from horovod_tune.rank.reset.settings import Settings

    class Path(list):
        def clear(self):
            raise AssertionError("another thread could import nothing")

    monkeypatch.setattr(sys, "path", Path(sys.path))
    settings = Settings()
    before = [*sys.path]
    sys.path.append("/leak")
    assert settings.restore() == []
    assert sys.path == before


class _Unhashable:
    """Hashed once, when it is put into a set."""

    is_hashed = False

    def __hash__(self):
        assert not self.is_hashed
        self.is_hashed = True
        return 1


class _Mapping(collections.abc.Mapping):
    """Has no method copy()."""

    def __init__(self, contents):
        self.contents = contents

    def __getitem__(self, key):
        return self.contents[key]

    def __iter__(self):
        return iter(self.contents)

    def __len__(self):
        return len(self.contents)


def test_sets_and_proxies_are_read_without_hashes_and_copies():
    from horovod_tune.rank.reset.watch import Watch

    watched = types.ModuleType("watched")
    contents = {"a": 1}
    vars(watched).update(objects={_Unhashable()}, proxy=MappingProxyType(_Mapping(contents)))
    watch = Watch()
    watch.add([watched])
    assert watch.restore() == []
    contents["a"] = 2
    assert watch.restore() == ["watched.proxy.a was changed"]


@pytest.mark.parametrize("has_counters", [True, False], ids=["counts of changes", "comparison only"])
def test_changes_of_each_kind_of_container_are_found(monkeypatch: pytest.MonkeyPatch, has_counters: bool):
    """CPython 3.14 does not count the changes of dicts any more, 3.13.0 not those of attributes."""
    from horovod_tune.rank.reset import watch as module

    watched = types.ModuleType("watched")
    exec(
        "class Kind:\n    value = 1\n    def method(self, n=1): ...\nOBJECT = Kind()\nOBJECT.state = 1\n"
        "NUMBERS, NAMES, TABLE, PLAIN = [1], {1}, {1: 1}, 1\ndef function(): ...",
        vars(watched),
    )
    watched.Kind.__module__ = "watched"
    monkeypatch.setattr(module, "_HAS_COUNTERS", has_counters and module._HAS_COUNTERS)
    watch = module.Watch()
    watch.add([watched])
    assert watch.restore() == []
    method, function = watched.Kind.method, watched.function
    for _ in range(2):
        watched.Kind.method = watched.function = watched.Kind.added = watched.added = print
        assert watch.restore() == []
        assert (watched.Kind.method, watched.function) == (method, function)
        assert not hasattr(watched, "added") and not hasattr(watched.Kind, "added")
    watched.OBJECT.state = watched.Kind.value = watched.PLAIN = 2
    watched.NUMBERS[0] = watched.TABLE[1] = 2
    watched.NAMES.add(2)
    method.__defaults__ = (2,)
    changed = ("Kind.method", "PLAIN", "Kind.value", "OBJECT.state", "NUMBERS.0", "NAMES.2", "TABLE.1")
    assert sorted(watch.restore()) == sorted(f"watched.{each} was changed" for each in changed)
    assert watch.restore() == []


def test_the_first_use_of_local_files_in_fsspec_is_kept(monkeypatch):
    """Each trial of PyTorch Lightning would otherwise have a new process."""
    import fsspec

    from horovod_tune.rank.reset.watch import Watch

    module = sys.modules["fsspec.registry"]  # `fsspec.registry` is a mapping
    monkeypatch.setattr(module, "_registry", {})
    monkeypatch.setattr(module, "registry", MappingProxyType(module._registry))
    watch = Watch()
    watch.add([fsspec, module])
    fsspec.filesystem("file")
    assert watch.restore() == []
    fsspec.register_implementation("mine", str)
    assert watch.restore() != []


def test_settings_of_a_gpu_are_restored_on_each(monkeypatch: pytest.MonkeyPatch):
    import torch

    from horovod_tune.rank.reset.settings import Settings

    fractions, modes = [1.0, 0.5], [2]
    settings = Settings()
    for name, function in {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "get_per_process_memory_fraction": fractions.__getitem__,
        "get_sync_debug_mode": lambda: modes[0],
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda f, d: fractions.__setitem__(d, f), raising=False
    )
    monkeypatch.setattr(
        torch._C, "_cuda_set_sync_debug_mode", lambda mode: modes.__setitem__(0, mode), raising=False
    )
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    assert settings.restore() == []
    assert (fractions, modes) == ([1.0, 1.0], [0])


def test_what_functions_remember_of_their_calls_is_kept():
    """Otherwise each trial with a KL divergence, a profiler or a process pool would have a new process."""
    import concurrent.futures.process as pools

    import torch

    from horovod_tune.rank.reset.watch import Watch

    watch = Watch()
    watch.add([torch.distributions.kl, pools, sys.modules["torch.profiler.profiler"]])
    normal = torch.distributions.Normal(0.0, 1.0)
    torch.distributions.kl_divergence(normal, normal)
    pools._check_system_limits()
    with pytest.warns(UserWarning, match="mine"):
        torch.profiler.profiler._warn_once("mine")
    assert watch.restore() == []


def test_the_singletons_of_accelerate_are_reset():
    """Transformers' Trainer creates them; the next trial would have the precision of the last one."""
    from accelerate.state import GradientState, PartialState

    from horovod_tune.rank.reset.watch import Watch

    watch = Watch()
    watch.add([sys.modules["accelerate.state"]])
    PartialState(cpu=True)
    GradientState()
    assert watch.restore() == []
    assert not PartialState._shared_state and not GradientState._shared_state


def test_ranks_and_sizes_do_not_count_as_settings_of_horovod(monkeypatch):
    """They differ in the next world of an elastic trial."""
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "20")
    before = horovod_settings()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert horovod_settings() == before
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")
    assert horovod_settings() != before
