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
    {"compatibility"},
    {"errors", "experiment_facts", "messages", "error_text"},
    {"tpu_types", "function", "files", "reported_values", "placement", "outside_training", "process_start"},
    {"spec", "session", "horovod_build", "large_batch"},
    {"elastic", "resizing", "with_parameters"},
    {"ray_compat", "channel", "doctor"},
    {"transfer"},
    {"rank"},
    {"gloo", "xla"},
    {"coordinator"},
    {"node", "preflight"},
    {"analysis"},
    {"run_settings", "backends"},
    {"trainable"},
    {"creator"},
    {"launch", "resume"},
    {"search"},
    {"integrations"},
    {"cli"},
]
LAYER = {unit: number for number, units in enumerate(LAYERS) for unit in units}

# Units of one process, which know nothing of each other: they speak through messages and channels. What the
# coordinator needs of Gloo and XLA is in `coordinator/backend_protocol.py`; `trainable.py` joins the two.
APART = [("coordinator", "rank"), ("coordinator", "gloo"), ("coordinator", "xla"), ("gloo", "xla")]

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
        ("from . import errors", ["horovod_tune.gloo.fork_server.errors"]),
        ("from ..ranks import assign", ["horovod_tune.gloo.ranks.assign"]),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, found: list[str]) -> None:
    assert list(imports(source, "horovod_tune.gloo.fork_server")) == found


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


def test_no_layer_is_without_a_file() -> None:
    gone = set(LAYER) - {unit_of(path) for path in modules()}
    assert not gone, f"LAYERS has lines of units that are no more: {sorted(gone)}"


@pytest.mark.parametrize(("one", "other"), [*APART, *((other, one) for one, other in APART)])
def test_units_of_different_processes_import_nothing_of_each_other(one: str, other: str) -> None:
    crossing = [
        str(path.relative_to(PACKAGE))
        for path in (PACKAGE / one).rglob("*.py")
        if any(name.split(".")[:2] == ["horovod_tune", other] for name in imports(path.read_text()))
    ]
    assert not crossing


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_absolute(path: Path) -> None:
    relative = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, f"{path}: lines {relative}"


def test_a_files_name_is_unique_in_the_package() -> None:
    names = [path.name for path in modules() if path.name != "__init__.py"]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(("library", "homes"), [("horovod", ["gloo", "large_batch"]), ("torch_xla", ["xla"])])
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


def _is_broad(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        each is None or (isinstance(each, ast.Name) and each.id in ("Exception", "BaseException"))
        for each in names
    )


def test_whoever_catches_everything_raises_again_or_says_why_not() -> None:
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
WIDER_TESTS = {"cluster", "gpu", "peers", "soak", "trials"}


def test_the_tests_mirror_the_package() -> None:
    tests = Path(__file__).resolve().parent
    folders = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders - WIDER_TESTS <= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for folder in folders - WIDER_TESTS:
        below = {path.name for path in (tests / folder).iterdir() if any(path.glob("test_*.py"))}
        assert below <= {path.name for path in (PACKAGE / folder).iterdir() if path.is_dir()}, folder
