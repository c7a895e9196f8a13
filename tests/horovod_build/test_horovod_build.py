"""install-horovod, its pieces: what the machine has, the compiler's environment and its output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import run_python

from horovod_tune.horovod_build import BuildError, build, installed, patches
from horovod_tune.horovod_build.build import first_error
from horovod_tune.horovod_build.installed import InstalledHorovod, InstalledTorch, installed_torch

CUDA_TORCH = InstalledTorch("2.13.0+cu128", "12.8")
CPU_TORCH = InstalledTorch("2.13.0+cpu", None)
NVCC = Path("/cuda/bin/nvcc")
NCCL = Path("/nccl/lib/libnccl.so.2")


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("shutil.which", lambda name: None if name.endswith("++") else name, "apt-get install g"),
        ("shutil.which", lambda name: None if name == "make" else name, "apt-get install make"),
        ("sysconfig.get_path", lambda name: "/nowhere", "apt-get install python3-dev"),
        ("importlib.util.find_spec", lambda name: None, "ensurepip"),
    ],
)
def test_a_missing_tool_is_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, found: object, said: str
) -> None:
    with monkeypatch.context() as without:
        without.setattr(name, found)
        with pytest.raises(BuildError, match=said):
            installed.find_tools(CPU_TORCH, "none", {"CXX": "no-such-compiler++"}, tmp_path)


@pytest.mark.parametrize(
    ("torch", "nvcc", "release", "nccl", "said"),
    [
        (CPU_TORCH, NVCC, "12.8", NCCL, ["not a CUDA build"]),
        (CUDA_TORCH, None, None, None, ["No nvcc", "No NCCL"]),
        (CUDA_TORCH, NVCC, "13.0", NCCL, ["built for CUDA 12.8"]),
    ],
)
def test_what_nccl_needs_is_named(
    torch: InstalledTorch, nvcc: Path | None, release: str | None, nccl: Path | None, said: list[str]
) -> None:
    missing = list(installed._missing_for_nccl(torch, nvcc, release, nccl))
    assert len(missing) == len(said) and all(map(str.__contains__, missing, said))


def test_nccl_is_taken_from_torchs_own_packages_before_the_system(tmp_path: Path) -> None:
    package = tmp_path / "nvidia" / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (package / name).parent.mkdir(parents=True)
        (package / name).touch()
    found = installed.find_nccl({}, [tmp_path])
    assert found == (package / "include", package / "lib/libnccl.so.2")


def test_an_old_cmake_counts_as_none(tmp_path: Path) -> None:
    old = tmp_path / "cmake"
    old.write_text("#!/bin/sh\necho cmake version 3.10.2\n")
    old.chmod(0o755)
    assert installed.find_cmake({"HOROVOD_CMAKE": str(old)}) != str(old)


def test_a_cpu_build_asks_only_for_gloo_and_torch() -> None:
    tools = {"HOROVOD_CMAKE": "/c/cmake"}
    environment = build.compile_environment("none", {}, jobs=2, tools=tools)
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


def test_a_nccl_build_gets_the_paths_of_cuda_and_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(installed, "find_cuda", lambda environ: (Path("/cuda"), NVCC))
    monkeypatch.setattr(installed, "find_nccl", lambda environ, packages: (Path("/nccl/include"), NCCL))
    theirs = {"PATH": "/usr/bin", "CUDA_HOME": "/another"}
    tools = installed.find_tools(CUDA_TORCH, "nccl", theirs, tmp_path)
    environment = build.compile_environment("nccl", theirs, jobs=1, tools=tools)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environment["HOROVOD_CUDA_HOME"] == environment["CUDA_HOME"] == "/cuda"
    assert environment["HOROVOD_NCCL_INCLUDE"] == "/nccl/include"
    assert environment["HOROVOD_NCCL_LIB"] == str(tmp_path)
    assert (tmp_path / "libnccl.so").readlink() == NCCL
    assert environment["HOROVOD_LOCAL_VERSION"] == f"{patches.PATCH_LEVEL}.nccl"
    assert environment["PATH"] == f"/cuda/bin{os.pathsep}/usr/bin"


def test_the_users_variables_cannot_make_another_wheel_than_the_plan_says() -> None:
    theirs = {"HOROVOD_WITH_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_BUILD_ARCH_FLAGS": "-mavx2"}
    environment = build.compile_environment("none", theirs, jobs=1, tools={})
    assert "HOROVOD_WITH_MPI" not in environment and "HOROVOD_GPU_OPERATIONS" not in environment
    assert environment["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx2"


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
def test_a_line_that_only_mentions_errors_is_no_cause(line: str) -> None:
    assert first_error([line]) is None


def test_the_installed_torch_is_read_without_importing_it() -> None:
    program = "import sys; from horovod_tune.horovod_build.installed import installed_torch as f;"
    ran = run_python("-c", f"{program} print(f().version); assert 'torch' not in sys.modules")
    torch = pytest.importorskip("torch")
    assert ran.stdout.strip() == torch.__version__
    found = installed_torch()
    assert found is not None and found.cuda == torch.version.cuda


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.28.1", None), ("0.28.1+ht1.cpu", "ht1"), ("0.28.1+ht2.nccl", "ht2"), ("1+x", None)],
)
def test_a_build_of_ours_is_recognised_by_its_version(version: str, level: str | None) -> None:
    assert InstalledHorovod(version, "2.13.0").patch_level == level
