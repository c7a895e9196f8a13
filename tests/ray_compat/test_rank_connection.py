"""When a rank connects to Ray, and to which cluster; a stand-in records the calls of `ray.init`."""

from __future__ import annotations

import atexit
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import ray

from horovod_tune.messages import RayAddress
from horovod_tune.ray_compat import rank_connection

SEARCH = RayAddress("10.0.0.1:6379", "of the search", {"env_vars": {"A": "1"}}, gpu_ids=("3",))
# What unpickling an ObjectRef and the handle of an actor begins with.
REFERENCE = b"cray._private.serialization\n_object_ref_deserializer\n."
HANDLE = b"cray._private.serialization\n_actor_handle_deserializer\n."

OTHERS = ("nodes", "cluster_resources", "available_resources", "timeline", "get_runtime_context")

Calls = list[tuple[Any, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Make this process a rank of `SEARCH`; return the calls of `ray.init`, which connect nothing."""
    made: Calls = []
    for name in OTHERS:
        monkeypatch.setattr(ray, name, lambda name=name: (name, len(made)))
    monkeypatch.setattr(ray, "init", lambda address=None, **keywords: made.append((address, keywords)))
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(made))
    for owner, name in (
        (ray, "get_gpu_ids"),
        (ray._private.auto_init_hook, "auto_init_ray"),
        (ray.remote_function, "_task_launch_hook"),
        (ray.actor, "_actor_launch_hook"),
        (ray.actor, "ActorClassID"),
        (rank_connection, "_address"),
        (rank_connection, "_has_warned"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setenv("RAY_ADDRESS", "of the driver")
    monkeypatch.delenv("TUNE_DISABLE_RESOURCE_CHECKS", raising=False)
    rank_connection.prepare_process()
    rank_connection.set_cluster(SEARCH)
    return made


def test_the_first_use_of_ray_connects_to_the_search_and_no_other(calls: Calls) -> None:
    assert ray.get_gpu_ids() == ["3"] and calls == [], "this needs no connection"
    for name in OTHERS:
        calls.clear()
        assert [getattr(ray, name)() for _ in range(2)] == [(name, 1)] * 2, "it is connected, once"
    (address, keywords), *_ = calls
    assert (address, keywords["namespace"]) == (SEARCH.address, SEARCH.namespace)
    assert keywords["runtime_env"] == SEARCH.runtime_env
    assert not keywords["log_to_driver"] and not keywords["configure_logging"]


def test_functions_of_ray_that_connect_by_themselves_connect_to_the_search(calls: Calls) -> None:
    assert ray._private.auto_init_hook.wrap_auto_init(lambda: "done")() == "done"
    assert [address for address, _ in calls] == [SEARCH.address]


@pytest.mark.parametrize("pickled", [REFERENCE, HANDLE], ids=["reference", "actor"])
def test_it_is_connected_before_references_are_unpickled(calls: Calls, pickled: bytes) -> None:
    rank_connection.loads(cloudpickle.dumps({"rate": 0.1}))
    assert calls == []
    rank_connection.loads(pickled)
    assert [address for address, _ in calls] == [SEARCH.address]


def test_init_joins_the_search_unless_it_names_another_cluster(calls: Calls) -> None:
    own = {"namespace": SEARCH.namespace, "runtime_env": SEARCH.runtime_env}
    for given, keywords, expected in (
        (None, {}, (SEARCH.address, own)),
        ("auto", {"namespace": "mine"}, (SEARCH.address, {**own, "namespace": "mine"})),
        (None, {"runtime_env": {}}, (SEARCH.address, {**own, "runtime_env": {}})),
        ("10.0.0.2:6379", {}, ("10.0.0.2:6379", {})),
    ):
        calls.clear()
        ray.init(given, **keywords)
        assert calls == [expected]
    with pytest.raises(RuntimeError, match="a cluster, which a rank must not do: leave the address out"):
        ray.init("local")


def test_an_empty_runtime_env_is_none(calls: Calls) -> None:
    rank_connection.set_cluster(replace(SEARCH, runtime_env={}))
    ray.init()
    assert calls[-1][1]["runtime_env"] is None


def test_handlers_of_ray_run_at_the_exit_of_ranks_that_used_it(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", removed.append)
    rank_connection.prepare_exit()
    assert removed == [ray.shutdown]
    rank_connection.connect()
    rank_connection.prepare_exit()
    assert removed == [ray.shutdown]


def test_a_task_that_has_to_wait_is_reported_once(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    task = SimpleNamespace(class_name="", function_name="script.square")
    with caplog.at_level(logging.WARNING):
        ray.remote_function._task_launch_hook(task, {"CPU": 1.0, "GPU": 0.0}, None)
        ray.remote_function._task_launch_hook(task, {}, None)
        assert caplog.messages == []
        for _ in range(2):
            ray.remote_function._task_launch_hook(task, {"CPU": 2.0}, None)
    (message,) = caplog.messages
    assert message.startswith("the task square needs {'CPU': 2.0}, which is not free now")
    assert message.endswith("square.options(num_cpus=0).remote(...)")


def test_an_actor_that_has_to_wait_is_reported(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "available_resources", dict)
    actor = SimpleNamespace(class_name="script.Server", function_name="script.Server.__init__")
    with caplog.at_level(logging.WARNING):
        ray.actor._actor_launch_hook(actor, {"GPU": 1.0}, None)
    assert caplog.messages[0].startswith("the actor Server needs {'GPU': 1.0}, which is not free now")


def test_names_of_the_script_are_those_of_main_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    main = SimpleNamespace(of_another="kept", __name__="__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[arg-type]
    monkeypatch.setattr(rank_connection, "_namespaces", [])
    script: dict[str, Any] = {"__name__": "__main__", "limit": 3}
    exec("def train(config):\n    global seen\n    seen = config\n    return limit", script)
    library: dict[str, Any] = {"__name__": "a_module_by_value", "limit": 4}
    exec("def helper():\n    return limit", library)
    function, helper = rank_connection.loads(cloudpickle.dumps((script["train"], library["helper"])))
    assert main.limit == 3 and not hasattr(main, "helper")
    assert (function({}), helper()) == (3, 4)
    main.seen = None
    rank_connection.end_script()
    assert vars(main) == {"of_another": "kept", "__name__": "__main__"}
    with pytest.raises(NameError):
        function({})
