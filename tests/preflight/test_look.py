"""What a machine says of imports: broken, slow and final ones are told apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from horovod_tune.errors import StartFailed
from horovod_tune.gloo.ranks import choose_interface
from horovod_tune.preflight.look import Look


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "sound": "print('IMPORTED is what I say')",
        "broken": "import nothing_of_that_name",
        "slow": "import time; time.sleep(3600)",
        "final": "import os; os._exit(3)",
        "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_a_broken_import_is_named_with_its_error(modules: None) -> None:
    failed, slow = Look().imports(["sound", "broken", "json"], 60)
    assert failed == {"broken": "ModuleNotFoundError: No module named 'nothing_of_that_name'"} and slow == {}


def test_a_slow_import_is_not_a_broken_one(modules: None) -> None:
    assert Look().imports(["slow", "broken"], 2) == ({}, {"slow": 2})


@pytest.mark.parametrize("name", ["final", "crashing"])
def test_an_import_that_ends_the_process_is_named(name: str, modules: None) -> None:
    failed, slow = Look().imports(["json", name], 60)
    assert list(failed) == [name] and "the import ended the process" in failed[name] and slow == {}


def test_hosts_without_ipv4_are_refused_by_one_clear_sentence() -> None:
    here = {"lo": ["::1"], "eth0": ["fd00::2"]}
    with pytest.raises(
        StartFailed, match=r"knows this host by fd00::2, and .* speak IPv4 only\. Start Ray with"
    ):
        choose_interface(here, node_ip="fd00::2", nics=["eth0"], single_host=False)
