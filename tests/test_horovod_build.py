"""install-horovod: the real way through, with a stand-in for Horovod's source that compiles in seconds."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from horovod_tune.horovod_build import BuildError, patches, plan, prerequisites
from horovod_tune.horovod_build.install import Request, install_horovod
from horovod_tune.horovod_build.installed import InstalledHorovod, InstalledTorch, installed_torch
from horovod_tune.horovod_build.progress import Reporter, first_error, percent_done
from horovod_tune.horovod_build.wheel_cache import WheelCache, default_cache

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


def source_archive(folder: Path, body: str = "") -> Path:
    """Make an archive that has just the texts that the patches look for."""
    top = folder / "horovod-0.28.1"
    for patch in patches.patches_for((2, 13), "none"):
        path = top / patch.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(patch.before + "\n")
    (top / "horovod/torch/__init__.py").write_text("")
    (top / "setup.py").write_text(SETUP.format(body=body))
    archive = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    return archive


def request(tmp_path: Path, **changes: object) -> Request:
    """Ask for a build that installs nothing into the environment of the tests."""
    given: dict[str, object] = {
        "cache": tmp_path / "cache",
        "install": False,
        "wheel_dir": tmp_path / "wheels",
    }
    return Request(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_archive(tmp_path_factory.mktemp("source"))


# --- the way through --------------------------------------------------------------------


def test_a_wheel_is_compiled_once_and_then_taken_from_the_cache(
    tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_horovod(request(tmp_path, source=archive, jobs=3))
    first = capsys.readouterr().out
    assert f"Compiling Horovod 0.28.1+{patches.PATCH_LEVEL}.cpu for torch" in first
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith(f"horovod-0.28.1+{patches.PATCH_LEVEL}.cpu-")
    install_horovod(request(tmp_path, source=tmp_path / "none.tar.gz"))
    second = capsys.readouterr().out
    assert "Compiling" not in second and "compiled earlier" in second
    assert not list((tmp_path / "cache" / "building").iterdir()), "the build left its folder"
    assert not list((tmp_path / "cache" / "logs").iterdir()), "a build that went well left its log"


def test_no_cache_takes_no_wheel_and_keeps_none(tmp_path: Path, archive: Path) -> None:
    install_horovod(request(tmp_path, source=archive, use_cache=False))
    assert list((tmp_path / "wheels").iterdir())
    assert not (tmp_path / "cache" / "wheels").exists()


def test_a_failed_build_keeps_its_log_and_quotes_the_first_error(tmp_path: Path) -> None:
    failing = source_archive(
        tmp_path,
        'print("a.cc:7:1: error: no such thing\\nnext line\\nb.cc:1: error: later"); sys.exit("make: 2")',
    )
    with pytest.raises(BuildError, match="no such thing") as caught:
        install_horovod(request(tmp_path, source=failing))
    (log,) = (tmp_path / "cache" / "logs").iterdir()
    assert str(log) in str(caught.value)
    assert "later" in log.read_text()
    assert not (tmp_path / "wheels").exists()


def test_a_source_that_the_patches_do_not_fit_is_an_error_before_anything_is_compiled(tmp_path: Path) -> None:
    other = source_archive(tmp_path)
    top = tmp_path / "horovod-0.28.1"
    (top / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 20)\n")
    with tarfile.open(other, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    with pytest.raises(BuildError, match=r"found it 0 times:\nset\(CMAKE_CXX_STANDARD 14\)"):
        install_horovod(request(tmp_path, source=other))


def test_an_ended_build_ends_its_compilers_and_is_simply_run_again(tmp_path: Path) -> None:
    slow = source_archive(tmp_path, "import time; time.sleep(120)")
    command = [sys.executable, "-m", "horovod_tune.cli", "install-horovod", "--no-install"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--source", str(slow)]
    build = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert build.stdout is not None
        for line in build.stdout:
            if "Compiling" in line:
                break
        compilers = wait_for_children(build.pid)
        build.send_signal(signal.SIGTERM)
        assert build.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        build.kill()
        build.wait()
    _, alive = psutil.wait_procs(compilers, timeout=30)
    assert not alive
    (tmp_path / "horovod-0.28.1.tar.gz").unlink()
    install_horovod(request(tmp_path, source=source_archive(tmp_path / "again")))
    assert list((tmp_path / "wheels").iterdir())


def wait_for_children(pid: int) -> list[psutil.Process]:
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        if children := psutil.Process(pid).children(recursive=True):
            return children
        time.sleep(0.05)
    raise AssertionError("the build started no process within 30 s")


def test_the_wheel_of_another_build_is_not_taken_for_ours() -> None:
    def key(**changes: str) -> str:
        given = {"horovod_version": "0.28.1", "torch_version": "2.13.0+cpu", "machine": "m"}
        return plan.Plan(**(given | changes)).key  # type: ignore[arg-type]

    changes = [
        {},
        {"horovod_version": "0.28.0"},
        {"torch_version": "2.13.0"},
        {"gpu": "nccl"},
        {"python": "cpython-312"},
        {"machine": "n"},
    ]
    assert len({key(**change) for change in changes}) == len(changes)


# --- patches ----------------------------------------------------------------------------


def test_patches_change_all_files_or_none(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 14)\n")
    with pytest.raises(BuildError, match=r"horovod/torch/CMakeLists\.txt"):
        patches.apply(patches.CXX17, tmp_path)
    assert (tmp_path / "CMakeLists.txt").read_text() == "set(CMAKE_CXX_STANDARD 14)\n"


def test_a_text_that_is_there_twice_is_no_match() -> None:
    patch = patches.CXX17[0]
    with pytest.raises(BuildError, match="found it 2 times"):
        patch.applied_to(patch.before * 2)


@pytest.mark.parametrize(
    ("torch", "gpu", "cxx17", "cpu_only"),
    [((2, 0), "none", False, True), ((2, 1), "none", True, True), ((2, 13), "nccl", True, False)],
)
def test_patches_are_those_that_the_build_needs(
    torch: tuple[int, int], gpu: str, cxx17: bool, cpu_only: bool
) -> None:
    chosen = patches.patches_for(torch, gpu)
    assert (patches.CXX17[0] in chosen) is cxx17
    assert (patches.CPU_ONLY in chosen) is cpu_only
    assert patches.GLOO_INTERFACE in chosen


def test_the_patch_level_is_raised_with_every_change_of_a_patch() -> None:
    # Kept wheels and installed ones are told apart by the level. Changed a patch? Raise it, and put here what
    # this test then finds.
    every = {repr(patch) for gpu in plan.GPU_CHOICES for patch in patches.patches_for((2, 13), gpu)}
    digest = hashlib.sha256("".join(sorted(every)).encode()).hexdigest()[:12]
    assert (patches.PATCH_LEVEL, digest) == ("ht2", "cfce67785108")


# --- what the machine has ---------------------------------------------------------------


def machine(**changes: object) -> prerequisites.Machine:
    given: dict[str, object] = {
        "compiler": "/usr/bin/c++",
        "make": "/usr/bin/make",
        "cmake": "/usr/bin/cmake",
        "python_header": True,
        "pip": True,
        "nvcc": Path("/cuda/bin/nvcc"),
        "nvcc_release": "12.8",
        "nccl": plan.NcclPlace(Path("/nccl/include"), Path("/nccl/lib/libnccl.so")),
    }
    return prerequisites.Machine(**(given | changes))  # type: ignore[arg-type]


CUDA_TORCH = InstalledTorch("2.13.0+cu128", "12.8", None)
CPU_TORCH = InstalledTorch("2.13.0+cpu", None, None)


@pytest.mark.parametrize(
    ("changes", "torch", "gpu", "said"),
    [
        ({"compiler": None}, CPU_TORCH, "none", "apt-get install g"),
        ({"make": None}, CPU_TORCH, "none", "apt-get install make"),
        ({"python_header": False}, CPU_TORCH, "none", "apt-get install python3-dev"),
        ({"pip": False}, CPU_TORCH, "none", "ensurepip"),
        ({}, CPU_TORCH, "nccl", "not a CUDA build"),
        ({"nvcc": None, "nvcc_release": None}, CUDA_TORCH, "nccl", "No nvcc"),
        ({"nvcc_release": "13.0"}, CUDA_TORCH, "nccl", "built for CUDA 12.8"),
        ({"nccl": None}, CUDA_TORCH, "nccl", "No NCCL"),
    ],
)
def test_what_is_missing_is_named_with_its_cure(
    changes: dict[str, object], torch: InstalledTorch, gpu: str, said: str
) -> None:
    with pytest.raises(BuildError, match=said):
        prerequisites.check(machine(**changes), torch, gpu)


def test_a_complete_machine_may_build_and_a_cpu_build_needs_no_cuda() -> None:
    prerequisites.check(machine(), CUDA_TORCH, "nccl")
    prerequisites.check(machine(nvcc=None, nccl=None), CPU_TORCH, "none")


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(BuildError) as caught:
        prerequisites.check(machine(compiler=None, nvcc=None, nccl=None), CUDA_TORCH, "nccl")
    assert len(str(caught.value).splitlines()) == 4


def test_nccl_is_taken_from_torchs_own_packages_before_the_system(tmp_path: Path) -> None:
    package = tmp_path / "nvidia" / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (package / name).parent.mkdir(parents=True)
        (package / name).touch()
    found = prerequisites.find_nccl({}, [tmp_path])
    assert found == plan.NcclPlace(package / "include", package / "lib/libnccl.so.2")


def test_an_old_cmake_counts_as_none(tmp_path: Path) -> None:
    old = tmp_path / "cmake"
    old.write_text("#!/bin/sh\necho cmake version 3.10.2\n")
    old.chmod(0o755)
    assert prerequisites.find_cmake({"HOROVOD_CMAKE": str(old)}) != str(old)


# --- the compiler's environment ---------------------------------------------------------


def test_a_cpu_build_asks_for_gloo_and_torch_alone() -> None:
    environment = plan.compile_environment(plan.Plan("0.28.1", "2.13.0+cpu"), {}, jobs=2, cmake="/c/cmake")
    assert environment == {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_CMAKE": "/c/cmake",
        "HOROVOD_LOCAL_VERSION": f"{patches.PATCH_LEVEL}.cpu",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": "-j2",
    }


def test_a_nccl_build_is_told_where_cuda_and_nccl_are() -> None:
    built = plan.Plan(
        "0.28.1",
        "2.13.0+cu128",
        gpu="nccl",
        cuda_home=Path("/cuda"),
        nccl=plan.NcclPlace(Path("/nccl/include"), Path("/nccl/lib/libnccl.so")),
    )
    environment = plan.compile_environment(built, {"PATH": "/usr/bin"}, jobs=1, cmake="cmake")
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_CUDA_HOME"] == environment["CUDA_HOME"] == "/cuda"
    assert environment["HOROVOD_NCCL_INCLUDE"] == "/nccl/include"
    assert environment["HOROVOD_NCCL_LIB"] == "/nccl/lib"
    assert environment["HOROVOD_LOCAL_VERSION"] == f"{patches.PATCH_LEVEL}.nccl"
    assert environment["PATH"] == f"/cuda/bin{os.pathsep}/usr/bin"


def test_the_users_variables_cannot_make_another_wheel_than_the_plan_says() -> None:
    theirs = {"HOROVOD_WITH_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_BUILD_ARCH_FLAGS": "-mavx2"}
    environment = plan.compile_environment(plan.Plan("0.28.1", "2.13.0"), theirs, jobs=1, cmake="cmake")
    assert "HOROVOD_WITH_MPI" not in environment and "HOROVOD_GPU_OPERATIONS" not in environment
    assert environment["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx2"


def test_the_build_is_against_the_torch_in_place() -> None:
    command = plan.compile_command("/venv/bin/python", Path("/source"), Path("/wheels"))
    assert command[:4] == ["/venv/bin/python", "-m", "pip", "wheel"]
    assert {"--no-build-isolation", "--no-deps"} <= set(command)


# --- progress and errors ----------------------------------------------------------------


class Screen:
    def __init__(self, *, tty: bool) -> None:
        self.written: list[str] = []
        self.isatty = lambda: tty

    def write(self, text: str) -> None:
        self.written.append(text)

    def flush(self) -> None: ...


def test_without_a_terminal_progress_is_a_line_every_ten_percent() -> None:
    screen = Screen(tty=False)
    reporter = Reporter("Compiling", screen, clock=iter(range(1000)).__next__)  # type: ignore[arg-type]
    for percent in range(0, 101, 2):
        reporter.line(f"[{percent:3d}%] Building CXX object")
    reporter.done("done")
    assert len(screen.written) == 12
    assert all(line.endswith("\n") and "\r" not in line for line in screen.written)


def test_on_a_terminal_progress_is_one_live_line() -> None:
    screen = Screen(tty=True)
    reporter = Reporter("Compiling", screen, clock=iter(range(1000)).__next__)  # type: ignore[arg-type]
    reporter.line("[ 42%] Building CXX object")
    reporter.tick()
    assert len(screen.written) == 2, "a second later the line is written again"
    assert all(text.startswith("\rCompiling:  42 %") and "\n" not in text for text in screen.written)


def test_a_line_that_says_nothing_new_is_not_written_again() -> None:
    screen = Screen(tty=True)
    reporter = Reporter("Compiling", screen, clock=lambda: 0.0)  # type: ignore[arg-type]
    for _ in range(3):
        reporter.line("[ 42%] Building CXX object")
    assert len(screen.written) == 1


@pytest.mark.parametrize(
    ("line", "percent"),
    [("[  1%] Building", 1), ("  [100%] Linking", 100), ("c++ -o [ 42%]", None), ("", None)],
)
def test_the_percentage_is_cmakes(line: str, percent: int | None) -> None:
    assert percent_done(line) == percent


@pytest.mark.parametrize(
    ("log", "first"),
    [
        ("ok\n a.cc:3:1: error: expected ';'\n b", "a.cc:3:1: error: expected ';'"),
        ("a.h:1:10: fatal error: Python.h: No such file\nmake: *** Error 1", "a.h:1:10: fatal error"),
        ("CMake Error at CMakeLists.txt:1", "CMake Error"),
        (
            "/usr/bin/ld: cannot find -lnccl\ncollect2: error: ld returned 1",
            "/usr/bin/ld: cannot find -lnccl",
        ),
        ("c++: fatal error: Killed signal terminated program cc1plus", "c++: fatal error: Killed"),
    ],
)
def test_the_first_error_is_the_cause(log: str, first: str) -> None:
    found = first_error(log.splitlines())
    assert found is not None and found.startswith(first)


@pytest.mark.parametrize(
    "line",
    [
        "error: subprocess-exited-with-error",
        "ERROR: Failed building wheel for horovod",
        "Building CXX object transport/tcp/error.cc.o",
        "calls to avoid build errors in the future.",
        "/usr/bin/ld: warning: size of symbol changed",
    ],
)
def test_a_line_that_only_speaks_of_errors_is_no_cause(line: str) -> None:
    assert first_error([line]) is None


# --- the kept wheels --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"XDG_CACHE_HOME": "/there"}, Path("/there/horovod_tune")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/horovod_tune"),
        ({}, Path.home() / ".cache/horovod_tune"),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(environ: dict[str, str], root: Path) -> None:
    assert default_cache(environ) == root


@pytest.fixture
def held_lock(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the build `key` until it ends."""
    program = f"""
        import pathlib, sys
        from horovod_tune.horovod_build.wheel_cache import WheelCache
        with WheelCache(pathlib.Path({str(tmp_path)!r})).lock("key"):
            print("held", flush=True)
            sys.stdin.read()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    yield holder
    holder.kill()
    holder.communicate()


def test_waiting_for_another_build_has_an_end_and_names_it(
    tmp_path: Path, held_lock: subprocess.Popen[str]
) -> None:
    with (
        pytest.raises(BuildError, match=f"Process {held_lock.pid} has been building"),
        WheelCache(tmp_path).lock("key", timeout_s=0.2, poll_s=0.05),
    ):
        pytest.fail("two held the lock")


def test_a_killed_build_leaves_no_lock(tmp_path: Path, held_lock: subprocess.Popen[str]) -> None:
    held_lock.kill()
    held_lock.wait(timeout=10)
    with WheelCache(tmp_path).lock("key", timeout_s=10):
        pass


# --- what is installed ------------------------------------------------------------------


def test_the_installed_torch_is_read_without_importing_it() -> None:
    program = (
        "import sys; from horovod_tune.horovod_build.installed import installed_torch as f;"
        "print(f().version); assert 'torch' not in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    torch = pytest.importorskip("torch")
    assert ran.stdout.strip() == torch.__version__
    found = installed_torch()
    assert found is not None and found.cuda == torch.version.cuda


@pytest.mark.parametrize(
    ("version", "level", "gpu"),
    [
        ("0.28.1", None, None),
        ("0.28.1+ht1.cpu", "ht1", "none"),
        ("0.28.1+ht2.nccl", "ht2", "nccl"),
        ("1+x", None, None),
    ],
)
def test_a_build_of_ours_is_told_by_its_version(version: str, level: str | None, gpu: str | None) -> None:
    horovod = InstalledHorovod(version, "2.13.0")
    assert (horovod.patch_level, horovod.gpu) == (level, gpu)
