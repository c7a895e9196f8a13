"""The house keeps its shape: imports point down, and what is heavy or optional is imported in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "horovod_tune"

# From the ground up; a unit imports from itself and from the units on lines above its own, never below.
LAYERS = [
    {"errors", "experiment_facts", "messages", "host_slots", "unpicklable", "log_files"},
    {"tpu_types", "training_function", "directories"},
    {"shipping"},
    {"spec", "session", "transfer", "horovod_build", "large_batch"},
    {"elastic", "ray_adapter", "backend", "doctor", "parameters"},
    {"host_copies", "trial_logs"},
    {"storage"},
    {"workers"},
    {"node", "preflight"},
    {"coordinator"},
    {"analysis"},
    {"run_settings"},
    {"trainable"},
    {"launch", "resume"},
    {"search"},
    {"integrations"},
    {"cli"},
]
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}

HEAVY = {"torch", "torch_xla", "horovod", "matplotlib", "sklearn", "pandas", "rich"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(source: str, package: str = "horovod_tune") -> Iterator[str]:
    """Give the dotted names that a module imports when it runs; those for type checkers alone are left out.

    `package` is the one that relative imports start from.
    """

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                    for other in child.orelse:
                        yield from walk(ast.Module([other], []))
                case ast.Import(names=names):
                    yield from (name.name for name in names)
                case ast.ImportFrom(module=module, names=names, level=level):
                    above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                    start = ".".join([*above, *([module] if module else [])])
                    yield from (f"{start}.{name.name}" for name in names)
                case _:
                    yield from walk(child)

    yield from walk(ast.parse(source))


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as nn", ["torch.nn"]),
        ("from horovod_tune import session", ["horovod_tune.session"]),
        ("def f():\n    import horovod.torch", ["horovod.torch"]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import json", ["json"]),
        ("from . import errors", ["horovod_tune.gloo.errors"]),
        ("from ..protocol import Group", ["horovod_tune.coordinator.backend_protocol.Group"]),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, found: list[str]) -> None:
    assert list(imports(source, "horovod_tune.gloo")) == found


def test_every_module_has_a_place_in_the_layers() -> None:
    homeless = {unit_of(path) for path in modules()} - set(LAYER) - {"__init__"}
    assert not homeless, f"give these a line in LAYERS: {sorted(homeless)}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        return  # The public names come from everywhere.
    package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
    for name in imports(path.read_text(), package):
        if not name.startswith("horovod_tune."):
            continue
        other = name.split(".")[1]
        if other not in LAYER:  # A public name, such as `from horovod_tune import report`.
            assert LAYER[unit] > LAYER["trainable"], f"{unit} imports the public package above it: {name}"
        else:
            assert other == unit or LAYER[other] < LAYER[unit], f"{unit} imports {name}, not below it"


@pytest.mark.parametrize(
    ("library", "homes"), [("horovod", ["workers/gloo", "large_batch"]), ("torch_xla", ["workers/xla"])]
)
def test_a_launcher_library_is_imported_in_its_places(library: str, homes: list[str]) -> None:
    elsewhere = [
        str(path.relative_to(PACKAGE))
        for path in modules()
        if any(name.split(".")[0] == library for name in imports(path.read_text()))
        and not any(path.is_relative_to(PACKAGE / home) for home in homes)
    ]
    assert not elsewhere


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import sys, horovod_tune; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not HEAVY & set(ran.stdout.split())


def test_large_batch_knows_nothing_of_trials_or_ray() -> None:
    known = {"horovod_tune.errors", "horovod_tune.large_batch"}
    for path in sorted((PACKAGE / "large_batch").rglob("*.py")):
        for name in imports(path.read_text()):
            assert not name.startswith("ray."), f"{path.name} imports {name}"
            if name.startswith("horovod_tune."):
                assert ".".join(name.split(".")[:2]) in known, f"{path.name} imports {name}"


def test_the_package_ships_its_type_information() -> None:
    assert (PACKAGE / "py.typed").is_file()
