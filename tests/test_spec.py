"""What the factory accepts and refuses, and whether it fits into a cluster. No Ray is started here."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from horovod_tune.errors import ResourcesUnavailable, SpecError
from horovod_tune.spec.placement import Placement, check_fits, fits_one_node
from horovod_tune.spec.trial_spec import make_spec


@pytest.mark.parametrize(
    ("arguments", "bundles", "strategy"),
    [
        ({}, [{"CPU": 1.0}], "PACK"),
        (
            {"num_hosts": 2, "num_slots": 4, "num_cpus_per_slot": 2, "use_gpu": True},
            [{"CPU": 8.0, "GPU": 4.0}] * 2,
            "STRICT_SPREAD",
        ),
        ({"num_workers": 3, "num_cpus_per_worker": 2}, [{"CPU": 2.0}] * 3, "PACK"),
        ({"num_workers": 6, "num_hosts": 3}, [{"CPU": 2.0}] * 3, "STRICT_SPREAD"),
    ],
)
def test_hosts_are_spread_and_a_total_is_placed_as_tightly_as_it_fits(arguments, bundles, strategy):
    assert make_spec(**arguments).placement() == Placement(tuple(bundles), strategy)


def test_integers_of_numpy_are_integers():
    spec = make_spec(num_hosts=np.int64(2), num_slots=np.int32(3), num_cpus_per_slot=np.float32(0.5))
    assert spec == make_spec(num_hosts=2, num_slots=3, num_cpus_per_slot=0.5)
    assert type(spec.num_slots) is int and type(spec.slot_resources["CPU"]) is float


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"num_slots": 0}, ["num_slots", "at least 1", "got 0"]),
        ({"num_slots": 2.0}, ["num_slots", "integer", "2.0"]),
        ({"num_hosts": True}, ["num_hosts", "integer", "True"]),
        ({"num_slots": math.nan}, ["num_slots", "integer", "nan"]),
        ({"timeout_s": 10**400}, ["timeout_s", "finite"]),
        ({"num_workers": -1}, ["num_workers", "at least 1", "-1"]),
        ({"num_workers": 4, "num_slots": 2}, ["num_workers=4", "num_slots=2", "mutually exclusive"]),
        ({"num_workers": 3, "num_hosts": 2}, ["num_workers", "multiple of num_hosts (2)", "3"]),
        ({"num_cpus_per_slot": 1, "num_cpus_per_worker": 1}, ["num_cpus_per_slot", "num_cpus_per_worker"]),
        ({"num_cpus_per_slot": 0}, ["num_cpus_per_slot", "more than 0", "0"]),
        ({"num_cpus_per_worker": "2"}, ["num_cpus_per_worker", "number", "'2'"]),
        ({"timeout_s": float("inf")}, ["timeout_s", "finite", "inf"]),
        ({"timeout_s": -3}, ["timeout_s", "more than 0", "-3"]),
        ({"timeout_s": 1e12}, ["timeout_s", "at most 2147483647 s", "got 1000000000000.0"]),
        ({"stall_timeout_s": 2**31}, ["stall_timeout_s", "at most 2147483647 s"]),
        ({"stall_timeout_s": None}, ["stall_timeout_s", "number", "None"]),
        ({"use_gpu": 1}, ["use_gpu", "True or False", "1"]),
        ({"use_gpu": True, "use_tpu": True}, ["use_gpu", "use_tpu"]),
        ({"use_gpu": "yes"}, ["use_gpu", "True or False", "'yes'"]),
        ({"preload": "transformers"}, ["preload", "list of names of modules", "'transformers'"]),
        ({"preload": ["torch", 3]}, ["preload", "list of names of modules", "3"]),
        ({"nics": ["eth0", 3]}, ["nics", "3"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_bound_and_value(arguments, parts):
    with pytest.raises(SpecError) as raised:
        make_spec(**arguments)
    for part in parts:
        assert part in str(raised.value)
    assert isinstance(raised.value, ValueError)


@pytest.mark.long
def test_horovod_that_is_missing_or_without_gloo_or_of_another_version_is_named_with_its_cure(tmp_path):
    code = "from horovod_tune.backends.horovod.horovod_backend import require_installed as check; check()"
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod-0.27.0.dist-info").mkdir()
    (tmp_path / "horovod-0.27.0.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.27.0\n")
    (tmp_path / "horovod-0.27.0.dist-info" / "RECORD").write_text("horovod/__init__.py,,\n")
    for library, why in (
        (None, "no compiled library"),
        (b"\0" * 100, "not built with Gloo"),
        (b"HOROVOD_GLOO_RENDEZVOUS_ADDR", "got 0.27.0"),
    ):
        if library is not None:
            (tmp_path / "horovod" / "torch" / "mpi_lib_v2.so").write_bytes(library)
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert why in ran.stderr and "horovod-tune install-horovod" in ran.stderr


@pytest.mark.long
def test_a_folder_that_hides_the_installed_horovod_is_named(tmp_path):
    pytest.importorskip("horovod")
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    code = "from horovod_tune.backends.horovod.horovod_backend import require_installed as check; check()"
    with pytest.raises(subprocess.CalledProcessError) as raised:
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        )
    assert f"{tmp_path}/horovod/__init__.py hides the installed Horovod" in raised.value.stderr


@pytest.mark.parametrize(
    ("arguments", "nodes", "parts"),
    [
        (
            {"num_hosts": 2, "num_slots": 3},
            [8.0, 2.0],
            ["2 x 3 CPU on different", "2 node(s) have 8 CPU; 2 CPU"],
        ),
        ({"num_hosts": 2, "num_slots": 1}, [64.0], ["2 x 1 CPU on different machines"]),
        ({"num_hosts": 2, "num_slots": 1}, [64.0, 1.0], []),
        ({"num_workers": 5}, [2.0, 4.0], []),  # a total may be larger than one node
        ({"num_workers": 10, "num_cpus_per_slot": 0.7}, [7.0], []),  # fractions fit exactly
        ({"num_workers": 10, "num_cpus_per_slot": 0.7}, [6.9], ["0.7 CPU"]),
    ],
)
def test_a_trial_that_can_never_fit_is_an_error_with_both_sides(arguments, nodes, parts):
    placement = make_spec(**arguments).placement()
    resources = [{"CPU": cpus} for cpus in nodes]
    if not parts:
        check_fits(placement, resources)
        assert fits_one_node(placement, resources) is (len(nodes) == 1)
        return
    with pytest.raises(ResourcesUnavailable) as raised:
        check_fits(placement, resources)
    for part in parts:
        assert part in str(raised.value)
