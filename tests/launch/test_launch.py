"""`horovod-tune launch`: the files and commands that it makes; nothing is started."""

from __future__ import annotations

import importlib.util
import re
import shlex
import stat
from pathlib import Path

import pytest
import yaml

from horovod_tune.cli import main
from horovod_tune.launch import cluster_files, plans, steps
from horovod_tune.launch.values import LaunchError, checked_hosts, checked_network

NASTY = "a b; touch /tmp/x $HOME `id` 'q'"


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
    "words",
    [
        ["local", "--hosts", "10.0.0.1,10.0.0.2,10.0.0.3", "--ssh-user", "me"],
        ["aws", "--region", "us-west-2", "--image", "ami-0b294f219d14e6a82", "--ssh-from", "203.0.113.7",
         "--nodes", "3", "--spot"],
        ["gcp", "--project", "my-project", "--region", "us-west1", "--zone", "us-west1-a", "--nodes", "3"],
        ["gcp-tpu", "--project", "my-project", "--region", "us-west4", "--zone", "us-west4-a"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_ray_takes_what_launch_writes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    text, commands = shown(capsys, *words, "--dry-run", "--", "python", "tune.py")
    config = yaml.safe_load(text)
    validate_config(prepare_config(config))
    assert [command[1] for command in commands] == ["up", "exec", "submit", "rsync-down", "down"]
    nodes = 2 if words[0] == "gcp-tpu" else 3
    assert steps.nodes_at_the_start(config) == nodes
    assert f"--nodes {nodes} " in commands[1][3]
    for local in config["file_mounts"].values():
        assert local.startswith(("/", "~"))


def test_spot_and_gpus_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--project", "my-project", "--region", "us-west1", "--zone", "us-west1-a", "--dry-run"]
    text, _ = shown(capsys, "gcp", *where, "--gpus-per-node", "2", "--spot", "--", "python", "t.py")
    kinds = yaml.safe_load(text)["available_node_types"]
    assert kinds["worker"]["node_config"]["scheduling"]["preemptible"] is True
    assert "preemptible" not in kinds["head"]["node_config"]["scheduling"]
    assert kinds["worker"]["resources"]["GPU"] == 2
    text, _ = shown(capsys, "gcp", *where, "--gpus-per-node", "0", "--", "python", "t.py")
    assert "GPU" not in text and "node_setup.sh cpu" in text


def test_a_scripts_arguments_reach_the_heads_shell_quoted() -> None:
    words = plans.ray_submit_command("c.yaml", ["python", "tune.py", NASTY])
    assert shlex.split(" ".join(words[words.index("--") + 1 :])) == [NASTY]


def test_kubernetes_gets_a_quoted_entrypoint(capsys: pytest.CaptureFixture[str]) -> None:
    text, commands = shown(
        capsys, "kuberay", "--image", "registry.example/me/tune:1", "--nodes", "5", "--gpus-per-node", "1",
        "--name", "mine", "--dry-run", "--", "python", "tune.py", NASTY,
    )  # fmt: skip
    claim, job = yaml.safe_load_all(text)
    assert shlex.split(job["spec"]["entrypoint"]) == ["python", "tune.py", NASTY]
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    container = workers["template"]["spec"]["containers"][0]
    assert (workers["maxReplicas"], container["image"]) == (5, "registry.example/me/tune:1")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert claim["metadata"]["name"] == "mine-results"
    assert commands[0] == ["kubectl", "apply", "-f", "mine.kuberay.yaml"]


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
        (["slurm", "--nodes", "0"], "--nodes must be from 1 to 4096, got 0"),
        (["slurm", "--gpus-per-node", "-1"], "--gpus-per-node must be from 0 to 64, got -1"),
        (["slurm", "--time", "soon"], "--time must be a time limit as Slurm writes it"),
        (["slurm", "--partition", "a b"], "--partition must be letters, digits"),
        (["kuberay"], "--image must name a container image"),
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
    steps.write_file(str(path), "x: 1\n")
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
    assert re.search(r'^version = "\d', (made / "pyproject.toml").read_text(), re.M)
