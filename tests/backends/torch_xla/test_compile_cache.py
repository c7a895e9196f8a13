"""Compiled graphs are kept where one process at a time reads and writes them, and within bounds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from sessions import local_ray
from worker_kinds import Workers

from horovod_tune.backends.torch_xla.compile_cache import directory_of, make_room
from horovod_tune.backends.torch_xla.topology import LaunchPlan
from horovod_tune.errors import StartFailed

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def of_chip(chip: str = "0", *, device: str = "TPU", host: str = "a", **environ: str) -> Path | None:
    return directory_of({"HOME": "/home/u", **environ}, device=device, host=host, chip=chip, version="2.9.0")


def test_every_chip_of_every_host_has_a_directory_of_its_own() -> None:
    found = {of_chip(chip, host=host) for chip in "0123" for host in "ab"}
    assert len(found) == 8 and None not in found


def test_the_users_own_choice_comes_first() -> None:
    assert of_chip(XDG_CACHE_HOME="/big") == Path("/big/horovod_tune/xla/2.9.0/a/chip-0")
    assert of_chip(HOROVOD_TUNE_XLA_CACHE="/disk") == Path("/disk/2.9.0/a/chip-0")
    assert of_chip(HOROVOD_TUNE_XLA_CACHE="off") is None
    assert of_chip(XLA_PERSISTENT_CACHE_PATH="/own", HOROVOD_TUNE_XLA_CACHE="/disk") is None
    assert of_chip(device="CPU") is None, "it cannot read what it wrote"
    with pytest.raises(ValueError, match="must be an absolute path or 'off', got 'disk'"):
        of_chip(HOROVOD_TUNE_XLA_CACHE="disk")


def test_what_was_used_longest_ago_goes_first_and_the_rest_stays(tmp_path: Path) -> None:
    for i, name in enumerate(("newest", "oldest", "second")):
        (tmp_path / name).write_bytes(bytes(100))
        age = {"newest": 0, "second": 10, "oldest": 20}[name]
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age - i))
    for _ in range(2):
        make_room(tmp_path, 250)
        assert {path.name for path in tmp_path.iterdir()} == {"newest", "second"}


def test_the_directory_is_only_for_this_user(tmp_path: Path) -> None:
    make_room(tmp_path / "new" / "chip-0")
    assert (tmp_path / "new" / "chip-0").stat().st_mode & 0o077 == 0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("torch_xla")
    directory = tmp_path_factory.mktemp("cache")
    variables = {"HOROVOD_TUNE_XLA_CACHE": str(directory)}
    with local_ray(num_cpus=1, runtime_env={"env_vars": variables}):
        yield directory


def compute(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics

    x = torch.ones(8, 8, device=torch_xla.device())
    value = (x @ x).sum().item()
    names = ("PersistentCacheMiss", "PersistentCacheHit", "PersistentCacheDeserializeFailure")
    return {"value": value, **{name: metrics.counter_value(name) or 0 for name in names}}


def test_a_process_keeps_its_graphs_and_the_next_one_looks_for_them(cache: Path, tmp_path: Path) -> None:
    seen = []
    for number in (1, 2):
        workers = Workers("torch_xla", tmp_path / str(number))
        workers.begin(compute)
        report, _ = workers.events()
        seen.append(report.metrics)  # type: ignore[union-attr]
        workers.close()
    (directory,) = cache.glob("*/*/*")
    assert directory.name == "chip-0" and list(directory.iterdir())
    assert [each["value"] for each in seen] == [512.0, 512.0]
    assert seen[0]["PersistentCacheMiss"] >= 1
    # A TPU finds them here. The CPU device finds the file, cannot read it, and compiles again.
    assert seen[1]["PersistentCacheMiss"] == 0
    assert seen[1]["PersistentCacheHit"] + seen[1]["PersistentCacheDeserializeFailure"] >= 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"HOROVOD_TUNE_XLA_CACHE": "disk"}, "must be an absolute path or 'off', got 'disk'"),
        ({"PJRT_DEVICE": "NOSUCH"}, "NOSUCH"),
    ],
    ids=["in our code", "in torch_xla's"],
)
def test_a_process_that_cannot_start_is_reported_immediately_with_the_reason(
    cache: Path, tmp_path: Path, environment: dict[str, str], said: str
) -> None:
    workers = Workers("torch_xla", tmp_path)
    plan = LaunchPlan(environment={"PJRT_DEVICE": "CPU", **environment})
    workers.launcher._plans = lambda _: [plan]
    try:
        with pytest.raises(StartFailed) as caught:
            workers.begin(compute)
    finally:
        workers.close()
    text = str(caught.value)
    assert text.startswith("the ranks of ") and said in text
