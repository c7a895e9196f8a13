"""A launch on Kubernetes: a RayJob with the script's folder in a ConfigMap; no image is built for it."""

from __future__ import annotations

import base64
import copy
import io
import json
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_tune.launch.console import run_logged, say
from horovod_tune.launch.launch_record import LaunchRecord
from horovod_tune.launch.values import LaunchError

DETACHED = 130
START_TIMEOUT_S = 900.0
POLL_S = 3.0
# Kubernetes takes 1 MiB, the encoding's third included.
CONFIG_MAP_LIMIT = 1000 * 1000
WORK_FILE = "/horovod-tune/work.zip"
ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}


def work_zip(files: Mapping[str, Path]) -> bytes:
    """Return the working directory as one file.

    Raises:
        LaunchError: it is too large for a ConfigMap.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, file in sorted(files.items()):
            packed.write(file, f"work/{name}")  # Ray takes the top folder of a zip away
    packed_bytes = buffer.getvalue()
    if len(packed_bytes) * 4 // 3 > CONFIG_MAP_LIMIT:
        raise LaunchError(
            f"the script's folder is {len(packed_bytes) / 2**20:.1f} MiB packed, a ConfigMap holds 0.7: "
            "leave files out with --exclude PATTERN, and let the script read its data from a bucket or volume"
        )
    return packed_bytes


def rayjob(
    template: Sequence[dict[str, Any]],
    command: Sequence[str],
    work: bytes,
    *,
    image: str,
    nodes: int,
    gpus_per_node: int = 0,
    name: str,
) -> list[dict[str, Any]]:
    """Return the manifests of `kuberay.yaml` for one launch: its own names, image, script and workers. Pure.

    The entrypoint goes through a shell in the job's pod, so it is quoted.
    """
    work_map, claim, job = copy.deepcopy(list(template))
    results, work_name = f"{name}-results", f"{name}-work"
    work_map["metadata"]["name"], claim["metadata"]["name"], job["metadata"]["name"] = (
        work_name,
        results,
        name,
    )
    work_map["binaryData"] = {"work.zip": base64.b64encode(work).decode()}
    job["spec"]["entrypoint"] = shlex.join(command)
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    workers.update(replicas=0, maxReplicas=nodes)
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        pod["containers"][0]["image"] = image
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = results
            if "configMap" in volume:
                volume["configMap"]["name"] = work_name
    labels = {"app": f"{name}-worker"}
    workers["template"]["metadata"]["labels"] = labels
    (rule,) = workers["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    rule["labelSelector"]["matchLabels"] = labels
    if gpus_per_node:
        for share in workers["template"]["spec"]["containers"][0]["resources"].values():
            share["nvidia.com/gpu"] = str(gpus_per_node)
    return [work_map, claim, job]


def launch(record: LaunchRecord) -> int:
    """Create what the file describes, and follow the job; return its exit status.

    Raises:
        LaunchError: Kubernetes refuses, or the job does not start in time.
    """
    # create, not apply: a job of that name from before is an error, never followed by mistake
    run_logged(["kubectl", "create", "-f", record.file], record.log)
    record.note(phase="submitted", job=record.name)
    say(f"RayJob {record.name} is created (log: {record.log})")
    say(f"Ctrl-C detaches; then: horovod-tune attach|logs|status|stop {record.name}")
    return attach(record)


def attach(record: LaunchRecord) -> int:
    """Show the job's output until it is over, through lost connections; an interrupt ends the showing."""
    try:
        status = _follow(record)
    except KeyboardInterrupt:
        say(f"\nDetached: {record.name} goes on.")
        say(f"Come back: horovod-tune attach {record.name}    Stop it: horovod-tune stop {record.name}")
        return DETACHED
    exit_code = int(status != "SUCCEEDED")
    record.note(phase="over", exit_code=exit_code)
    say(f"The job is over: {status.lower()}. Its results are on the claim {record.name}-results.")
    say(
        f"Bring them here: horovod-tune fetch {record.name}    Delete it all: horovod-tune down {record.name}"
    )
    return exit_code


