"""The examples in the search's docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ["acquisition", "domains", "parameters", "covariance", "warping"]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"horovod_tune.search.{name}"))
    assert outcome.attempted > 0 and outcome.failed == 0
