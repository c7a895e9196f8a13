"""The allocator keeps freed memory for the next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from horovod_tune.rank.allocator import is_set_by_user

PROGRAM = """
import json, os, resource, threading

from horovod_tune.rank.allocator import keep_freed_memory

BLOCKS, BYTES = 200, 1 << 20
figures = {"set": keep_freed_memory()}

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [bytearray(b"x" * BYTES) for _ in range(BLOCKS)]

def train():
    step()
    before = faults()
    for _ in range(3):
        step()
    figures["faults_a_step"] = (faults() - before) / 3

thread = threading.Thread(target=train)
thread.start()
thread.join()
print(json.dumps(figures))
"""
PAGES_A_STEP = 200 * 256


def run(**variables: str) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if not is_set_by_user({name: value})}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**environment, **variables}, capture_output=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.long
def test_freed_memory_is_kept_for_the_next_step() -> None:
    figures = run()
    assert figures["set"] is True
    assert figures["faults_a_step"] < PAGES_A_STEP / 20


@pytest.mark.long
def test_the_settings_of_the_user_are_not_changed() -> None:
    figures = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert figures["set"] is False
    assert figures["faults_a_step"] > PAGES_A_STEP / 2


@pytest.mark.parametrize(
    ("environment", "is_set"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.rtld.nns=2"}, False),
        ({"MALLOC_TOP_PAD_": "0"}, True),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=2:glibc.malloc.trim_threshold=1"}, True),
    ],
)
def test_settings_of_the_user_are_recognised(environment: dict[str, str], is_set: bool) -> None:
    assert is_set_by_user(environment) is is_set
