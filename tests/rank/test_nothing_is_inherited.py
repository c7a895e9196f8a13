"""The next trial sees nothing of what a trial did to its process, whatever that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from worker_kinds import Workers

pytestmark = [pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def workers(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers("gloo", tmp_path_factory.mktemp("inherits"), size=1)
    yield made
    made.close()


def patched_function(changes: bool) -> Any:
    import torch

    if changes:
        torch.nn.functional.relu = lambda x: x  # type: ignore[assignment]
    return torch.nn.functional.relu(torch.tensor(-1.0)).item()


def class_attribute(changes: bool) -> Any:
    import torch

    if changes:
        torch.nn.Linear.left = 1  # type: ignore[attr-defined]
    return hasattr(torch.nn.Linear, "left")


def registry(changes: bool) -> Any:
    import codecs
    import copyreg

    if changes:
        copyreg.pickle(complex, lambda value: (complex, (0,)))  # type: ignore[arg-type]
        codecs.register_error("left", lambda error: ("", 0))
    try:
        codecs.lookup_error("left")
        return complex in copyreg.dispatch_table, True
    except LookupError:
        return len(copyreg.dispatch_table) > 100, False


def environment(changes: bool) -> Any:
    import os

    if changes:
        os.environ["LEFT"] = "1"
        os.chdir("/")
        sys.path.insert(0, "/left")
    return os.environ.get("LEFT"), os.getcwd() == "/", "/left" in sys.path


def threads_and_children(changes: bool) -> Any:
    import os
    import threading

    seen = [each.name for each in threading.enumerate() if not each.name.startswith(("horovod", "Main"))]
    if changes:
        threading.Thread(target=threading.Event().wait, daemon=True, name="left").start()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "600"])
    return seen


def open_files(changes: bool) -> Any:
    import builtins
    import os

    if changes:
        builtins.left = open("left.txt", "w")  # type: ignore[attr-defined]  # noqa: SIM115
    return [
        each for each in os.listdir("/proc/self/fd") if "left" in os.path.realpath(f"/proc/self/fd/{each}")
    ]


def exit_handler(changes: bool) -> Any:
    import atexit

    before = atexit._ncallbacks()
    if changes:
        for _ in range(500):
            atexit.register(print, "left")
    return before > 400


def torch_settings(changes: bool) -> Any:
    import torch

    if changes:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = True
    return (
        str(torch.get_default_dtype()),
        torch.initial_seed() == 3,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )


def watchdog(changes: bool) -> Any:
    import faulthandler
    import signal

    if changes:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(600)
        faulthandler.dump_traceback_later(600)
    return str(signal.getsignal(signal.SIGALRM)), signal.alarm(0)


def fusion_threshold(changes: bool) -> Any:
    import os

    import horovod.torch as hvd

    before = os.environ.get("HOROVOD_FUSION_THRESHOLD")
    if changes:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "1000"
    hvd.init()
    return before, hvd.size()


def logging_settings(changes: bool) -> Any:
    import logging.config
    import warnings

    if changes:
        logging.config.dictConfig({"version": 1, "root": {"level": "ERROR"}})
        logging.getLogger("left").disabled = True
        warnings.simplefilter("error", BytesWarning)
    return logging.getLogger().level, logging.getLogger("left").disabled, len(warnings.filters) > 50


def installed_package(changes: bool) -> Any:
    import matplotlib.pyplot as plt
    import pandas as pd

    if changes:
        plt.rcParams["font.size"] = 33
        pd.set_option("display.max_rows", 7)
        pd.DataFrame.left = 1  # type: ignore[attr-defined]
    return plt.rcParams["font.size"], pd.get_option("display.max_rows"), hasattr(pd.DataFrame, "left")


KINDS = [
    *(patched_function, class_attribute, registry, environment, threads_and_children, open_files),
    *(exit_handler, torch_settings, watchdog, fusion_threshold, logging_settings, installed_package),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_next_trial_sees_nothing_of(kind: Callable[[bool], Any], workers: Workers) -> None:
    def train(config: dict[str, Any]) -> Any:
        return {"seen": config["kind"](False), "own": config["kind"](config["changes"])}

    seen = []
    for changes in (False, True, False):
        directory, events = workers.run(train, kind=kind, changes=changes)
        seen.append(events[0].metrics["seen"])
        assert Path(directory).exists()
    assert seen[0] == seen[1] == seen[2]
