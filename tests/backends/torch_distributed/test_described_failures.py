"""Which errors of a training function are a collective's, and which ranks it waited for. No processes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch.distributed as dist

from horovod_tune.backends.torch_distributed import torch_world
from horovod_tune.backends.torch_distributed.torch_world import TorchWorld
from horovod_tune.errors import BackendMissing
from horovod_tune.messages import RankInfo


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> TorchWorld:
    """The world of rank 0 of 3, whose store knows that rank 1 has not timed out."""
    monkeypatch.setattr(torch_world, "PEER_WAIT_S", 0.0)
    made = TorchWorld(stall_timeout_s=9, connect_timeout_s=9, device="cuda")
    made._groups.dist = dist
    store: Any = types.SimpleNamespace(
        publish=lambda what: None,
        ranks=lambda what, published=True: {} if published else {1: "a collective"},
    )
    made._groups.store = store
    return made


def error_of(text: str, module: str, name: str) -> RuntimeError:
    """Return an error that this function of this module raised."""
    variables: dict[str, Any] = {"__name__": module}
    exec(f"def {name}(text): raise RuntimeError(text)", variables)
    with pytest.raises(RuntimeError) as caught:
        variables[name](text)
    return caught.value


C10D, LATE = "torch.distributed.distributed_c10d", "[gloo/transport/tcp/buffer.cc:1] Timed out waiting 4000ms"


@pytest.mark.parametrize(
    ("text", "module", "name", "groups", "kind", "awaited"),
    [
        (LATE, C10D, "all_reduce", 1, "STALLED", [1]),
        (LATE, C10D, "all_reduce", 2, "STALLED", []),
        (LATE, C10D, "recv", 1, "STALLED", []),
        ("[Rank 0]: Ranks 1 failed to pass monitoredBarrier", C10D, "barrier", 1, "STALLED", [1]),
        ("Connection reset by peer", C10D, "barrier", 1, "DISCONNECTED", []),
        ("Connection reset by peer", "users", "download", 1, "RAISED", []),
    ],
)
def test_an_error_is_a_collectives_only_if_torch_raised_it(
    world: TorchWorld,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    module: str,
    name: str,
    groups: int,
    kind: str,
    awaited: list[int],
) -> None:
    monkeypatch.setattr(world._groups, "all", lambda: [None] * groups)
    found, _, ranks = world.describe_failure(error_of(text, module, name), None)
    assert (found.name, list(ranks)) == (kind, awaited)


def test_a_torch_without_nccl_is_no_lost_rank(world: TorchWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost rank would be replaced, in one world after another."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(BackendMissing, match="CUDA build"):
        world.enter(RankInfo(0, 3, 0, 3, 0, 1), "a")
