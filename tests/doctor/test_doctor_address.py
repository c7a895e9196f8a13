"""`horovod-tune doctor --address` where there is no cluster: it says so, in time."""

from __future__ import annotations

import socket

import pytest

from horovod_tune.doctor import command


def test_an_address_where_nobody_answers_is_named_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        why = command.unreachable_reason(address, timeout_s=3)
    assert why is not None and f"no Ray cluster answered at {address} within 3 s" in why
    monkeypatch.setattr(command, "unreachable_reason", lambda address: why)
    assert command.examine_cluster(address) == 1
    assert capsys.readouterr().err == f"horovod-tune doctor: {why}\n"


def test_what_ray_says_of_an_address_is_passed_on() -> None:
    why = command.unreachable_reason("no-address-of-ray")
    assert why is not None and why.startswith("could not connect to a Ray cluster at no-address-of-ray: ")
