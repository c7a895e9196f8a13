"""The texts of failures are cut to what is read."""

from __future__ import annotations

import traceback

import pytest

from horovod_tune import errors as error_text


def test_a_huge_message_is_cut_with_its_two_ends_and_the_chain_around_it_kept():
    def chain():
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise ValueError("the start " + "x" * (5 << 20) + " the end") from cause

    with pytest.raises(ValueError, match="the start") as raised:
        chain()
    text = error_text.traceback_text(traceback.format_exception(raised.value))
    assert len(text) < 2 * error_text.MAX_TEXT
    for kept in ("KeyError: 'the cause'", "direct cause", "ValueError: the start", "left out", "the end"):
        assert kept in text


def test_a_long_chain_of_huge_messages_is_cut_too():
    pieces = ["first\n", *["y" * (1 << 20)] * 20, "last\n"]
    text = error_text.traceback_text(pieces)
    assert len(text) < error_text.MAX_TRACEBACK + 100
    assert text.startswith("first") and text.endswith("last\n")
