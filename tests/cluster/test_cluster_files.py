"""The cluster files against the schemas of those who read them; no network, no hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import stand_in

from horovod_tune.horovod_build.build import machine_tag

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "cluster"
RAY_UP_FILES = ["on-premise.yaml", "cluster.yaml", "gcp.yaml", "gcp-tpu.yaml"]
ALL_FILES = [*RAY_UP_FILES, "slurm.sbatch", "kuberay.yaml", "sky.yaml"]


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


@pytest.mark.parametrize("name", RAY_UP_FILES)
def test_ray_takes_the_file_and_the_token_goes_to_every_node_and_no_port_is_open(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(load(name))
    validate_config(prepared)
    workers = [kind for kind in prepared["available_node_types"].values() if kind["min_workers"]]
    assert workers, "no workers at the start"
    file = load(name)
    assert file["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    (head,) = (line for line in file["head_start_ray_commands"] if "--head" in line)
    assert "--dashboard-host=127.0.0.1" in head and "ray.env" in head
    # What Ray's defaults would add: a nightly build, old libraries.
    assert file["setup_commands"] and file.get("head_setup_commands", []) == []


@pytest.mark.parametrize("name", ALL_FILES)
def test_the_first_lines_say_what_to_edit_and_what_to_type_and_what_is_shipped_is_there(name: str) -> None:
    first = "\n".join((CLUSTER / name).read_text().splitlines()[:8])
    assert re.search(r"^# EDIT ", first, re.M) and re.search(r"^# TYPE ", first, re.M), first
    shipped = load(name)["file_mounts"].values() if name in [*RAY_UP_FILES, "sky.yaml"] else []
    assert all(local.startswith("~") or (REPOSITORY / local).exists() for local in shipped)


@pytest.mark.parametrize("name", [*ALL_FILES, "../docs/clusters.md"])
def test_a_command_to_type_uses_the_whole_cluster_and_uploads_no_checkout(name: str) -> None:
    """By default `tune.py`, as in docs/clusters.md, starts a Ray on one node."""
    text = (CLUSTER / name).read_text()
    assert not re.search(r"python tune\.py(?! --address auto)", text)
    if name in RAY_UP_FILES:  # `ray up` is to be run in a checkout
        assert "--working-dir FOLDER" in text and "--working-dir ." not in text


def test_the_settings_are_the_same_everywhere() -> None:
    lines = (CLUSTER / "ray.env").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert settings["RAY_AUTH_MODE"] == "token"
    script = (CLUSTER / "slurm.sbatch").read_text()
    for name, value in settings.items():
        assert f"{name}={value}" in script, name
    job = list(yaml.safe_load_all((CLUSTER / "kuberay.yaml").read_text()))[-1]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    settings.pop("RAY_AUTH_MODE")  # the operator's
    assert {entry["name"]: entry["value"] for entry in head["env"]} == settings


def test_torch_ray_and_cuda_are_the_same_in_every_file() -> None:
    import ray
    import torch

    version = torch.__version__.split("+")[0]
    setup, docker = (CLUSTER / "node_setup.sh").read_text(), (CLUSTER / "Dockerfile").read_text()
    assert f"\nTORCH={version} " in setup and f"torch=={version}" in docker
    assert f"ray:{ray.__version__}-py" in docker
    assert f'rayVersion: "{ray.__version__}"' in (CLUSTER / "kuberay.yaml").read_text()
    assert f"ray=={ray.__version__}" in (REPOSITORY / "constraints.txt").read_text()
    cuda, driver = re.search(r"^CUDA=(\S+) DRIVER=(\S+)", setup, re.M).groups()
    assert f"cuda:{cuda}." in docker
    for name in ("cluster.yaml", "gcp.yaml"):
        assert f"driver, {driver} or newer" in (CLUSTER / name).read_text()


@pytest.mark.parametrize(
    "flags",
    [
        "fpu sse4_2 avx f16c fma avx2 avx512f avx512_vnni amx_bf16",  # Intel, as in m7i and p5
        "fpu sse4_2 avx f16c fma avx2 sse4a clzero",  # AMD, as in g5 and g6
        "fpu sse4_2 avx f16c fma avx2 avx512f",  # Intel, as in g2 and n2
    ],
)
def test_one_wheel_serves_every_machine_of_the_table(flags: str) -> None:
    """The head's wheel goes to the workers (cluster_synced_files), and its key names what it depends on."""
    haswell = "flags : fpu sse4_2 avx f16c fma avx2"
    assert machine_tag(f"flags : {flags}") == machine_tag(haswell)
    for name in ("on-premise.yaml", "cluster.yaml", "gcp.yaml"):
        assert load(name)["cluster_synced_files"] == ["~/.cache/horovod_tune"]


