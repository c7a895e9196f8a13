"""A lab of hosts on one machine: network namespaces with their own sshd, process trees and addresses.

The work is done by `hosts.sh` and `slurm.sh` next to this file; `Lab` gives them to tests. It needs root and
Debian's openssh-server, rsync, iptables, iproute2, procps (and slurm-wlm, munge for Slurm).
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from job_packages import job_packages

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
PAGE = REPOSITORY / "docs" / "clusters.md"
PROGRAMS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "iptables": "iptables",
    "ip": "iproute2",
    "pgrep": "procps",
    "nsenter": "util-linux",
}
SLURM_PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}

# Run on a host of the cluster: waits until so many nodes are alive.
ALL_JOINED = """
import sys, time, ray
ray.init(address="auto", log_to_driver=False)
end = time.monotonic() + 120
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    assert time.monotonic() < end, ray.nodes()
    time.sleep(0.25)
"""
# Run on a host: has Ray drain this node, as a cloud's notice would.
DRAIN = (
    "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'a test' "
    '--deadline-remaining-seconds 60 --address {head}:6379 --node-id $(python -c "import ray; '
    "ray.init(address='auto', log_to_driver=False); print(ray.get_runtime_context().get_node_id())\")"
)


def reason_to_skip(programs: dict[str, str] = PROGRAMS) -> str | None:
    """Return why no lab can be had here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts as network namespaces need root on Linux"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = sorted({package for name, package in programs.items() if not shutil.which(name, path=path)})
    if packages:
        return f"needs Debian's {' '.join(packages)}: apt-get install {' '.join(packages)}"
    probe = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True, text=True)
    return f"cannot make namespaces here: {probe.stderr.strip()}" if probe.returncode else None


def page_steps() -> dict[str, str]:
    """Return the titled blocks of the page, by title."""
    return dict(re.findall(r'^```bash title="(.+?)"\n(.*?)^```', PAGE.read_text(), re.M | re.S))


