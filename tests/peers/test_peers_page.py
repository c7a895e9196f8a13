"""The tests that docs/peers.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == [] and len(named) > 30


def test_every_claim_has_a_test_or_a_reason() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| claim ")]
    assert [row for row in rows if "`tests/" not in row and "*Differs*: " not in row] == []