def test_the_builder_of_the_image_gets_no_more_than_it_copies() -> None:
    lines = re.findall(r"^[^#\n].*$", (REPOSITORY / ".dockerignore").read_text(), re.M)
    copied = re.findall(r"^COPY --chown=ray (.*) \S+$", (CLUSTER / "Dockerfile").read_text(), re.M)
    names = {f"!{name}" for line in copied for name in line.split()}
    assert lines[0] == "*" and names == {line for line in lines if line[0] == "!"}


@pytest.mark.parametrize("name", ["slurm.sbatch", "node_setup.sh", "start_worker.sh"])
def test_the_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(CLUSTER / name)], check=True, timeout=10)


def test_the_nodes_environment_comes_before_a_python_of_the_bashrc(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text('export PATH="/conda/bin:$PATH"\n')
    function = re.search(r"^login_line\(\) \{.*?^\}", (CLUSTER / "node_setup.sh").read_text(), re.M | re.S)
    assert function
    twice = "login_line 'export PATH=/ours/bin:$PATH';" * 2
    script = f"set -euo pipefail; {function[0]}\n{twice} source ~/.bashrc; echo $PATH; cat ~/.bashrc"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    ran = subprocess.run(
        ["bash", "-c", script], env=environment, check=True, timeout=20, capture_output=True, text=True
    )
    path, *lines = ran.stdout.splitlines()
    assert path.startswith("/ours/bin:/conda/bin:")
    assert (lines[0], lines[-1], len(lines)) == (lines[0], lines[0], 3), lines


# --- Google Cloud: the bodies that Ray sends ----------------------------------------------------------------


class Recorder:
    """Stands for a Google API: keeps the body of the one `create` or `insert` that it gets."""

    body: dict[str, Any]
    _http = types.SimpleNamespace(credentials=None)

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            if "body" in arguments:
                self.body = arguments["body"]
            return self

        return call

    def execute(self, **_: Any) -> dict[str, str]:
        return {"name": "operation"}


def body_of(file: str, kind: str, api: str) -> dict[str, Any]:
    """Return what Ray sends for a node of ``kind``."""
    pytest.importorskip("googleapiclient", reason="needs google-api-python-client")
    from ray.autoscaler._private.gcp import node

    config = load(file)["available_node_types"][kind]["node_config"]
    recorder = Recorder()
    made = getattr(node, api)(recorder, "my-project", "us-west4-a", "horovod-tune")
    made.create_instance(config, {"ray-node-name": "ray-horovod-tune-worker"}, wait_for_operation=False)
    return recorder.body


def test_a_tpu_slice_is_asked_for_as_the_api_takes_it() -> None:
    body = body_of("gcp-tpu.yaml", "tpu", "GCPTPU")
    from ray.autoscaler._private.gcp.config import GCPNodeType, get_node_type

    config = load("gcp-tpu.yaml")["available_node_types"]["tpu"]
    assert get_node_type(config["node_config"]) is GCPNodeType.TPU
    # projects.locations.nodes.create, v2: a type or a config, never both; the runtime is required.
    assert body["acceleratorType"] == "v5litepod-16" and "acceleratorConfig" not in body
    assert body["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    known = {"acceleratorType", "runtimeVersion", "labels", "networkConfig", "metadata", "serviceAccount"}
    assert set(body) <= known | {"schedulingConfig", "tags"}, "also no machineType"
    assert config["resources"]["TPU"] == 4


def test_a_gpu_machine_is_asked_for_as_the_api_takes_it() -> None:
    body = body_of("gcp.yaml", "worker", "GCPCompute")
    # instances.insert: links where the file has names, an object for the scheduling.
    assert body["machineType"].endswith("zones/us-west4-a/machineTypes/g2-standard-8")
    assert body["guestAccelerators"][0]["acceleratorCount"] == 1
    assert body["guestAccelerators"][0]["acceleratorType"].endswith("acceleratorTypes/nvidia-l4")
    assert body["disks"][0]["boot"] is True
    assert body["scheduling"] == {"onHostMaintenance": "TERMINATE"}


# --- Kubernetes ---------------------------------------------------------------------------------------------


# The fields of KubeRay's RayJob (ray.io/v1, operator 1.6 and newer) that the file uses, with their types.
PODS = {"rayStartParams": dict, "template": dict}
RAY_JOB = {
    "entrypoint": str,
    "runtimeEnvYAML": str,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "backoffLimit": int,
    "rayClusterSpec": {
        "rayVersion": str,
        "authOptions": {"mode": str},
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": {"idleTimeoutSeconds": int},
        "headGroupSpec": {"serviceType": str, **PODS},
        "workerGroupSpecs": [
            {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, **PODS}
        ],
    },
}


def check_shape(value: Any, shape: Any, path: str) -> None:
    if isinstance(shape, list):
        for index, one in enumerate(value):
            check_shape(one, shape[0], f"{path}[{index}]")
    elif isinstance(shape, dict):
        assert set(value) == set(shape), f"{path}: {set(value) ^ set(shape)}"
        for name, inner in shape.items():
            check_shape(value[name], inner, f"{path}.{name}")
    else:
        assert type(value) is shape, f"{path} must be a {shape.__name__}, got {value!r}"


def test_the_rayjob_has_the_fields_of_kuberay_and_keeps_to_itself() -> None:
    claim, job = yaml.safe_load_all((CLUSTER / "kuberay.yaml").read_text())
    assert claim["kind"] == "PersistentVolumeClaim"
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    check_shape(job["spec"], RAY_JOB, "spec")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    if path := os.environ.get("KUBERAY_RAYJOB_CRD"):  # the operator's own ray.io_rayjobs.yaml
        import jsonschema

        versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
        (schema,) = (version["schema"]["openAPIV3Schema"] for version in versions if version["storage"])
        jsonschema.validate(job, schema)


@pytest.mark.processes
@pytest.mark.parametrize("file", ["cluster/kuberay.yaml", "docs/clusters.md"])
@pytest.mark.parametrize("folder", ["mine", "mine/", "examples/mine", "{0}/home/me/mine", ".", "../a/mine"])
def test_the_job_finds_the_script_wherever_its_folder_was_packed(
    file: str, folder: str, tmp_path: Path
) -> None:
    from ray._private.runtime_env.packaging import download_and_unpack_package

    here = tmp_path / "here"
    here.mkdir()
    mine = here / folder.format(tmp_path)
    (mine / "package").mkdir(parents=True)
    for name in ("tune.py", "package/__init__.py"):
        (mine / name).write_text("")
    command = re.search(r"python3 -m zipfile -c /tmp/work.zip FOLDER", (REPOSITORY / file).read_text())
    assert command is not None
    packed = tmp_path / "work.zip"
    words = command[0].replace("/tmp/work.zip", str(packed)).replace("FOLDER", folder.format(tmp_path))
    subprocess.run(words, shell=True, cwd=here, check=True)
    log = logging.getLogger(__name__)
    (tmp_path / "out").mkdir()
    found = asyncio.run(download_and_unpack_package(f"file://{packed}", str(tmp_path / "out"), None, log))
    assert {each.name for each in Path(found).iterdir()} == {"tune.py", "package"}


# --- SkyPilot -----------------------------------------------------------------------------------------------


def test_the_sky_task_ends_its_cluster_and_its_scripts_are_bash(tmp_path: Path) -> None:
    task = load("sky.yaml")
    assert task["resources"]["autostop"] == {"idle_minutes": 10, "down": True}
    assert set(task) == {"name", "num_nodes", "resources", "envs", "workdir", "file_mounts", "setup", "run"}
    (program,) = re.findall(r"<<'PYTHON'.*?\n(.*?)^PYTHON$", task["run"], re.M | re.S)
    compile(program, "sky.yaml", "exec")
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True, timeout=10)
    # What is started: the head, and the command once all nodes are there; a worker joins and returns.
    note = 'echo "$(basename $0) $*" >> "$NOTES"'
    # As the program that waits for the nodes does: the head starts in the background.
    until_ray = 'for _ in $(seq 300); do grep -q "^ray" "$NOTES" && exit; sleep 0.1; done; exit 1'
    wait = f"{note}; cat > /dev/null; {until_ray}"
    for name, text in {"ray": note, "python": wait, "tune": f"{note}; exit 3"}.items():
        stand_in(tmp_path, name, text)
    (tmp_path / ".horovod-tune").mkdir()
    (tmp_path / ".horovod-tune" / "ray.env").write_text("")
    with socket.create_server(("127.0.0.1", 6379)) if port_is_free(6379) else contextlib.nullcontext():
        for rank, status in (("0", 3), ("1", 0)):
            notes = tmp_path / f"notes{rank}"
            environment = {
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "HOME": str(tmp_path),
                "NOTES": str(notes),
                "COMMAND": "tune --address auto",
                "JOIN_TIMEOUT_S": "10",
                "SKYPILOT_NODE_RANK": rank,
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
            }
            ran = subprocess.run(["bash", "-c", task["run"]], env=environment, timeout=60)
            assert ran.returncode == status
    head = (tmp_path / "notes0").read_text()
    assert "ray start --head --block --node-ip-address=127.0.0.1" in head and "tune --address auto" in head
    assert (tmp_path / "notes1").read_text() == "ray start --block --address=127.0.0.1:6379\n"


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return bool(probe.connect_ex(("127.0.0.1", port)))
