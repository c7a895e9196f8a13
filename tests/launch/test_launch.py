"""`horovod-tune launch`: the files and commands that it makes; nothing is started."""

from __future__ import annotations

import base64
import importlib.util
import io
import random
import re
import shlex
import stat
import zipfile
from pathlib import Path

import pytest
import yaml

from horovod_tune.cli import main
from horovod_tune.launch import cluster_files, kuberay_launch, new_launch, ray_up_launch
from horovod_tune.launch.launch_record import LaunchRecord, load_record
from horovod_tune.launch.values import LaunchError, checked_hosts, checked_network

NASTY = "a b; touch /tmp/x $HOME `id` 'q'"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a script, and a home for the records."""
    monkeypatch.setenv("HOROVOD_TUNE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tune.py").write_text("print(1)\n")
    (folder / "helper.py").write_text("")
    monkeypatch.chdir(folder)
    return folder


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, list[list[str]]]:
    """Run a dry launch; return the file that it shows, and its commands as words."""
    assert main(["launch", *words]) == 0
    out = capsys.readouterr().out
    commands = [shlex.split(line[2:]) for line in out.splitlines() if line.startswith("$ ")]
    return "\n".join(line for line in out.splitlines() if not line.startswith("$ ")), commands


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 2
    return capsys.readouterr().err


def test_slurm_gets_the_command_word_for_word(capsys: pytest.CaptureFixture[str]) -> None:
    script, (words,) = shown(
        capsys, "slurm", "--nodes", "4", "--gpus-per-node", "2", "--time", "01:00:00", "--dry-run",
        "--", "python", "tune.py", "--note", NASTY,
    )  # fmt: skip
    assert "#SBATCH --signal=B:USR1@120" in script
    assert words[:5] == ["sbatch", "--parsable", "--nodes=4", "--gpus-per-node=2", "--time=01:00:00"]
    assert words[-4:] == ["python", "tune.py", "--note", NASTY]


@pytest.mark.parametrize(
    ("words", "nodes", "machines"),
    [
        (["local", "--hosts", "10.0.0.1,10.0.0.2,10.0.0.3", "--ssh-user", "me"], 3, None),
        (
            ["aws", "--region", "us-west-2", "--image", "ami-0b294f219d14e6a82", "--ssh-from", "203.0.113.7",
             "--nodes", "3", "--spot"],
            1, "m7i.2xlarge",
        ),
        (
            ["gcp", "--project", "my-project", "--region", "us-west1", "--zone", "us-west1-a"],
            1, "n2-standard-8",
        ),
        (["gcp-tpu", "--project", "my-project", "--region", "us-west4", "--zone", "us-west4-a"], 2, None),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)  # fmt: skip
def test_ray_takes_what_launch_writes(
    words: list[str], nodes: int, machines: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    text, commands = shown(capsys, *words, "--autostop", "90", "--dry-run", "--", "python", "tune.py")
    config = yaml.safe_load(text)
    validate_config(prepare_config(config))
    assert [command[1] for command in commands] == ["up", "down"]
    assert ray_up_launch.nodes_at_the_start(config) == nodes
    for local in config["file_mounts"].values():
        assert local.startswith(("/", "~"))
    # Its own name, and a watch that ends it.
    assert re.fullmatch(r".*-tune-[0-9a-f]{4}", config["cluster_name"])
    assert "node.autostop --detach" in config["head_start_ray_commands"][-1]
    assert "--grace-min 90" in config["head_start_ray_commands"][-1]
    if machines:
        node = config["available_node_types"]["worker"]["node_config"]
        assert machines in (node.get("InstanceType"), node.get("machineType"))
        assert "node_setup.sh cpu" in str(config["setup_commands"])
        # A machine whose set-up gets stuck ends itself, and is gone then.
        assert "shutdown -h +120" in config["setup_commands"][0]
        assert node.get("InstanceInitiatedShutdownBehavior", "terminate") == "terminate"


def test_two_launches_of_one_script_have_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["local", "--hosts", "a,b", "--dry-run", "--", "python", "tune.py"]
    names = {yaml.safe_load(shown(capsys, *words)[0])["cluster_name"] for _ in range(2)}
    assert len(names) == 2, names


def test_spot_and_gpus_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--project", "my-project", "--region", "us-west1", "--zone", "us-west1-a", "--dry-run"]
    text, _ = shown(capsys, "gcp", *where, "--gpus-per-node", "2", "--spot", "--", "python", "tune.py")
    kinds = yaml.safe_load(text)["available_node_types"]
    assert kinds["worker"]["node_config"]["scheduling"]["preemptible"] is True
    assert "preemptible" not in kinds["head"]["node_config"]["scheduling"]
    # The machine follows the number of GPUs, and Ray is told of all of them.
    assert kinds["worker"]["node_config"]["machineType"] == "g2-standard-24"
    assert kinds["worker"]["resources"] == {"CPU": 24, "GPU": 2}
    assert "node_setup.sh nccl" in text
    text, _ = shown(capsys, "gcp", *where, "--gpus-per-node", "0", "--", "python", "tune.py")
    assert "GPU" not in text and "node_setup.sh cpu" in text


def test_kubernetes_gets_the_scripts_folder_and_a_quoted_entrypoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, commands = shown(
        capsys, "kuberay", "--image", "registry.example/me/tune:1", "--nodes", "5", "--gpus-per-node", "1",
        "--name", "mine", "--dry-run", "--", "python", "tune.py", NASTY,
    )  # fmt: skip
    work, claim, job = yaml.safe_load_all(text)
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(work["binaryData"]["work.zip"]))) as packed:
        assert packed.namelist() == ["work/helper.py", "work/tune.py"]
    assert shlex.split(job["spec"]["entrypoint"]) == ["python", "tune.py", NASTY]
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    container = workers["template"]["spec"]["containers"][0]
    assert (workers["maxReplicas"], container["image"]) == (5, "registry.example/me/tune:1")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert (work["metadata"]["name"], claim["metadata"]["name"]) == ("mine-work", "mine-results")
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "work"]
        assert kuberay_launch.WORK_FILE.startswith(mount["mountPath"] + "/")
        assert {"name": "work", "configMap": {"name": "mine-work"}} in pod["volumes"]
    assert (
        yaml.safe_load(job["spec"]["runtimeEnvYAML"])["working_dir"] == f"file://{kuberay_launch.WORK_FILE}"
    )
    # create: a job of that name from before is an error, and never followed by mistake
    assert [command[:2] for command in commands] == [["kubectl", "create"]]


def test_what_is_too_large_for_kubernetes_is_said_before(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "data.bin").write_bytes(random.Random(0).randbytes(2**20))
    words = ["kuberay", "--image", "a", "--dry-run"]
    assert "a ConfigMap holds" in refused(capsys, *words, "--", "python", "tune.py")
    assert main(["launch", *words, "--exclude", "*.bin", "--", "python", "tune.py"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["aws", "--image", "ami-1;ls"], "--image must be an AMI's id"),
        (["aws", "--region", "us-west-2"], "--image, --security-group or --ssh-from must be given"),
        (["aws", "--region", "us west"], "--region must be a region"),
        (["local"], "--hosts must name the head and the workers"),
        (["local", "--hosts", "a"], "--hosts must name the head and at least one worker, got 'a'"),
        (["local", "--hosts", "a,b,a"], "--hosts must name each machine once, got a twice"),
        (["local", "--hosts", "a,-oProxyCommand=x"], "--hosts must be a host name or an IP address"),
        (["local", "--hosts", "a,b", "--nodes", "3"], "--nodes must be 2 as --hosts names, got 3"),
        (["local", "--hosts", "a,b", "--ssh-user", "$(id)"], "--ssh-user must be a Linux user name"),
        (["local", "--hosts", "a,b", "--name", "X y"], "--name must be lower-case letters"),
        (["local", "--hosts", "a,b", "--ship", "/nowhere/at/all"], "--ship must name a file or folder"),
        (["running"], "--head must be USER@HOST"),
        (["running", "--head", "n1"], "--head must be USER@HOST, got 'n1'"),
        (["running", "--head=-oProxyCommand=x@n1"], "--head must be a Linux user name"),
        (["running", "--head", "me@n1;ls"], "--head must be a host name or an IP address"),
        (["slurm", "--nodes", "0"], "--nodes must be from 1 to 4096, got 0"),
        (["slurm", "--gpus-per-node", "-1"], "--gpus-per-node must be from 0 to 64, got -1"),
        (["slurm", "--time", "soon"], "--time must be a time limit as Slurm writes it"),
        (["slurm", "--partition", "a b"], "--partition must be letters, digits"),
        (["kuberay"], "--image must name a container image"),
        (["local", "--hosts", "a,b", "--autostop", "-1"], "--autostop must be 0 or more minutes, got -1"),
        (["local", "--hosts", "a,b", "--storage", "/mnt/x"], "--storage must be a folder of a bucket"),
        (["slurm", "--array", "0..3"], "--array must be an array as Slurm writes it"),
        (["slurm", "--sbatch=mail"], "--sbatch must be an option of sbatch"),
        (
            ["aws", "--region", "us-west-2", "--image", "ami-0b294f219d14e6a82", "--ssh-from", "203.0.113.7",
             "--instance-type", "g5.2xlarge", "--gpus-per-node", "4"],
            "--instance-type g5.2xlarge has 1 GPUs, --gpus-per-node says 4",
        ),
        (
            ["aws", "--region", "us-west-2", "--image", "ami-0b294f219d14e6a82", "--ssh-from", "203.0.113.7",
             "--gpus-per-node", "3"],
            "--gpus-per-node must be one of 0 1 4 8 on aws, got 3",
        ),
        (["gcp"], "--project, --region, --zone must be given"),
        (
            ["gcp-tpu", "--project", "my-project", "--region", "us-west4", "--zone", "us-west4-a",
             "--accelerator-type", "v4-16"],
            "must be given together",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *words, "--dry-run", "--", "python", "tune.py")


def test_only_a_python_script_can_be_submitted_with_ray(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["local", "--hosts", "a,b", "--dry-run", "--"]
    assert "there must be `python SCRIPT.py …`, got 'ls -l'" in refused(capsys, *hosts, "ls", "-l")
    assert "got 'python -c x'" in refused(capsys, *hosts, "python", "-c", "x")
    assert "after -- there must be the command" in refused(capsys, "slurm", "--dry-run")


def test_slurms_own_options_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    _, (words,) = shown(
        capsys, "slurm", "--mem", "64G", "--constraint", "a100&nvlink", "--qos", "high", "--exclusive",
        "--array", "0-3%2", "--requeues", "5", "--sbatch=--mail-type=END", "--dry-run",
        "--", "python", "tune.py",
    )  # fmt: skip
    for option in (
        "--mem=64G", "--constraint=a100&nvlink", "--qos=high", "--exclusive", "--array=0-3%2",
        "--mail-type=END",
        "--output=horovod-tune-%A_%a.log", "--export=ALL,HOROVOD_TUNE_REQUEUES=5",
    ):  # fmt: skip
        assert option in words, option


def test_what_is_missing_here_is_said_before_anything_is_brought_up(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ["local", "--hosts", "a,b"]
    said = refused(capsys, *hosts, "--ssh-key", "/no/key", "--", "python", "tune.py")
    assert "--ssh-key must be a private key's file, got '/no/key'" in said
    said = refused(capsys, *hosts, "--results", "/proc/nowhere", "--", "python", "tune.py")
    assert "--results must be a folder that can be written to" in said
    assert "no such file" in refused(capsys, *hosts, "--", "python", "other.py")
    (project / "broken.py").write_text("def f(:\n")
    assert "does not compile: line 1" in refused(capsys, *hosts, "--", "python", "broken.py")
    (project / "options.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--epochs')\np.parse_args()\n"
    )
    said = refused(capsys, *hosts, "--", "python", "options.py", "--epoch", "3", "--keep-up")
    assert "--keep-up is an option of horovod-tune launch: give it before --" in said
    assert "has no option --lr; its options are --epochs" in refused(
        capsys, *hosts, "--", "python", "options.py", "--lr=1"
    )
    assert not (project.parent / "home" / "launches").exists()


def test_a_name_in_use_is_refused_with_what_uses_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LaunchRecord("mine", "local", ["python", "tune.py"], 0.0, phase="submitted").save()
    said = refused(capsys, "local", "--hosts", "a,b", "--name", "mine", "--", "python", "tune.py")
    assert "--name mine is in use: python tune.py" in said and "horovod-tune down mine" in said
    load_record("mine").note(phase="down")
    assert (
        main(["launch", "local", "--hosts", "a,b", "--name", "mine", "--dry-run", "--", "python", "tune.py"])
        == 0
    )


def test_port_22_is_not_opened_to_the_world() -> None:
    assert checked_network("--ssh-from", "203.0.113.0/24") == "203.0.113.0/24"
    for everyone in ("0.0.0.0/0", "0.0.0.0/1", "everyone", "203.0.113.7/24"):
        with pytest.raises(LaunchError, match="--ssh-from must"):
            checked_network("--ssh-from", everyone)
    assert checked_hosts("--hosts", "a, b.example,10.0.0.3") == ["a", "b.example", "10.0.0.3"]


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("moto", "boto3"))), reason="needs moto and boto3")
def test_the_aws_security_group_is_closed_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto import mock_aws

    from horovod_tune.launch.aws import security_group

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        group = security_group("us-west-2", "203.0.113.7/32")
        assert security_group("us-west-2", "203.0.113.7/32") == group
        client = boto3.client("ec2", region_name="us-west-2")
        rules = client.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
    open_to = {entry["CidrIp"] for rule in rules for entry in rule["IpRanges"]}
    inside = [pair["GroupId"] for rule in rules for pair in rule["UserIdGroupPairs"]]
    assert (open_to, inside) == ({"203.0.113.7/32"}, [group])


def test_the_file_is_for_its_writers_eyes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    new_launch.write_private(path, "x: 1\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_installed_package_ships_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(cluster_files.__file__).resolve().parents[1]
    assert cluster_files.package_source() == package.parent  # this checkout
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "horovod_tune").symlink_to(package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        cluster_files, "__file__", str(tmp_path / "site/horovod_tune/launch/cluster_files.py")
    )
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path)
    made = cluster_files.package_source()
    assert made.parent == tmp_path / "cache" / "horovod_tune"
    for name in ("horovod_tune/cli.py", "cluster/node_setup.sh", "setup.py", "README.md", "constraints.txt"):
        assert (made / name).exists(), name
    metadata = (made / "pyproject.toml").read_text()
    assert re.search(r'^version = "\d', metadata, re.M)
    # What a machine needs that compiles Horovod with it.
    patterns = re.findall(r'"([^"]+\*)"', metadata.partition("[tool.setuptools.package-data]")[2])
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert set(package.rglob("*.patch")) <= packed and list(package.rglob("*.patch"))
