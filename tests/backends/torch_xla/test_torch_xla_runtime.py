"""The environment of a TPU trial's processes, and what their errors mean. Neither needs torch_xla."""

from __future__ import annotations

import os

import pytest

from horovod_tune.backends.torch_xla.torch_xla_runtime import TorchXla, set_variables
from horovod_tune.messages import FailureKind


def test_a_process_has_its_own_variables_then_what_imports_have_set_then_its_actors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = {"HOME": "/home/u", "XLA_FLAGS": "--user --set_by_the_import", "PJRT_DEVICE": "CPU"}
    of_ray = {"TPU_VISIBLE_CHIPS": "0,1", "TPU_HOST_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1"}
    actor = {
        "HOME": "/home/u",
        "XLA_FLAGS": "--user",
        "RAY_JOB_ID": "1",
        "TORCHELASTIC_RUN_ID": "x",
        **of_ray,
    }
    with monkeypatch.context() as patch:
        for name in list(os.environ):
            patch.delenv(name)
        os.environ.update({**template, "TPU_HOST_BOUNDS": "1,1,1"})
        set_variables(actor, {"PJRT_DEVICE": "TPU", "TPU_VISIBLE_CHIPS": "1"})
        found = dict(os.environ)
        os.environ.clear()
    own = {"PJRT_DEVICE": "TPU", "TPU_VISIBLE_CHIPS": "1"}
    assert found == {**template, "RAY_JOB_ID": "1", **own}


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (RuntimeError("UNAVAILABLE: Socket closed"), FailureKind.DISCONNECTED, False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] closed"), FailureKind.DISCONNECTED, False),
        (ValueError("UNAVAILABLE: as a user writes"), FailureKind.RAISED, False),
        (RuntimeError("Runtime is already initialized. Do not use the XLA device"), FailureKind.RAISED, True),
        (ValueError("Unsupported nprocs (4). Please use nprocs=1 or None"), FailureKind.RAISED, True),
        (KeyError("x"), FailureKind.RAISED, False),
    ],
)
def test_an_error_is_the_functions_own_unless_a_peer_has_ended(
    error: Exception, kind: FailureKind, advice: bool
) -> None:
    found, text, awaited = TorchXla().describe_failure(error, lambda: "")
    assert found is kind
    assert ("Pass to\nDistributedTrainableCreator" in text) == advice and awaited == {}


def test_torchs_errors_of_its_network_mean_that_a_peer_has_ended() -> None:
    dist = pytest.importorskip("torch.distributed")
    found, _, _ = TorchXla().describe_failure(dist.DistNetworkError("reset"), lambda: "")
    assert found is FailureKind.DISCONNECTED