def _follow(record: LaunchRecord) -> str:
    deadline, told = time.monotonic() + START_TIMEOUT_S, False
    while True:
        since = ["--since-time", record.head["since"]] if "since" in record.head else []
        logs = subprocess.Popen(
            ["kubectl", "logs", "--follow", "--timestamps", *since, f"job/{record.name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert logs.stdout is not None
            for line in logs.stdout:
                stamp, _, text = line.partition(" ")
                if stamp <= record.head.get("since", ""):
                    continue  # the line that --since-time begins with
                sys.stdout.write(text)
                sys.stdout.flush()
                record.head["since"] = stamp
                told = False
        finally:
            logs.kill()
            logs.wait()
            record.save()
        said = job_status(record.name)
        if said in ENDED:
            return said
        if said is None and not told:
            say("[reconnecting… kubectl gives no answer]")
            told = True
        if said in ("", None) and "since" not in record.head and time.monotonic() > deadline:
            raise LaunchError(
                f"the job has not started in {START_TIMEOUT_S:g} s: kubectl describe rayjob {record.name}. "
                f"Delete it: horovod-tune down {record.name}"
            )
        time.sleep(POLL_S)


def logs(record: LaunchRecord) -> None:
    """Print the job's output so far.

    Raises:
        LaunchError: kubectl cannot.
    """
    if subprocess.run(["kubectl", "logs", f"job/{record.name}"]).returncode:
        raise LaunchError(f"kubectl cannot show the output of {record.name}")


def state_in_words(record: LaunchRecord) -> str:
    """Return the operator's word for the job's state."""
    return (job_status(record.name) or "no answer").lower()


def job_status(name: str) -> str | None:
    """Return the operator's word for the job's state; None where kubectl gives no answer.

    Raises:
        LaunchError: there is no such job any more.
    """
    asked = subprocess.run(["kubectl", "get", "rayjob", name, "-o", "json"], capture_output=True, text=True)
    if asked.returncode:
        if "NotFound" in asked.stderr:
            raise LaunchError(f"Kubernetes has no rayjob {name} any more")
        return None
    return str(json.loads(asked.stdout).get("status", {}).get("jobStatus", ""))


def fetch(record: LaunchRecord) -> None:
    """Copy the results from the head's pod, which is there for ten minutes after the job.

    Raises:
        LaunchError: the pod is gone, or kubectl failed; says where the results are.
    """
    label = f"ray.io/node-type=head,ray.io/originated-from-cr-name={record.name}"
    pods = subprocess.run(
        ["kubectl", "get", "pod", "-l", label, "-o", "jsonpath={.items[*].metadata.name}"],
        capture_output=True,
        text=True,
    )
    if pods.returncode or not pods.stdout.strip():
        raise LaunchError(
            f"the head's pod is gone; the results are on the claim {record.name}-results: mount it in a pod"
        )
    pod = pods.stdout.split()[0]
    run_logged(["kubectl", "cp", f"{pod}:/results", record.results], record.log)
    say(f"The results are in {record.results}")


def stop(record: LaunchRecord) -> None:
    """Delete the job and its cluster; the results stay on their claim."""
    run_logged(["kubectl", "delete", "rayjob", record.name, "--ignore-not-found"], record.log)
    say(f"{record.name} is deleted; its results stay on the claim {record.name}-results.")


def down(record: LaunchRecord, *, lose_results: bool) -> None:
    """Delete all that the launch made; the results only when asked to."""
    stop(record)
    run_logged(["kubectl", "delete", "configmap", f"{record.name}-work", "--ignore-not-found"], record.log)
    if lose_results:
        run_logged(["kubectl", "delete", "pvc", f"{record.name}-results", "--ignore-not-found"], record.log)
    record.note(phase="down")
