"""Says how a cluster's head is reached, in a process of its own: Ray's cluster launcher prints as it likes.

`python -m horovod_tune.launch.cluster_head FILE` prints JSON in its last line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from horovod_tune.launch.values import LaunchError

TIMEOUT_S = 300.0


def head_of(file: str, log: Path) -> dict[str, str]:
    """Return the host, the user and the key for ssh to the head of the cluster of `file`, which is up.

    Raises:
        LaunchError: Ray cannot tell; quotes what it said.
    """
    words = [sys.executable, "-m", "horovod_tune.launch.cluster_head", file]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, start_new_session=True)
    with log.open("a") as lines:
        lines.write(ran.stdout + ran.stderr)
    if ran.returncode:
        said = "\n".join((ran.stderr or ran.stdout).strip().splitlines()[-5:])
        raise LaunchError(f"the head of the cluster cannot be found: {said}\nThe whole log: {log}")
    return dict(json.loads(ran.stdout.strip().splitlines()[-1]))


def main(file: str) -> None:
    """Print what Ray knows."""
    import yaml
    from ray.autoscaler import sdk

    config = sdk.bootstrap_config(sdk.fillout_defaults(yaml.safe_load(Path(file).read_text())))
    auth = config["auth"]
    head = {"user": auth["ssh_user"], "key": auth.get("ssh_private_key", "")}
    print("\n" + json.dumps({"host": sdk.get_head_node_ip(file), **head}))


if __name__ == "__main__":
    main(sys.argv[1])
