"""Runs beside Ray on a worker node in a cloud: tells Ray when the cloud takes the machine away.

`python -m horovod_tune.node.spot_watch --cloud aws --address HEAD:6379`

A cloud announces that to the machine alone, two minutes (AWS) or half a minute (Google) before. Ray, told
of it, places nothing there any more, and calls what dies there pre-empted, which Tune does not count as a
failure of the trial. Without this nobody tells Ray (2.60), and each uses up one of `max_failures`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from horovod_tune import ray_compat
from horovod_tune.node.head_address import address_towards

POLL_S = 2.0
REQUEST_TIMEOUT_S = 2.0
GOOGLE_NOTICE_S = 30.0
# How many times the metadata service may be out of reach from the start before the watch gives up.
NOT_A_CLOUD_AFTER = 5


@dataclass(frozen=True)
class Notice:
    """The machine will be taken away."""

    # Seconds from now; 0 when the time has passed.
    in_s: float


def aws_notice(base: str = "http://169.254.169.254", *, now: float | None = None) -> Notice | None:
    """Return AWS's notice for this machine, or None while there is none.

    Reads ``spot/instance-action`` with a session token (IMDSv2).

    Raises:
        OSError: the metadata service cannot be reached.
    """
    token = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    try:
        said = _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as answer:
        if answer.code == 404:
            return None
        raise
    at = datetime.fromisoformat(json.loads(said)["time"].replace("Z", "+00:00"))
    left = at.astimezone(timezone.utc).timestamp() - (time.time() if now is None else now)
    return Notice(max(0.0, left))


def google_notice(base: str = "http://metadata.google.internal") -> Notice | None:
    """Return Google's notice for this machine, or None while there is none.

    Raises:
        OSError: the metadata service cannot be reached.
    """
    said = _get(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return Notice(GOOGLE_NOTICE_S) if said.strip().upper() == "TRUE" else None


CLOUDS: dict[str, Callable[..., Notice | None]] = {"aws": aws_notice, "gcp": google_notice}


def _get(url: str, headers: dict[str, str], *, method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    # The metadata service is on the machine's own link: a proxy of the environment must not be asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
        return str(answer.read().decode())


def watch(look: Callable[[], Notice | None], *, poll_s: float = POLL_S) -> Notice:
    """Return the notice as soon as there is one.

    Raises:
        OSError: the metadata service was out of reach from the start: this is not a machine of that cloud.
    """
    failures, reached = 0, False
    while True:
        try:
            notice = look()
            reached = True
        except OSError:
            failures += 1
            if not reached and failures >= NOT_A_CLOUD_AFTER:
                raise
            notice = None
        if notice is not None:
            return notice
        time.sleep(poll_s)


def main(arguments: list[str] | None = None) -> int:
    """Watch until there is a notice, and pass it on."""
    parser = argparse.ArgumentParser(prog="python -m horovod_tune.node.spot_watch", description=__doc__)
    parser.add_argument("--cloud", choices=sorted(CLOUDS), required=True)
    parser.add_argument("--address", required=True, help="of the head: HOST:PORT")
    parser.add_argument("--node-address", help="that Ray knows this machine by (that of the way to the head)")
    options = parser.parse_args(arguments)
    try:
        notice = watch(CLOUDS[options.cloud])
        node_address = options.node_address or address_towards(options.address.rpartition(":")[0])
        nodes = ray_compat.drain_as_preempted(options.address, node_address, in_s=notice.in_s)
    except (OSError, RuntimeError) as error:
        print(f"spot_watch: {error}", file=sys.stderr)
        return 1
    print(
        f"spot_watch: {options.cloud} takes this machine in {notice.in_s:.0f} s; Ray drains {' '.join(nodes)}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
