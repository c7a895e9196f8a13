"""horovod-tune doctor: every problem of a machine is named with its cure, and a sound one has none."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sound_machine import HOROVOD, SOUND, TORCH

from horovod_tune.doctor import command, node_info
from horovod_tune.doctor.findings import Finding, can_run_trials, diagnose
from horovod_tune.doctor.node_info import collect_info
from horovod_tune.doctor.report import machine_table
from horovod_tune.horovod_build.installed import InstalledHorovod, InstalledTorch, probe
from horovod_tune.horovod_build.patches import PATCH_LEVEL

UNPATCHED = InstalledHorovod("0.28.1", "2.13.0+cpu", gloo=True)
NCCL_HOROVOD = replace(HOROVOD, version=f"0.28.1+{PATCH_LEVEL}.nccl", nccl=True)


def test_a_sound_machine_has_no_findings() -> None:
    assert diagnose(SOUND) == []


@pytest.mark.parametrize("name", ["torch", "horovod", "mymodel"])
def test_an_import_that_is_slow_is_not_called_broken(name: str) -> None:
    bare = {"torch": replace(TORCH, gpus=()), "horovod": replace(HOROVOD, gloo=False)}
    changed = {name: bare[name]} if name in bare else {}
    (found,) = diagnose(replace(SOUND, slow={name: 120.0}, **changed))
    assert (found.level, found.subject) == ("warning", name)
    assert "takes more than 120 s" in found.what


@pytest.mark.parametrize(
    ("changes", "subject", "what", "cure"),
    [
        ({"torch": None}, "torch", "torch is not installed", "pip install torch"),
        ({"torch": replace(TORCH, error="no libgomp")}, "torch", "no libgomp", "--force-reinstall torch"),
        (
            {"unmet": ("ray[tune]<3,>=2.51 (installed: 2.9.0)",)},
            "ray",
            "ray[tune]<3,>=2.51 (installed: 2.9.0)",
            "pip install 'ray[tune]<3,>=2.51'",
        ),
        *(
            ({"horovod": replace(horovod, **change)}, "horovod", what, f"install-horovod{gpu}{force}")
            for horovod, gpu in [(HOROVOD, ""), (NCCL_HOROVOD, " --gpu nccl")]
            for change, what, force in [
                (
                    {"torch_version": "2.12.1", "error": "undefined symbol"},
                    "compiled for torch 2.12.1, but torch 2.13.0+cpu is installed",
                    "",
                ),
                ({"error": "undefined symbol"}, "undefined symbol", " --force"),
                ({"gloo": False}, "without Gloo", ""),
            ]
        ),
        ({"broken": {"ray": "no protobuf"}}, "ray", "no protobuf", "pip install --force-reinstall ray"),
    ],
)
def test_with_a_problem_no_trial_can_run(changes: dict[str, Any], subject: str, what: str, cure: str) -> None:
    findings = diagnose(replace(SOUND, **changes))
    assert not can_run_trials(findings)
    assert (findings[0].level, findings[0].subject) == ("problem", subject)
    assert what in findings[0].what and cure in findings[0].cure


# Of the version that Horovod was compiled for.
CUDA_TORCH = InstalledTorch(TORCH.version, "12.8", ("NVIDIA H100",))


@pytest.mark.parametrize(
    ("changes", "subject", "what", "cure"),
    [
        ({"horovod": UNPATCHED}, "horovod", "lacks patches", "horovod-tune install-horovod"),
        ({"horovod": replace(NCCL_HOROVOD, version="1+ht6.nccl")}, "horovod", "lacks patches", "--gpu nccl"),
        ({"torch": CUDA_TORCH}, "horovod", "built without NCCL", "--gpu nccl"),
        ({"horovod": None}, "horovod", 'trials need backend="torch"', "install-horovod"),
    ],
)
def test_with_a_warning_trials_can_run(changes: dict[str, Any], subject: str, what: str, cure: str) -> None:
    findings = diagnose(replace(SOUND, **changes))
    assert can_run_trials(findings)
    (found,) = [finding for finding in findings if finding.subject == subject]
    assert what in found.what and cure in found.cure


def test_problems_come_before_warnings() -> None:
    levels = [finding.level for finding in diagnose(replace(SOUND, horovod=None, torch=None))]
    assert levels == ["problem", "warning"]


@pytest.mark.slow
def test_this_machine_can_run_trials_and_its_facts_travel() -> None:
    here = collect_info()
    findings = diagnose(here)
    assert can_run_trials(findings), findings
    assert here.torch is not None and here.torch.version == here.packages["torch"]
    assert here.horovod is not None and here.horovod.gloo and here.horovod.error is None
    assert any("127.0.0.1" in addresses for addresses in here.interfaces.values())
    assert pickle.loads(pickle.dumps(here)) == here
    assert json.loads(json.dumps(asdict(here)))["host"] == here.host


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise ImportError('no such symbol')", "ImportError: no such symbol"),
        ("print('hello'); import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("import horovod; print('Not built'); import nowhere", "Not built"),
        (
            "try: import nowhere\nexcept ImportError as e: raise ImportError('run pip') from e",
            "ImportError: run pip (after ModuleNotFoundError: No module named 'nowhere')",
        ),
        ("import os; os._exit(0)", "exit status 0"),
        ("import os; os.abort()", "the import was ended by signal 6"),
        ("import sys; sys.exit(3)", "exit status 3"),
    ],
)
def test_an_import_that_fails_in_any_way_is_a_fact(program: str, why: str) -> None:
    assert probe(program) == {"error": why}


def test_an_import_that_does_not_end_in_time_is_slow() -> None:
    assert probe("import time; time.sleep(60)", timeout_s=0.1) == {"slow_s": 0.1}


@pytest.mark.parametrize(("value", "seen"), [("", None), ("1", "1")])
def test_gpus_that_ray_hides_from_its_tasks_are_still_seen(
    monkeypatch: pytest.MonkeyPatch, value: str, seen: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert probe("import os", "{'seen': os.environ.get('CUDA_VISIBLE_DEVICES')}") == {"seen": seen}


@pytest.mark.parametrize(("torch", "status"), [(TORCH, 0), (None, 1)])
def test_the_exit_status_shows_whether_a_trial_could_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    torch: InstalledTorch | None,
    status: int,
) -> None:
    monkeypatch.setattr("horovod_tune.doctor.node_info.collect_info", lambda: replace(SOUND, torch=torch))
    assert command.run(argparse.Namespace(address=None)) == status
    said = capsys.readouterr().out
    assert said.endswith("A trial can run here.\n" if status == 0 else "A trial cannot run here.\n")


def test_the_screen_marks_what_is_wrong_and_gives_the_cure() -> None:
    findings = [Finding("problem", "horovod", "Horovod is not installed.", "horovod-tune install-horovod")]
    screen = machine_table(replace(SOUND, horovod=None), findings).splitlines()
    assert [line for line in screen if line.startswith("!!")] == ["!!  horovod       not installed"]
    assert "  Cure: horovod-tune install-horovod" in screen
    assert len(screen) <= 24


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "no-address-of-ray", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster_is_named(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert command.examine_cluster(address) == 1
    assert capsys.readouterr().err.startswith(f"horovod-tune doctor: no Ray cluster at {address}: ")


@pytest.mark.slow
def test_the_modules_of_a_training_function_are_tried_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "sound": "import atexit; print('is imported'); atexit.register(print, 'is ended')",
        "broken": "import nothing_of_that_name",
        "final": "import os; os._exit(3)",
        "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    info = collect_info(["sound", "broken", "final", "crashing", "json"])
    found = {name: info.broken.get(name) for name in info.modules}
    assert found["sound"] is None and found["json"] is None
    assert found["broken"] == "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert found["final"] == "exit status 3" and found["crashing"] == "the import was ended by signal 11"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "package", "others"),
    [
        (
            {"horovod/__init__.py": "", "horovod/torch/__init__.py": "raise ImportError('not built')"},
            "horovod",
            0,
        ),
        ({"torch.py": "x = 1"}, "torch", 1),
        ({"pandas/__init__.py": "raise ImportError('from source')"}, "pandas", 1),
    ],
)
def test_a_file_that_hides_an_installed_package_is_named_instead_of_a_cure_that_changes_nothing(
    files: dict[str, str], package: str, others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    program = "import sys; from horovod_tune import cli; sys.exit(cli.main(['doctor']))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    text = " ".join(ran.stdout.split())
    first = next(iter(files))
    assert f"Problem: Python imports {tmp_path / first} instead of the installed {package}." in text
    assert "Cure: Rename it, take its folder off PYTHONPATH, or start in another folder." in text
    assert "--force" not in text and text.count(f"See to {package} first") >= others


def test_a_package_that_lacks_its_extra_gets_it() -> None:
    facts = replace(SOUND, broken={"ray": "ModuleNotFoundError: No module named 'pyarrow'"})
    assert [finding.cure for finding in diagnose(facts)] == ["pip install 'ray[tune]'"]


@pytest.mark.slow
def test_an_import_that_fails_names_the_file_that_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_info, "probe", lambda *_: {"error": "why"})
    info = collect_info()
    assert info.shadows == {} and info.broken["pandas"] == f"why (imported from {pd.__file__})"
