"""Metrics of a report, columns of a frame, and the line on why a trial failed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from horovod_tune.actors.rank_process import last_lines
from horovod_tune.analysis.frames import clock, typed
from horovod_tune.analysis.trial_details import error_line
from horovod_tune.scoring import value_of


def test_a_metric_may_be_nested_or_contain_a_slash():
    assert value_of({"a/b": 1, "a": {"b": 2}}, "a/b") == 1.0
    assert value_of({"a": {"b": {"c": 3}}}, "a/b/c") == 3.0
    assert value_of({"a": {"b/c": 3}, "a/b": {"d": 4}}, "a/b/c") == 3.0
    assert value_of({"a": "text"}, "a") is None
    assert value_of({"a": np.float32(0.5)}, "a") == 0.5
    assert value_of({"a": np.int64(3)}, "a") == 3.0


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "int64"),
        ([1, None], "Int64"),
        ([True, False], "bool"),
        ([True, None], "boolean"),
        ([1, 2.5], "float64"),
        ([0.5, None], "float64"),
        (["a", 1], "object"),
        ([[1], [2]], "object"),
        ([2**70], "object"),
        ([True, 1], "object"),
    ],
)
def test_columns_keep_their_types(values, dtype):
    assert str(typed(values).dtype) == dtype


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Failure # 1 (occurred at x)\nTraceback\n  File\nValueError: no\n", "ValueError: no"),
        ("Failure # 1 (occurred at x)\n\x1b[36mray::f\x1b[39m\nE: a\n    more of it\n", "E: a"),
        ("", "(no text)"),
        (
            "E: rank 1 of 2 on b failed:\n(rank 0 on a died)\nTraceback (most recent call last):\n"
            '  File "t.py", line 3, in train\n    f()\nValueError: the shapes differ:\n  got 3\nwanted 4\n\n'
            "Advice: use 4.\n",
            "rank 1 of 2 on b failed: ValueError: the shapes differ:",
        ),
        (
            "E: rank 1 of 2 on b died:\n(rank 0 on a lost contact with the others)\nprocess 7: it was "
            f"ended by SIGKILL\n{last_lines(b'step 3')}",
            "rank 1 of 2 on b died: process 7: it was ended by SIGKILL",
        ),
        (
            'E: rank 1 of 2 on b hung:\nIt is at:\n  File "t.py", line 3, in train\nit did not enter a',
            "rank 1 of 2 on b hung: it did not enter a",
        ),
        (
            'E: rank 0 of 2 on b waited in a collective that not all ranks entered:\n  File "t.py", line 3\n'
            "HorovodInternalError\nrank 1 did not enter a",
            "rank 0 of 2 on b waited in a collective that not all ranks entered: rank 1 did not enter a",
        ),
    ],
)
def test_a_failure_becomes_one_line(text, line):
    assert error_line(text) == line


def test_missing_times_stay_missing():
    moments = clock(pd.Series([1.5, math.nan, 2e9]))
    assert str(moments.dt.tz) == "UTC"
    assert moments.isna().tolist() == [False, True, False]
    assert moments[0].timestamp() == 1.5
    assert clock(pd.Series([], dtype=float)).empty
