"""Makes the pages of the documentation site that come from files outside docs/; mkdocs calls these functions.

README.md, CHANGELOG.md, CONTRIBUTING.md and each program in examples/ become a page each. The `--help` of all
commands becomes a page, and so do the docstrings of the public names. Paths of these files, as links or
between backticks, become links to their pages: a missing page then fails `mkdocs build --strict`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from horovod_tune.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent

# Files in the root folder, and the page that each becomes.
TOP = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}

# The public modules, and the text above their names in the reference.
PUBLIC = {
    "horovod_tune": "Trials and what a training function calls.",
    "horovod_tune.search": "Searchers: [the guide](search.md).",
    "horovod_tune.large_batch": "For training functions, in trials or under plain `horovodrun`.",
    "horovod_tune.analysis": "What a search found: [the guide](analysis.md).",
    "horovod_tune.analysis.plots": "Each function returns a `plotly.graph_objects.Figure`.",
}

_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
_MENTION = re.compile(r"(?<!\[)`((?:docs|examples)/\w+\.(?:md|py|ipynb)|[A-Z]+\.md)`(?!\])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the examples, and the pages that mkdocs.yml does not name, to the navigation."""
    assert config.nav is not None
    named = str(config.nav)
    more = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f"'{path.name}'" not in named]
    config.nav.insert(-1, {"Examples": [_example_page(path) for path in _examples()]})
    if more:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are made from files outside docs/."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for path in _examples():
        files.append(File.generated(config, _example_page(path), content=_shown(path)))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.png")):
        page = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, page, abs_src_path=str(picture)))
    files.append(File.generated(config, "commands.md", content=_commands()))
    files.append(File.generated(config, "api.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to files of the checkout lead to the pages made from these files."""
    source = page.file.src_uri
    tops = {made: name for name, made in TOP.items()}
    # The folder that the page's own links are relative to; its path starts at the top of the checkout.
    base = "" if source in tops else posixpath.dirname(f"docs/{source}")

    def link(target: str) -> str:
        return posixpath.relpath(_page_of(target), posixpath.dirname(source) or ".")

    def relative(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(base, found[1]))
        return f"]({link(target)}{found[2] or ''})"

    lines, in_code = [], False
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            line = _LINK.sub(relative, line)
            line = _MENTION.sub(lambda found: f"[`{found[1]}`]({link(found[1])})", line)
        lines.append(line)
    return "\n".join(lines)


def _page_of(path: str) -> str:
    """Return the site's page for a file of the checkout.

    >>> _page_of("docs/search.md"), _page_of("README.md"), _page_of("examples/pbt_digits.py")
    ('search.md', 'index.md', 'examples/pbt_digits.md')
    """
    if path in TOP:
        return TOP[path]
    if path.startswith("examples/"):
        return os.path.splitext(path)[0] + ".md"
    return path.removeprefix("docs/")


def _examples() -> list[Path]:
    return sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")])


def _example_page(path: Path) -> str:
    return f"examples/{path.stem}.md"


def _shown(path: Path) -> str:
    """Return an example as a page: the first line of its docstring and the program, or a notebook's cells."""
    source = path.read_text()
    if path.suffix == ".ipynb":
        cells = [(each["cell_type"], "".join(each["source"])) for each in json.loads(source)["cells"]]
        return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)
    about = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
    return f"# {path.stem}\n\n{about}\n\n```python\n{source}```\n"


def _commands() -> str:
    """Return the page with the `--help` of each command of `horovod-tune`."""
    os.environ["COLUMNS"] = "100"
    parts = ["# Commands\n", "Each command prints its section of this page with `--help`.\n"]
    parts += [_help(parser) for parser in _parsers(build_parser())]
    return "\n".join(parts)


def _help(parser: argparse.ArgumentParser) -> str:
    return f"## {parser.prog}\n\n```text\n{parser.format_help()}```\n"


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices: dict[str, Any] = action.choices
            for each in dict.fromkeys(choices.values()):
                found += _parsers(each)
    return found


def _reference() -> str:
    """Return the reference page, which names the public functions and classes for mkdocstrings."""
    parts = ["# Python reference\n", "Generated from the docstrings. Names that are not here are internal.\n"]
    for name, about in PUBLIC.items():
        module = importlib.import_module(name)
        parts.append(f"## {name}\n\n{about}\n")
        for public in module.__all__:
            thing = getattr(module, public)
            if not str(thing.__module__).startswith("horovod_tune"):
                continue  # a type alias, which appears in the signatures of the others
            parts.append(f"::: {thing.__module__}.{thing.__qualname__}")
            if isinstance(thing, type) and not issubclass(thing, BaseException):
                members = _members(thing)
                parts.append(f"    options:\n      members: {members}\n      inherited_members: {members}")
            parts.append("")
    return "\n".join(parts)


def _members(kind: type) -> list[str]:
    """Return the documented public methods and properties of a class, and of concrete bases of ours."""
    ours = [base for base in kind.__mro__[1:] if base.__module__.startswith("horovod_tune")]
    bases = (kind, *(base for base in ours if not inspect.isabstract(base)))
    members = (member for base in bases for member in vars(base).items())
    return [
        name
        for name, value in members
        if not name.startswith("_") and getattr(value, "__doc__", None) and not isinstance(value, str | int)
    ]
