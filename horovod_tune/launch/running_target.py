"""`horovod-tune launch running`: the script as a job on a Ray cluster that is up already, and stays up."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from horovod_tune.launch import fetching, ray_up_launch, working_dir
from horovod_tune.launch.new_launch import record_of, script_of
from horovod_tune.launch.values import LaunchError, checked, head_of_option


def run_running(arguments: argparse.Namespace) -> int:
    """Submit the script to the cluster whose head is named, and follow it; return the job's exit status.

    Raises:
        LaunchError: it could not be submitted.
    """
    if arguments.head is None:
        raise LaunchError("--head must be USER@HOST, the head of the cluster")
    if arguments.storage is not None:
        checked("--storage", "bucket", arguments.storage)
    script = script_of(arguments)
    results = Path(arguments.results).expanduser()
    files = working_dir.files_to_ship(
        script.folder, arguments.ship, results=results, exclude=arguments.exclude
    )
    record = record_of(
        arguments,
        script,
        results=str(results.resolve()),
        head=head_of_option(arguments.head, arguments.ssh_key),
        machines=f"the cluster of {arguments.head}",
        keep_up=True,
    )
    asked = {"storage": arguments.storage, "fetch": arguments.fetch, "nodes": arguments.nodes or 1}
    if arguments.dry_run:
        print(f"# {len(files)} files go along: {' '.join(sorted(files)[:20])}")
        print(f"# on {arguments.head}, as a job of Ray's: {shlex.join(script.command)}")
        return 0
    fetching.check_writable(results)
    record.save()
    return ray_up_launch.launch(record, script, files, None, asked)
