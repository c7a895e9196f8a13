"""install-horovod: the real way through, with a stand-in for Horovod's source that compiles in seconds."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest
from processes import eventually

from horovod_tune.cli import build_parser
from horovod_tune.horovod_build import BuildError, command, installed, patches
from horovod_tune.horovod_build.build import GPU_CHOICES, Hunk, apply, hunks, wheel_key

# Horovod's own setup prints what CMake prints, and puts the library into the package.
SETUP = """\
import os, pathlib, sys
from setuptools import setup
print("[  7%] Building CXX object a.o", flush=True)
{body}
print("[100%] Built target pytorch", flush=True)
pathlib.Path("horovod/torch/mpi_lib_v2.so").write_text(os.environ["MAKEFLAGS"])
setup(name="horovod", version="0.28.1+" + os.environ["HOROVOD_LOCAL_VERSION"], packages=["horovod.torch"],
      package_data={{"horovod.torch": ["*.so"]}})
"""


def hunks_of(torch: tuple[int, int], gpu: str) -> list[Hunk]:
    return [hunk for patch in patches.patches_for(torch, gpu) for hunk in hunks(patch)]


def source_archive(folder: Path, body: str = "") -> Path:
    """Make an archive that has just the texts that the patches look for."""
    top = folder / "horovod-0.28.1"
    there: dict[Path, str] = {}
    changed: dict[Path, str] = {}
    for hunk in hunks_of((2, 13), "none"):
        path = top / hunk.path
        # One whose text an earlier one has changed finds what that one has put there.
        if hunk.before not in changed.get(path, ""):
            there[path] = there.get(path, "") + hunk.before + "\n"
            changed[path] = changed.get(path, "") + hunk.before + "\n"
        changed[path] = changed[path].replace(hunk.before, hunk.after)
    for path, text in there.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (top / "horovod/torch/__init__.py").write_text("")
    (top / "setup.py").write_text(SETUP.format(body=body))
    archive = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    return archive


def install(tmp_path: Path, *more: str) -> None:
    """Make a wheel, but install nothing into the environment of the tests."""
    arguments = ["install-horovod", "--no-install", f"--cache-dir={tmp_path}/cache"]
    command.install_horovod(build_parser().parse_args([*arguments, f"--wheel-dir={tmp_path}/wheels", *more]))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_archive(tmp_path_factory.mktemp("source"))


@pytest.mark.long
def test_a_wheel_is_compiled_once_and_then_taken_from_the_cache(
    tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "cache" / "building" / "of a build that was killed"
    killed.mkdir(parents=True)
    os.utime(killed, (0, 0))
    install(tmp_path, f"--source={archive}", "--jobs=3")
    first = capsys.readouterr().out
    assert f"Compiling Horovod 0.28.1+{patches.PATCH_LEVEL}.cpu for torch" in first
    assert ": 7 % after " in first and ": 100 % after " in first
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith(f"horovod-0.28.1+{patches.PATCH_LEVEL}.cpu-")
    install(tmp_path, "--source=none.tar.gz")
    second = capsys.readouterr().out
    assert "Compiling" not in second and "compiled earlier" in second
    assert not list((tmp_path / "cache" / "building").iterdir()), "the build left a folder"
    assert not list((tmp_path / "cache" / "logs").iterdir()), "a build that went well left its log"


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            'print("a.cc:7:1: error: no such thing\\nnext line\\nb.cc:1: error: later"); sys.exit("make: 2")',
            "no such thing",
        ),
        (
            'print("later"); setup = lambda package_data, make=setup, **more: make(**more)',
            "made no wheel with",
        ),
    ],
    ids=["an error", "no library"],
)
def test_a_failed_build_keeps_its_log_and_quotes_the_first_error(
    tmp_path: Path, body: str, said: str
) -> None:
    failing = source_archive(tmp_path, body)
    with pytest.raises(BuildError, match=said) as caught:
        install(tmp_path, f"--source={failing}")
    (log,) = (tmp_path / "cache" / "logs").iterdir()
    assert str(log) in str(caught.value)
    assert "later" in log.read_text()
    assert not (tmp_path / "wheels").exists() and not list((tmp_path / "cache").rglob("*.whl"))


def test_a_source_that_the_patches_do_not_fit_is_an_error_before_anything_is_compiled(tmp_path: Path) -> None:
    other = source_archive(tmp_path)
    top = tmp_path / "horovod-0.28.1"
    (top / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 20)\n")
    with tarfile.open(other, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    with pytest.raises(BuildError, match=r"found it 0 times:\n.*\n\nset\(CMAKE_CXX_STANDARD 14\)"):
        install(tmp_path, f"--source={other}")


@pytest.mark.slow
def test_an_ended_build_ends_its_compilers_and_is_simply_run_again(tmp_path: Path) -> None:
    slow = source_archive(tmp_path, "import time; time.sleep(120)")
    arguments = ["install-horovod", "--no-install", f"--cache-dir={tmp_path}/cache", f"--source={slow}"]
    program = [sys.executable, "-m", "horovod_tune.cli", *arguments]
    build = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert build.stdout is not None
        for line in build.stdout:
            if "Compiling" in line:
                break
        compilers = eventually(lambda: psutil.Process(build.pid).children(recursive=True), within_s=30)
        build.send_signal(signal.SIGTERM)
        assert build.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        build.kill()
        build.wait()
    _, alive = psutil.wait_procs(compilers, timeout=30)
    assert not alive
    (tmp_path / "horovod-0.28.1.tar.gz").unlink()
    install(tmp_path, f"--source={source_archive(tmp_path / 'again')}")
    assert list((tmp_path / "wheels").iterdir())


def test_the_wheel_of_another_build_is_not_taken_for_ours() -> None:
    builds = [("2.13.0+cpu", "none", "m"), ("2.13.0", "none", "m"), ("2.13.0+cpu", "none", "n")]
    nccl = [("2.13.0+cpu", "nccl", "m", chips) for chips in ("", "80", "80,90")]
    assert len({wheel_key(*build) for build in [*builds, *nccl]}) == 6


def test_patches_change_all_files_or_none(tmp_path: Path) -> None:
    first, *_ = hunks_of((2, 13), "none")
    (tmp_path / first.path).write_text(first.before)
    with pytest.raises(BuildError, match=r"horovod/torch/CMakeLists\.txt"):
        apply(patches.patches_for((2, 13), "none"), tmp_path)
    assert (tmp_path / first.path).read_text() == first.before
    (tmp_path / first.path).write_text(first.before * 2)
    with pytest.raises(BuildError, match="found it 2 times"):
        apply(patches.patches_for((2, 13), "none"), tmp_path)


def test_a_diff_is_read_as_what_it_takes_away_and_what_it_puts_there(tmp_path: Path) -> None:
    patch = tmp_path / "one.patch"
    first = "--- a/x/y\n+++ b/x/y\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n \n@@ -9 +9 @@\n-d\n"
    patch.write_text(f"Why.\n\n{first}--- a/z\n+++ b/z\n@@ -1 +1,2 @@\n+e\n f\n")
    assert list(hunks(patch)) == [
        Hunk("one.patch", "x/y", "a\nb\n\n", "a\nc\n\n"),
        Hunk("one.patch", "x/y", "d\n", ""),
        Hunk("one.patch", "z", "f\n", "e\nf\n"),
    ]


@pytest.mark.parametrize(
    ("torch", "gpu", "standard", "cpu_only"),
    [
        ((2, 1), "none", "cxx17", True),
        ((2, 13), "nccl", "cxx17", False),
        ((2, 14), "none", "cxx20", True),
    ],
)
def test_patches_are_those_that_the_build_needs(
    torch: tuple[int, int], gpu: str, standard: str, cpu_only: bool
) -> None:
    chosen = patches.patches_for(torch, gpu)
    names = {patch.stem for patch in chosen}
    assert names & {"cxx17", "cxx20"} == {standard}
    assert ("cpu_only" in names) is cpu_only
    assert "starting" in names


def test_the_patch_level_is_raised_with_every_change_of_a_patch() -> None:
    # The level distinguishes kept and installed wheels. Raise it when a patch changes, unless the result of
    # compiling is the same as before (or did not compile), and replace the digest here. A patch's first
    # lines are not compiled.
    every = {repr(hunk) for gpu in GPU_CHOICES for hunk in hunks_of((2, 13), gpu)}
    digest = hashlib.sha256("".join(sorted(every)).encode()).hexdigest()[:12]
    assert (patches.PATCH_LEVEL, digest) == ("ht7", "ef544bdc93f0")


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"XDG_CACHE_HOME": "/there"}, Path("/there/horovod_tune")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/horovod_tune"),
        ({}, Path.home() / ".cache/horovod_tune"),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(
    environ: dict[str, str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert build_parser().parse_args(["install-horovod"]).cache == root


def test_a_folder_that_hides_horovod_is_named_instead_of_another_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    monkeypatch.setattr(installed, "probe", lambda *_: {"error": "not built"})
    with pytest.raises(BuildError) as raised:
        command._check_installed(installed.InstalledHorovod("0.28.1"))
    assert f"not built\nPython imports {tmp_path}/horovod/__init__.py instead. Rename it" in str(raised.value)
    assert "--force" not in str(raised.value)
