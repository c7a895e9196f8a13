"""What README.md and docs/ show is true: programs run, names and arguments exist, commands parse."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import run_python

from horovod_tune.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.M | re.S)
# Not installed where the tests run; TPU pages use it.
_ELSEWHERE = {"torch_xla"}


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Give each block of a page as the words after its fence, and its text."""
    found = [(about.strip(), textwrap.dedent(text)) for _, about, text in _BLOCK.findall(page.read_text())]
    return [(about, text) for about, text in found if about.split(" ")[0] == language]


def programs() -> Iterator[Any]:
    """The blocks with a title: whole programs."""
    for page in PAGES:
        for about, text in blocks(page, "python"):
            if title := re.search(r'title="([^"]+)"', about):
                # The first program that a reader meets.
                marks = [pytest.mark.contract] if page.name == "README.md" else []
                yield pytest.param(text, id=f"{page.name}:{title[1]}", marks=marks)


@pytest.mark.example
@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", list(programs()))
def test_a_program_of_the_documentation_runs(text: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    ran = run_python(
        str(program),
        cwd=tmp_path,
        # Its results go below its home.
        env={**os.environ, "HOME": str(tmp_path), "RAY_ADDRESS": "local"},
        timeout_s=550,
    )
    assert list(tmp_path.glob("ray_results/*/*/result.json"))
    if "resumed" in text or "first_epoch = state" in text:
        assert ran.stdout.rstrip().endswith("4"), "the second attempt continues from the checkpoint"


def imported(tree: ast.AST) -> dict[str, Any]:
    """Import what a block imports, and return the objects by their names."""
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] not in _ELSEWHERE:
                    module = importlib.import_module(each.name)
                    top = importlib.import_module(each.name.split(".")[0])
                    names[each.asname or top.__name__] = module if each.asname else top
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] not in _ELSEWHERE:
            module = importlib.import_module(str(node.module))
            for each in node.names:
                if not hasattr(module, each.name):
                    importlib.import_module(f"{node.module}.{each.name}")
                names[each.asname or each.name] = getattr(module, each.name)
    return names


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the object behind a dotted name of a block, or None where it is one of the block's own."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and inspect.ismodule(owner := resolved(node.value, names)):
        return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_arguments_in_python_blocks_exist(page: Path) -> None:
    names: dict[str, Any] = {}  # A block may continue where the one above it ended.
    for _, text in blocks(page, "python"):
        tree = ast.parse(text)
        names |= imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                resolved(node, names)
            if isinstance(node, ast.Call) and callable(called := resolved(node.func, names)):
                try:
                    parameters = inspect.signature(called).parameters
                except ValueError:  # written in C
                    continue
                if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                    continue
                unknown = {each.arg for each in node.keywords if each.arg} - set(parameters)
                assert not unknown, f"{ast.unparse(node.func)} has no {sorted(unknown)}"


def searches() -> Iterator[Any]:
    """Whatever starts a search when a user runs it: whole programs of the pages, examples, the notebook."""
    for page in PAGES:
        for about, text in blocks(page, "python"):
            # A block without its training function, or with gaps, is a part of a program.
            if 'title="' in about or ("def train(" in text and starts_a_search(text) and "..." not in text):
                yield pytest.param(text, id=f"{page.name}:{text.count(chr(10))} lines")
    for path in sorted((ROOT / "examples").iterdir()):
        text = path.read_text() if path.suffix in (".py", ".ipynb") else ""
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
            text = "\n".join(line for line in lines if not line.startswith("%"))
        if starts_a_search(text):
            yield pytest.param(text, id=path.name)


def starts_a_search(text: str) -> bool:
    """Return True if a program calls `tune.run` or makes a tuner, and so starts Ray or joins it."""
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    return not called.isdisjoint({"tune.run", "tune.Tuner", "resume_or_start"})


