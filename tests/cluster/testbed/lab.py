"""A lab of hosts on one machine: network namespaces with their own sshd, process trees and addresses.

The work is done by `hosts.sh` and `slurm.sh` beside this file; `Lab` gives them to tests. It needs root and
Debian's openssh-server, rsync, iptables, iproute2, procps (and slurm-wlm, munge for Slurm).
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
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


def job_packages() -> str | None:
    """Return the folder with what `ray[default]` brings and this environment lacks; None if it lacks nothing.

    It is made once, by pip, in the user's cache. On a machine with few cores each `ray.init()` would pay for
    these packages if they were in the environment of the other tests.

    Raises:
        FileNotFoundError: pip could not make it.
    """
    import ray

    if importlib.util.find_spec("aiohttp_cors") is not None:
        return None
    folder = Path.home() / ".cache" / "horovod_tune" / f"ray-default-{ray.__version__}"
    if folder.is_dir():
        return str(folder)
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    wanted = f"ray[default]=={ray.__version__}"
    asked = subprocess.run(
        [*pip, "--dry-run", "--report", "-", wanted], capture_output=True, text=True, timeout=300
    )
    coming = folder.with_name(f"{folder.name}.{os.getpid()}")
    if asked.returncode == 0:
        lacking = [entry["metadata"] for entry in json.loads(asked.stdout)["install"]]
        names = [f"{package['name']}=={package['version']}" for package in lacking]
        asked = subprocess.run(
            [*pip, "--no-deps", "--target", str(coming), *names], capture_output=True, text=True, timeout=300
        )
    if asked.returncode:
        raise FileNotFoundError(f"pip install '{wanted}': {asked.stderr.strip()[-500:]}")
    coming.rename(folder)
    return str(folder)


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

    @property
    def python(self) -> str:
        """The interpreter of this test session, which every host sees."""
        return sys.executable

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

    def start_ray(self, *, cpus: int = 1, head_cpus: int = 1, environment: str = "") -> None:
        """Start a Ray cluster on all hosts, the head on n1, with the settings and the token that we ship."""
        settings = f"set -a; . {REPOSITORY}/cluster/ray.env; {environment} set +a; "
        token = secrets.token_hex(32)
        start = "ray start --object-store-memory=100000000 "
        address = f"{self.ip('n1')}:6379"

        def join(host: str) -> None:
            self.put(host, "~/.ray/auth_token", token, "600")
            self.run(host, "echo export RAY_AUTH_MODE=token >> ~/.bashrc", timeout_s=10)
            where = f"--head --include-dashboard=false --port=6379 --node-ip-address={self.ip(host)}"
            if host != "n1":
                where = f"--address={address} --node-ip-address={self.ip(host)}"
            own = f"--num-cpus={head_cpus if host == 'n1' else cpus} "
            # `ray start` itself waits 30 s and no longer: too little where a machine is busy elsewhere.
            again = "".join(f" || (ray stop --force; {start + own + where})" for _ in range(2))
            self.run(host, settings + start + own + where + again, timeout_s=240)

        join("n1")
        # All at once they would be in each other's way: these hosts share one machine's cores.
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(join, self.hosts[1:]))
        wait = f"python -m horovod_tune.node.wait_for_nodes --address {address} --nodes {len(self.hosts)}"
        self.run("n1", f"{wait} --timeout-s 120", timeout_s=180)

    def give_job_packages(self, host: str) -> None:
        """Have what `ray[default]` brings on a host that becomes a head: Ray's job system needs it there."""
        if self._job_packages is not None:
            line = f"export PYTHONPATH=$PYTHONPATH:{self._job_packages}"
            self.run(host, f"echo '{line}' >> ~/.bashrc", timeout_s=60)

    def check_out(self, host: str) -> None:
        """Give a host a checkout of its own in ~/checkout, with what the cluster files ship and examples."""
        needed = "horovod_tune cluster examples pyproject.toml setup.py constraints.txt README.md"
        self.run(host, f"mkdir -p ~/checkout; cd {REPOSITORY}; cp -r {needed} ~/checkout/", timeout_s=60)

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

    def cut(self, host: str, how: str = "down") -> None:
        """Unplug a host: `down` (its cable), `drop` (packets vanish) or `local` (its interface goes)."""
        self._run("hosts.sh", "cut", host, how, timeout_s=60)

    def heal(self, host: str) -> None:
        """Plug a host back in."""
        self._run("hosts.sh", "heal", host, timeout_s=60)

    def power_off(self, host: str) -> None:
        """Pull a host's power cord."""
        self._run("hosts.sh", "off", host, timeout_s=60)

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
