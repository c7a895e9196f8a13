"""Patches of Horovod's build: it compiles with current torch, in any folder, into a small library."""

from __future__ import annotations

from horovod_tune.horovod_build.patching import Patch

_CXX17_WHY = "torch's headers need C++17 since torch 2.1"

CXX17 = (
    Patch(
        name="C++17",
        why=_CXX17_WHY,
        path="CMakeLists.txt",
        before="set(CMAKE_CXX_STANDARD 14)\n",
        after="set(CMAKE_CXX_STANDARD 17)\n",
    ),
    Patch(
        name="C++17 for torch",
        why=_CXX17_WHY,
        path="horovod/torch/CMakeLists.txt",
        before="    set(CMAKE_CXX_STANDARD 14)\n",
        after="    set(CMAKE_CXX_STANDARD 17)\n",
    ),
)

NO_DEBUG_INFORMATION = Patch(
    name="no debug information",
    why="it makes the library 62 MB instead of 2 MB, which every rank maps and every node is sent",
    path="CMakeLists.txt",
    before='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n',
    after='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n'
    'string(REPLACE "-g" "" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n',
)

CPU_ONLY = Patch(
    name="no CUDA",
    why="a CUDA build of torch beside a CUDA toolkit would pull in CUDA code that nobody asked for",
    path="cmake/Modules/FindPytorch.cmake",
    before="True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False",
    after="False",
)

ANY_FOLDER = (
    Patch(
        name="a folder with a plus sign",
        why="its name is taken for a regular expression, and the library lands elsewhere",
        path="cmake/Utilities.cmake",
        before='string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER',
        after='string(REPLACE "${PROJECT_SOURCE_DIR}/" "" SUB_FOLDER',
    ),
    Patch(
        name="a folder with a space",
        why="the linker takes its name for two",
        path="CMakeLists.txt",
        before="-Wl,--version-script=${CMAKE_SOURCE_DIR}/horovod.lds",
        after='-Wl,--version-script=\\"${CMAKE_SOURCE_DIR}/horovod.lds\\"',
    ),
)