def own_rays(text: str) -> tuple[list[str], list[str]]:
    """Return a program's calls of `ray.init` that start a Ray of its own, and those that may join another."""
    if "from digits_mlp import connect_to_ray" in text and "connect_to_ray(" in text:
        text += "\n" + (ROOT / "examples" / "digits_mlp.py").read_text()
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    local_by_default = any(
        each.arg == "default" and ast.unparse(each.value) == "'local'"
        for call in calls
        if call.args and ast.unparse(call.args[0]) == "'--address'"
        for each in call.keywords
    )
    own, joining = [], []
    for call in (each for each in calls if ast.unparse(each.func) == "ray.init"):
        is_own = bool(call.args) and ast.unparse(call.args[0]) == "'local'"
        (own if is_own or (local_by_default and "address" in ast.unparse(call)) else joining).append(
            ast.unparse(call)
        )
    return own, joining


@pytest.mark.parametrize("text", list(searches()))
def test_a_program_joins_no_ray_that_it_does_not_name(text: str) -> None:
    """If another user's Ray runs on the machine, Tune joins it by default."""
    own, joining = own_rays(text)
    assert own, "says nowhere ray.init('local')"
    assert not [call for call in joining if "args.address" not in call], "joins any Ray"


def test_a_program_that_would_join_any_ray_is_seen() -> None:
    assert own_rays("ray.init()") == ([], ["ray.init()"])
    assert own_rays("ray.init(num_cpus=2)\nray.init('local')") == (
        ["ray.init('local')"],
        ["ray.init(num_cpus=2)"],
    )


def commands() -> Iterator[Any]:
    """The lines of a page that call `horovod-tune`, without prompts, comments and continuation lines."""
    for page in PAGES:
        for about, text in [each for word in ("", "sh", "bash", "text") for each in blocks(page, word)]:
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith("horovod-tune ") and "usage" not in about:
                    yield pytest.param(line, id=f"{page.name}:{line[:60]}")


@pytest.mark.parametrize("line", list(commands()))
def test_a_command_line_parses(line: str) -> None:
    words = shlex.split(line.split("#")[0])[1:]
    build_parser().parse_args([word.replace("…", "x") for word in words])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"(?:^|`)make ([a-z-]+(?: [a-z-]+)*)(?=`|$|  )", page.read_text(), re.M)
    assert {word for words in named for word in words.split()} <= targets


def test_the_map_of_the_package_has_every_folder_and_no_file_that_is_gone() -> None:
    package, text = ROOT / "horovod_tune", (ROOT / "docs" / "how_it_works.md").read_text()
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders <= set(re.findall(r"`([a-z_]+)/`", text))
    folders_of_code = (package, ROOT / "tests", ROOT / "tools")
    there = {path.name for folder in folders_of_code for path in folder.rglob("*.py")}
    named = set(re.findall(r"([a-z_]+\.py)\b", text + (ROOT / "CONTRIBUTING.md").read_text()))
    assert not named - there - {"x.py"}


def test_the_files_that_a_report_passes_name_their_place() -> None:
    text = (ROOT / "docs" / "how_it_works.md").read_text().partition("## How a report travels")[2]
    for number in range(1, 6):
        (line,) = re.findall(rf"^{number}\. .*$", text, re.M)
        for name in re.findall(r"`([a-z_/]+\.py)`", line.split(" runs)")[0])[:2]:
            head = ast.get_docstring(ast.parse((ROOT / "horovod_tune" / name).read_text())) or ""
            assert f"Step {number} of 5 of a report's path" in head, name


def test_every_patch_is_proposed_upstream() -> None:
    text = (ROOT / "docs" / "upstream.md").read_text()
    package = ROOT / "horovod_tune"
    patches = [*package.glob("ray_compat/patches/[a-z]*.py"), *package.glob("horovod_build/patches/*.patch")]
    assert len(patches) > 10
    assert not {path.stem for path in patches} - set(re.findall(r"^\| `([a-z_0-9]+)` \|", text, re.M))


def test_the_reference_has_what_a_class_inherits_from_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "tools")
    reference = importlib.import_module("docs_hook")._reference()
    (members,) = re.findall(r"^::: \S+\.Analysis\n.*\n.*\n +inherited_members: (.*)$", reference, re.M)
    assert {"dataframe", "best_config", "reload", "errors"} <= set(ast.literal_eval(members))