class Lab:
    """Hosts n1…nN and a `laptop` that reaches them by ssh; nothing in it reaches the network outside."""

    def __init__(
        self,
        hosts: int,
        *,
        nics: int = 1,
        slurm_cpus: int | None = None,
        jobs: bool = False,
        **settings: str,
    ) -> None:
        self.hosts = [f"n{i + 1}" for i in range(hosts)]
        self._slurm_cpus = slurm_cpus
        self._port = 6380
        self._state = tempfile.mkdtemp(prefix="horovod-tune-lab-")
        environment = Path(sys.prefix)
        binds = {str(REPOSITORY), str(environment), sys.base_prefix}
        self._job_packages = job_packages() if jobs else None
        if self._job_packages is not None:
            binds.add(self._job_packages)
        binds = {path for path in binds if not path.startswith("/usr")}  # the hosts' own
        self._env = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "NC_STATE": self._state,
            "NC_BIND": " ".join(sorted(binds)),
            "NC_PATH": str(environment / "bin"),
            "NC_NICS": str(nics),
            **settings,
        }
        # The tests' own, under which a search shows Tune's tables: people on hosts have not set it.
        self._env.pop("RAY_AIR_NEW_OUTPUT", None)

    def ip(self, host: str) -> str:
        """The address of a host on its first interface."""
        network, first = self._env.get("NC_NET", "10.77.0"), int(self._env.get("NC_FIRST", "11"))
        return f"{network}.{first - 1 + int(host.removeprefix('n'))}"

    def __enter__(self) -> Lab:
        try:
            if self._slurm_cpus is None:
                self._run("hosts.sh", "up", str(len(self.hosts)), timeout_s=240)
            else:
                self._run("slurm.sh", "up", str(len(self.hosts)), str(self._slurm_cpus), timeout_s=360)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run("hosts.sh", "down", timeout_s=120)

    def run(
        self, host: str, command: str | Sequence[str], *, timeout_s: float, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return it with its output; a string goes through a login shell."""
        result = subprocess.run(
            self._in_host(host, command),
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if check and result.returncode:
            raise AssertionError(f"{host}: {command} ended with {result.returncode}\n{result.stdout[-6000:]}")
        return result

    def start(self, host: str, command: str | Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output goes to `log` on this machine."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self._in_host(host, command),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @contextmanager
    def running(self, host: str, command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command on a host while the block lasts; its output goes to `log` on this machine."""
        session = f"/tmp/{log.name}.session"
        words = ["setsid", "--wait", "bash", "-lc", f"echo $$ > {session}; {command}"]
        process = self.start(host, words, log)
        try:
            yield process
        finally:
            self.run(host, f"pkill -KILL -s $(cat {session})", timeout_s=30, check=False)
            process.wait(timeout=20)

    def wait_for_port(self, host: str, address: str) -> None:
        """Wait until a host reaches HOST:PORT."""
        probe = f"</dev/tcp/{address.replace(':', '/')}"
        wait_until(
            lambda: not self.run(host, probe, timeout_s=30, check=False).returncode,
            timeout_s=180,
            what=address,
        )

    def start_ray(self, *, cpus: int = 1, head_cpus: int = 1, environment: str = "") -> None:
        """Start a Ray cluster on all hosts, the head on n1, with the settings and the token that we ship."""
        token = secrets.token_hex(32)
        for host in self.hosts:
            self.put(host, "~/.ray/auth_token", token, "600")
            self.run(host, "echo export RAY_AUTH_MODE=token >> ~/.bashrc", timeout_s=10)
        self.start_ray_on("n1", cpus=head_cpus, environment=environment)
        # All at once they would be in each other's way: these hosts share one machine's cores.
        with ThreadPoolExecutor(max_workers=2) as pool:
            join = functools.partial(self.start_ray_on, cpus=cpus, environment=environment)
            list(pool.map(join, self.hosts[1:]))
        wait = ["bash", "-lc", 'python -c "$0" "$1"', ALL_JOINED, str(len(self.hosts))]
        self.run("n1", wait, timeout_s=180)

    def start_ray_on(self, host: str, *, cpus: int = 1, environment: str = "") -> None:
        """Start one host's Ray: the cluster's head on n1, which the others join.

        Its ports are fixed, as on hosts with a firewall between them, and differ at each start: the head
        marked a Ray as lost again that came back on its old port 26 s after its host had stopped responding.
        """
        self._port = port = self._port + 2
        where = f"--address={self.ip('n1')}:6379"
        if host == "n1":
            where = "--head --include-dashboard=false --port=6379"
        start = (
            f"ray start {where} --node-ip-address={self.ip(host)} --num-cpus={cpus} "
            f"--object-store-memory=100000000 --node-manager-port={port} --object-manager-port={port + 1}"
        )
        # `ray start` itself waits 30 s and no longer: too little where a machine is busy elsewhere.
        again = f" || (ray stop --force; {start})" * 2
        settings = f"set -a; . {REPOSITORY}/cluster/ray.env; {environment} set +a; "
        self.run(host, settings + start + again, timeout_s=240)

    def prepare_laptop(self, file: str, changes: dict[str, str]) -> None:
        """Give the laptop ~/checkout, with ``file`` of cluster/ edited, and ~/project.

        The laptop and the head, n1, have what `ray[default]` brings: Ray's job system needs it there.
        """
        for host in ("n1", "laptop") if self._job_packages is not None else ():
            line = f"export PYTHONPATH=$PYTHONPATH:{self._job_packages}"
            self.run(host, f"echo '{line}' >> ~/.bashrc", timeout_s=60)
        needed = "horovod_tune cluster examples pyproject.toml setup.py LICENSE constraints.txt README.md"
        script = f"mkdir -p ~/checkout; cd {REPOSITORY}; cp -r {needed} ~/checkout/"
        self.run("laptop", f"{script}; cp -r tests/cluster/jobs/project ~/project", timeout_s=60)
        text = (REPOSITORY / "cluster" / file).read_text()
        for was, now in changes.items():
            assert was in text, was
            text = text.replace(was, now)
        self.put("laptop", f"~/checkout/cluster/{file}", text)

    def put(self, host: str, path: str, text: str, mode: str = "644") -> None:
        """Write a file on a host, making its folder."""
        script = f'mkdir -p "$(dirname {path})"; umask 077; cat > {path}; chmod {mode} {path}'
        subprocess.run(
            self._in_host(host, ["bash", "-c", script]), env=self._env, input=text, text=True, check=True
        )

    def processes(self, host: str, pattern: str) -> list[str]:
        """The command lines on a host that match a regular expression."""
        result = self.run(host, ["pgrep", "-af", pattern], timeout_s=60, check=False)
        return [line for line in result.stdout.splitlines() if "pgrep" not in line]

    def drain(self, host: str) -> None:
        """Have Ray drain a host as preempted."""
        self.run(host, DRAIN.format(head=self.ip("n1")), timeout_s=120)

    def cut(self, host: str, how: str = "down") -> None:
        """Unplug a host: `down` (its cable), `drop` (packets vanish) or `local` (its interface goes)."""
        self._run("hosts.sh", "cut", host, how, timeout_s=60)

    def heal(self, host: str) -> None:
        """Plug a host back in."""
        self._run("hosts.sh", "heal", host, timeout_s=60)

    def power_off(self, host: str) -> None:
        """Pull a host's power cord; it is none of the hosts any more."""
        self._run("hosts.sh", "off", host, timeout_s=60)
        self.hosts.remove(host)

    def give_clock(self, host: str) -> None:
        """Have processes that are started on a host from now on take its wall clock from `skew_clock`."""
        library = "/usr/local/lib/clock_skew.so"
        build = f"gcc -shared -fPIC -O2 -o {library} {HERE}/clock_skew.c -ldl"
        self.run(host, f"{build} && echo {library} > /etc/ld.so.preload", timeout_s=60)
        self.skew_clock(host, 0)

    def skew_clock(self, host: str, seconds: int) -> None:
        """Put a host's wall clock ahead, or behind."""
        write = f"printf %-15d {seconds} 1<> /dev/shm/clock_skew"  # never empty: it is mapped
        self.run(host, ["bash", "-c", write], timeout_s=30)

    def _in_host(self, host: str, command: str | Sequence[str]) -> list[str]:
        words = ["bash", "-lc", command] if isinstance(command, str) else list(command)
        return [str(HERE / "hosts.sh"), "exec", host, *words]

    def _run(self, script: str, *words: str, timeout_s: float) -> None:
        # A file, not a pipe: the lab's processes outlive this call and would keep a pipe open.
        with tempfile.TemporaryFile("w+") as out:
            result = subprocess.run(
                [str(HERE / script), *words],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
            out.seek(0)
            if result.returncode:
                raise AssertionError(
                    f"{script} {' '.join(words)} ended with {result.returncode}\n{out.read()}"
                )


def wait_until(condition: Callable[[], object], *, timeout_s: float, what: str) -> float:
    """Wait until `condition()` holds and return the seconds it took; fail after `timeout_s`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.25)
    return time.monotonic() - start
