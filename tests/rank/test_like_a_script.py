"""A rank behaves as a script that horovodrun or torchrun started, with good manners or bad ones."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from processes import eventually
from worker_kinds import Workers

from horovod_tune import report
from horovod_tune.errors import TrainingFailed

pytestmark = [pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def workers(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Workers that all tests share: whatever a rank does, the next trial has new ones."""
    made = Workers("gloo", tmp_path_factory.mktemp("script"), size=1)
    yield made
    made.close()


def outcome(workers: Workers, train: Any, **config: Any) -> Any:
    """Return what the function returned, or the text of the error; begin a new group after an error."""
    workers.begin(train, **config)
    try:
        events = workers.events()
    except TrainingFailed as error:
        workers.group.close()
        return str(error)
    assert workers.group.end_trial()
    return events[0].metrics if len(events) > 1 else None


def log_of(workers: Workers) -> str:
    return b"".join(each.text for each in workers.group.take_logs()).decode()


# Pickled by value, as the script that a user starts; pickle finds its names in the rank's own `__main__`.
SCRIPT = """
import os
import signal

def double(number):
    return 2 * number

class Data:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return double(index)

def of_data(data):
    return data if isinstance(data, Data) else None

def train(config):
    import asyncio
    import faulthandler
    import multiprocessing
    import pickle
    import threading

    import torch

    seen = {"main": threading.current_thread() is threading.main_thread()}
    caught = []
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    seen["signal"] = caught == [signal.SIGUSR1]

    async def work():
        process = await asyncio.create_subprocess_exec("true")
        return await process.wait()

    seen["asyncio"] = asyncio.run(work())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seen["spawn"] = pool.map(double, [3]) + [type(each).__name__ for each in pool.map(of_data, [Data()])]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        seen["fork"] = pool.map(double, [3])
    seen["pickle"] = isinstance(pickle.loads(pickle.dumps(Data())), Data)
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, num_workers=1)
    seen["loader"] = [batch.tolist() for batch in loader]
    spawned = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="forkserver")
    seen["forkserver"] = [batch.tolist() for batch in spawned]
    seen["faulthandler"] = faulthandler.is_enabled()
    return seen
"""


def test_signals_asyncio_pools_and_loaders_work_in_the_main_thread(workers: Workers) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    expected = {"main": True, "signal": True, "asyncio": 0, "spawn": [6, "Data"], "fork": [6], "pickle": True}
    expected |= {"loader": [[0.0, 1.0], [2.0, 3.0]], "faulthandler": True, "forkserver": [[0], [2], [4], [6]]}
    assert outcome(workers, script["train"]) == expected


def test_handlers_and_finalizers_run_after_the_end_and_what_they_print_is_kept(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import atexit
        import tempfile
        import threading

        global kept
        kept = open("unflushed.txt", "w")  # noqa: SIM115
        kept.write("text")
        config["temporary"] = tempfile.TemporaryDirectory(dir=".")
        atexit.register(print, "first")
        atexit.register(print, "second")
        threading.Timer(0.2, print, ["from a thread"]).start()
        if config["fails"]:
            raise ValueError("diverged")

    for fails in (False, True):
        directory = workers.begin(train, fails=fails)
        try:
            workers.events()
            assert workers.group.end_trial()
        except TrainingFailed:
            assert fails
            workers.group.close()
        if not fails:
            assert log_of(workers) == "from a thread\nsecond\nfirst\n"
        eventually(
            lambda at=directory: Path(at, "unflushed.txt").read_text() == "text", why=lambda: "no text"
        )
        eventually(lambda at=directory: len(os.listdir(at)) == 1, why=lambda at=directory: os.listdir(at))


def test_a_forked_child_ends_as_in_python(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> dict[str, Any]:
        statuses = []
        for end in (SystemExit(3), SystemExit(), SystemExit("a text"), ValueError("mine"), None):
            if (pid := os.fork()) == 0:
                if end is not None:
                    raise end
                return {}
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return {"statuses": statuses}

    assert outcome(workers, train) == {"statuses": [3, 0, 1, 1, 0]}
    assert "ValueError: mine" in log_of(workers)


def exits_3(config: dict[str, Any]) -> None:
    sys.exit(3)


def exits_with_a_text(config: dict[str, Any]) -> None:
    sys.exit("no data found")


def exits_at_once(config: dict[str, Any]) -> None:
    print("last words", flush=True)
    os._exit(0)


def crashes(config: dict[str, Any]) -> None:
    import ctypes

    ctypes.string_at(0)


def is_killed(config: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_parent(config: dict[str, Any]) -> None:
    import time

    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        (exits_3, ["rank 0 of 1 on", "failed", "sys.exit(3)", "return from the function"]),
        (exits_with_a_text, ["failed", "no data found"]),
        (exits_at_once, ["died", "it exited with status 0", "its last output was\n  last words"]),
        (crashes, ["died", "SIGSEGV (segmentation fault)", "in crashes"]),
        (is_killed, ["died", "it was ended by SIGKILL"]),
        (kills_its_parent, ["died", "the process that forks ranks", "has ended, and its ranks with it"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_an_end_without_a_return_is_an_error_that_says_how_it_ended(
    workers: Workers, train: Any, parts: list[str]
) -> None:
    text = outcome(workers, train)
    assert text.startswith("rank 0 of 1 on ")
    assert [part for part in parts if part not in text] == [], text


def test_a_function_with_bad_manners_still_ends_and_leaves_nothing(workers: Workers, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> dict[str, Any]:
        import threading
        import time

        pids = Path(config["pids"])
        if os.fork() == 0:  # a daemon
            os.setsid()
            if os.fork() == 0:
                pids.write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        os.wait()
        threading.Thread(target=time.sleep, args=(0.1,)).start()
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        while not pids.exists() or not pids.read_text():
            time.sleep(0.01)
        return {"loss": 1.0}

    pids = tmp_path / "pid"
    assert outcome(workers, train, pids=str(pids)) == {"loss": 1.0}
    assert not psutil.pid_exists(int(pids.read_text()))


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_is_not_lost(ray_session: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        import re
        import time

        report(step=1)
        began = time.monotonic()
        while time.monotonic() - began < 20:
            re.match(r"(a+)+$", "a" * 26 + "b")  # seconds in C, with the GIL
        report(step=2)

    workers = Workers("gloo", tmp_path, size=1, timeout_s=4.0)
    try:
        _, events = workers.run(train)
        assert [event.metrics for event in events[:-1]] == [{"step": 1}, {"step": 2}]
    finally:
        workers.close()
