"""What a machine says of imports: broken, slow and final ones are told apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from horovod_tune.actors.ranks import choose_interface
from horovod_tune.doctor import collect_info
from horovod_tune.errors import StartFailed


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "sound": "print('IMPORTED is what I say')",
        "broken": "import nothing_of_that_name",
        "final": "import os; os._exit(3)",
        "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.slow
def test_the_modules_of_a_training_function_are_tried_too(modules: None) -> None:
    info = collect_info(["sound", "broken", "final", "crashing", "json"])
    found = {name: info.broken.get(name) for name in info.modules}
    assert found["sound"] is None and found["json"] is None
    assert found["broken"] == "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert found["final"] == "exit status 3" and found["crashing"] == "the import was ended by signal 11"


def test_hosts_without_ipv4_are_refused_by_one_clear_sentence() -> None:
    here = {"lo": ["::1"], "eth0": ["fd00::2"]}
    with pytest.raises(
        StartFailed, match=r"knows this host by fd00::2, and .* speak IPv4 only\. Start Ray with"
    ):
        choose_interface(here, node_ip="fd00::2", nics=["eth0"], single_host=False)
