"""`horovod-tune launch kuberay`: from its options to the manifests of a RayJob."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from horovod_tune.launch import (
    cluster_files,
    kuberay_launch,
    working_dir,
)
from horovod_tune.launch.new_launch import record_of, script_of, write_private
from horovod_tune.launch.values import (
    LaunchError,
    checked,
)


def run_kuberay(arguments: argparse.Namespace) -> int:
    """Submit the script as a RayJob, and follow it; return the exit status."""
    script = script_of(arguments)
    results = Path(arguments.results).expanduser()
    files = working_dir.files_to_ship(
        script.folder, arguments.ship, results=results, exclude=arguments.exclude
    )
    record = record_of(
        arguments, script, results=str(results.resolve()), machines=f"{arguments.nodes} pods at most"
    )
    if arguments.file is None and arguments.image is None:
        raise LaunchError(
            "--image must name a container image with horovod-tune: cluster/Dockerfile makes one"
        )
    template = cluster_files.load("kuberay.yaml")
    if arguments.file is not None:
        template = list(yaml.safe_load_all(Path(arguments.file).read_text()))
    image = arguments.image or _image_of(template)
    manifests = kuberay_launch.rayjob(
        template,
        script.command,
        kuberay_launch.work_zip(files),
        image=checked("--image", "container image", image),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        name=record.name,
    )
    text = yaml.safe_dump_all(manifests, sort_keys=False)
    record.file = str(record.folder / "kuberay.yaml")
    if arguments.dry_run:
        print(text)
        print(f"$ kubectl create -f {record.file}")
        return 0
    record.save()
    write_private(Path(record.file), text)
    try:
        return kuberay_launch.launch(record)
    except LaunchError:
        if record.phase == "new":
            record.note(phase="down")
        raise


def _image_of(template: list[dict[str, Any]]) -> str:
    head = template[-1]["spec"]["rayClusterSpec"]["headGroupSpec"]
    return str(head["template"]["spec"]["containers"][0]["image"])
