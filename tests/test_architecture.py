"""Imports point down only, and heavy or optional libraries are imported in one place."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import run_python

PACKAGE = Path(__file__).resolve().parent.parent / "horovod_tune"

# From the ground up: a unit imports only from itself and from units on the lines above its own.
LAYERS = [
    {"errors", "messages", "best_effort", "compatibility", "scoring", "experiment_metadata"},
    {"bounds"},
    {"session", "spec", "files", "horovod_build", "large_batch"},
    {"function"},
    {"ray_compat", "channel"},
    {"transfer", "tpu"},
    {"rank"},
    {"actors"},
    {"backends"},
    {"coordinator"},
    {"doctor"},
    {"analysis"},
    {"backend_choice"},
    {"trainable"},
    {"run_settings"},
    {"creator"},
    {"resume"},
    {"search"},
    {"integrations"},
    {"cli"},
]
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}

# Each of these runs in its own process and exchanges messages with the others. What the coordinator needs
# from backends is in `coordinator/backend_protocol.py`; `backend_choice.py` joins the two.
BACKENDS = ("backends.horovod", "backends.torch_distributed", "backends.torch_xla")
APART = [
    *(("coordinator", each) for each in ("rank", "actors", *BACKENDS)),
    *itertools.combinations(BACKENDS, 2),
]

HEAVY = {"torch", "torch_xla", "torch_tpu", "horovod", "plotly", "sklearn", "pandas", "rich"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(source: str, *, for_types: bool = False) -> Iterator[str]:
    """Yield the dotted names that a module imports when it runs; with `for_types` also for type checkers."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")) if (
                    not for_types
                ):
                    for other in child.orelse:
                        yield from walk(ast.Module([other], []))
                case ast.Import(names=names):
                    yield from (name.name for name in names)
                case ast.ImportFrom(module=module, names=names):
                    yield from (f"{module}.{name.name}" for name in names)
                case _:
                    yield from walk(child)

    yield from walk(ast.parse(source))


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_are_found_wherever_they_are() -> None:
    source = """
import torch.nn as nn
from horovod_tune.session import session
def f():
    import horovod.torch
if TYPE_CHECKING:
    import numpy
else:
    import json
"""
    found = ["torch.nn", "horovod_tune.session.session", "horovod.torch", "json"]
    assert list(imports(source)) == found


def test_every_module_has_a_place_in_the_layers_and_none_is_gone() -> None:
    assert {unit_of(path) for path in modules()} == set(LAYER) | {"__init__"}


def test_imports_point_down_only() -> None:
    wrong = []
    for path in modules():
        unit = unit_of(path)
        for name in imports(path.read_text()) if unit != "__init__" else ():
            if not name.startswith("horovod_tune."):
                continue
            other = name.split(".")[1]
            if other in LAYER:
                allowed = other == unit or LAYER[other] < LAYER[unit]
            else:  # A public name, such as `from horovod_tune import report`.
                allowed = LAYER[unit] > LAYER["trainable"]
            if not allowed:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in modules()}
    homes = {name.removesuffix(".__init__"): name for name in names.values()}

    def needed(path: Path) -> set[str]:
        found = imports(path.read_text(), for_types=True)
        # A module, or something in one.
        named = {name if name in homes else name.rpartition(".")[0] for name in found}
        return {homes[name] for name in named & set(homes)} - {names[path]}

    graph = {name: needed(path) for path, name in names.items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_processes_that_exchange_messages_do_not_import_each_other() -> None:
    both_ways = [*APART, *((other, one) for one, other in APART)]
    crossing = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for one, other in both_ways
        for path in (PACKAGE / one.replace(".", "/")).rglob("*.py")
        for name in imports(path.read_text())
        if f"{name}.".startswith(f"horovod_tune.{other}.")
    ]
    assert not crossing


def test_a_backends_library_is_imported_only_in_its_folders() -> None:
    homes = {
        "horovod": {"backends/horovod", "large_batch", "session", "integrations"},
        "torch_xla": {"backends/torch_xla"},
        "torch_tpu": {"backends/torch_distributed"},
    }

    def home_of(path: Path) -> str:
        parts = path.relative_to(PACKAGE).parts
        return "/".join(parts[:2]) if parts[0] == "backends" else unit_of(path)

    elsewhere = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        for name in imports(path.read_text())
        if home_of(path) not in homes.get(name.split(".")[0], {home_of(path)})
    ]
    assert not elsewhere


@pytest.mark.parametrize(
    ("program", "unloaded"),
    [("import horovod_tune", HEAVY), ("import horovod_tune.cli as c; c.build_parser()", HEAVY | {"ray"})],
)
def test_the_package_and_the_help_of_its_command_load_nothing_heavy(program: str, unloaded: set[str]) -> None:
    loaded = run_python("-c", f"import sys; {program}; print(*sys.modules)").stdout.split()
    assert unloaded.isdisjoint(name.partition(".")[0] for name in loaded)


def test_large_batch_does_not_import_trials_or_ray() -> None:
    for path in (PACKAGE / "large_batch").rglob("*.py"):
        ours = [name for name in imports(path.read_text()) if name.split(".")[0] in ("ray", "horovod_tune")]
        assert {".".join(name.split(".")[:2]) for name in ours} <= {
            "horovod_tune.bounds",
            "horovod_tune.large_batch",
        }, path


def _is_broad(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        each is None or (isinstance(each, ast.Name) and each.id in ("Exception", "BaseException"))
        for each in names
    )


def test_a_broad_except_raises_again_or_explains_why_not() -> None:
    silent = []
    for path in modules():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "except" in text else ():
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                # On the line itself, or between it and what it does.
                head = text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
                if not isinstance(node.body[-1], ast.Raise) and not any("#" in line for line in head):
                    silent.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not silent


# Folders of tests that belong to no folder of the package: what they need, or what they look at, is wider.
WIDER_TESTS = {"cluster", "gpu", "soak", "trials"}


def test_the_tests_mirror_the_package() -> None:
    tests = Path(__file__).resolve().parent
    folders = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders - WIDER_TESTS <= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for folder in folders - WIDER_TESTS:
        below = {path.name for path in (tests / folder).iterdir() if any(path.glob("test_*.py"))}
        assert below <= {path.name for path in (PACKAGE / folder).iterdir() if path.is_dir()}, folder
