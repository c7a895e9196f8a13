"""New ranks are forked: like others to those in them, and the server neither outlives nor fails anybody."""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import shlex
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from processes import eventually
from trial_runner import TrialRunner, sound

from horovod_tune import ray_compat, report
from horovod_tune.errors import StartFailed
from horovod_tune.gloo import fork_server
from horovod_tune.spec import make_spec

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PROGRAM = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "server": os.getppid(), "group": os.getpgid(0), "directory": os.getcwd(),
    "mark": os.environ.get("MARK"), "threads": os.environ.get("OMP_NUM_THREADS"), "argv": sys.argv,
    "executable": sys.executable, "has_torch": "torch" in sys.modules,
    "has_tune": "ray.tune" in sys.modules, "main": __name__, "path": sys.path[:2],
}))
"""


@pytest.fixture
def client(tmp_path: Path) -> Any:
    """Run the program as Ray would; the server's parent in spirit, Ray's daemon, is this process."""
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    servers = set()

    def run(
        *arguments: str, expect: str = "", how: str = "fork", prefix: Any = None, **variables: str
    ) -> dict[str, Any]:
        command = [sys.executable, "-I", "-S", str(fork_server._CLIENT), str(directory), how, "3"]
        done = subprocess.run(
            [*(prefix or command), str(program), *arguments],
            env={**os.environ, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert expect in done.stderr
        if not expect:
            assert done.stderr == ""
        facts = json.loads(done.stdout)
        if facts["has_torch"] or how == "exec":
            servers.add(facts["server"])
        return facts

    run.directory = directory  # type: ignore[attr-defined]
    yield run
    for server in servers:
        try:
            psutil.Process(server).kill()
        except psutil.NoSuchProcess:
            continue


def test_a_program_runs_as_if_python_had_started_it(client: Any, tmp_path: Path) -> None:
    first = client("a", "b c", MARK="x")
    assert first["has_torch"] and first["main"] == "__main__"
    assert first["argv"] == [str(tmp_path / "program.py"), "a", "b c"]
    assert first["directory"] == str(tmp_path) and str(tmp_path) in first["path"]
    assert (first["mark"], first["threads"]) == ("x", os.environ.get("OMP_NUM_THREADS"))
    assert first["group"] == first["pid"], "Ray ends a worker with its process group"
    second = client(MARK="x")
    assert (second["server"], second["pid"] != first["pid"]) == (first["server"], True)


WAITS = """
import pathlib, time
end = time.monotonic() + 120
while time.monotonic() < end and not pathlib.Path("over").exists():
    time.sleep(0.05)
"""


DRAWS = """
import json, os, ray
print(json.dumps({"has_torch": True, "server": os.getppid(), "id": ray.ObjectID.from_random().hex()}))
"""


def test_who_is_forked_later_finds_ray_tune_and_draws_ids_of_its_own(client: Any, tmp_path: Path) -> None:
    first = client()
    assert not first["has_tune"], "the first ones do not wait for it"
    server = psutil.Process(first["server"])
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    command = [sys.executable, "-I", "-S", str(fork_server._CLIENT), str(client.directory), "fork", "3"]
    subprocess.run(
        [*command, str(program)],
        env=dict(os.environ),  # of which each has a server
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=True,
    )
    try:
        # It is busy from then on, and whoever comes has to wait.
        eventually(lambda: any("pyarrow" in each.path for each in server.memory_maps()), within_s=90)
        assert client()["has_tune"]
        (tmp_path / "program.py").write_text(DRAWS)
        drawn = [client() for _ in range(3)]
        assert {each["server"] for each in drawn} == {first["server"]}
        assert len({each["id"] for each in drawn}) == 3
    finally:
        (tmp_path / "over").touch()


def test_who_would_draw_the_ids_of_others_starts_anew(client: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import ray; ray.ObjectID.from_random()")
    facts = [client(expect="Ray's ids may be those of others", PYTHONPATH=str(tmp_path)) for _ in range(2)]
    assert facts[0]["server"] == facts[1]["server"]
    assert not any(each["has_torch"] for each in facts)
    psutil.Process(facts[0]["server"]).kill()


@pytest.mark.parametrize("draws", ["time.sleep(600)", "1 / 0"])
def test_a_child_that_draws_nothing_is_not_waited_for(draws: str) -> None:
    program = f"""
import os, time
from horovod_tune.gloo.fork_server import server
server.DRAWS_S, server.draw = 0.5, lambda: {draws}
assert server.drawn_by_a_child() == b""
os.wait()
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_each_environment_has_a_server(client: Any) -> None:
    one, other = client(MARK="one"), client(MARK="other")
    assert one["server"] != other["server"]
    assert (one["mark"], other["mark"]) == ("one", "other")


def test_what_is_no_request_does_no_harm(client: Any) -> None:
    before = client()
    (path,) = (each for each in client.directory.iterdir() if not each.suffix)
    entry = os.open(client.directory, os.O_RDONLY)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 7 + b"\x02{}", b"\0" * 7 + b"\x09[1, 2, 3]"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"/proc/self/fd/{entry}/{path.name}")
            stranger.sendall(garbage)
    os.close(entry)
    assert client()["server"] == before["server"]


def test_a_server_that_was_killed_is_replaced(client: Any) -> None:
    before = client()
    psutil.Process(before["server"]).kill()
    eventually(lambda: not psutil.pid_exists(before["server"]))
    after = client()
    assert after["has_torch"] and after["server"] != before["server"]


def test_where_torch_cannot_be_loaded_the_program_starts_anew(client: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libtorch.so is not there')")
    facts = client(PYTHONPATH=str(broken), expect="started anew")
    assert not facts["has_torch"] and facts["server"] == os.getpid()


def test_where_others_may_enter_the_directory_nobody_listens(client: Any) -> None:
    client.directory.chmod(0o755)
    facts = client(expect="only this user may enter")
    assert not facts["has_torch"] and list(client.directory.iterdir()) == []


def server_of(directory: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in part for part in process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("end", ["Ray's daemon is gone", "nothing is to do"])
def test_a_server_ends_by_itself_and_leaves_no_socket(end: str, tmp_path: Path) -> None:
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    with subprocess.Popen(["sleep", "1000"]) as raylet:
        fork_server.start(make_spec(num_slots=1), directory, dict(os.environ), raylet.pid)
        eventually(lambda: server_of(directory))
        if end == "Ray's daemon is gone":
            raylet.kill()
            raylet.wait()
        eventually(lambda: not server_of(directory), within_s=60)
        raylet.kill()
        assert {path.suffix for path in directory.iterdir()} == {".lock", ".log"}


@pytest.mark.parametrize(
    ("inherited", "use_gpu", "forks"),
    [
        ({}, False, True),
        ({"env_vars": {"A": "1"}, "working_dir": "gcs://x"}, False, True),
        ({}, True, True),
        ({"pip": ["numpy"]}, False, False),
        ({"image_uri": "image"}, False, False),
        ({"py_executable": "python -X dev"}, False, False),
    ],
)
def test_where_ranks_are_forked(
    inherited: dict[str, Any], use_gpu: bool, forks: bool, tmp_path: Path
) -> None:
    spec = make_spec(num_slots=1, use_gpu=use_gpu)
    assert (fork_server.runtime_env(spec, tmp_path, inherited) is not None) is forks


def test_forking_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.SWITCH, "0")
    assert fork_server.runtime_env(make_spec(num_slots=1), tmp_path, {}) is None


def describe(config: dict[str, Any]) -> None:
    """Report what a training function can see of its process."""
    import gc
    import random
    import signal

    import horovod.torch as hvd
    import numpy
    import torch

    hvd.init()
    handlers = [str(signal.getsignal(each)).partition(" at 0x")[0] for each in sorted(signal.valid_signals())]
    draws = hvd.allgather_object((float(numpy.random.rand()), random.random(), torch.initial_seed()))
    own = ("RAY_JOB_ID", "HOROVOD", "GLOO", "_", "SHLVL", "OLDPWD")
    report(
        path=sys.path,
        environment=sorted(name for name in os.environ if not name.startswith(own)),
        threads=(torch.get_num_threads(), torch.get_num_interop_threads(), os.environ["OMP_NUM_THREADS"]),
        handlers=handlers,
        mask=sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        default=str(torch.get_default_dtype()),
        umask=os.umask(0o22),
        argv=[Path(sys.argv[0]).name, *sorted(word.partition("=")[0] for word in sys.argv[1:])],
        executable=sys.executable,
        gc=gc.isenabled(),
        draws=draws,
        parent=psutil.Process().parent().cmdline(),
    )


def test_a_trial_cannot_tell_that_its_ranks_were_forked(
    ray_session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {}
    for switch in ("0", "1"):
        monkeypatch.setenv(fork_server.SWITCH, switch)
        runner = TrialRunner(tmp_path / switch)
        try:
            (told[switch],) = runner.run(describe)
        finally:
            runner.close()
    anew, forked = told["0"], told["1"]
    assert not any("server.py" in part for part in anew.pop("parent"))
    assert any("server.py" in part for part in forked.pop("parent"))
    for each in (anew, forked):
        each.pop("start_s")
        draws = each.pop("draws")
        assert len({number for pair in draws for number in pair}) == 6, "ranks draw the same numbers"
    assert forked == anew


def test_a_coordinator_knows_the_environment_in_which_clients_look_for_a_server(
    ray_session: Any, tmp_path: Path
) -> None:
    import ray

    class Coordinator:
        def workers(self) -> Any:
            return ray_compat.environment_of_workers()

    runner = TrialRunner(tmp_path)
    try:
        runner.run(sound)
        server = psutil.Process(psutil.Process(runner.pids[0]).ppid())  # a client has started it
        found, told = server.environ(), server.cmdline()[-1]  # it goes with the runner
    finally:
        runner.close()
    assert ray_compat.environment_of_workers() is None, "Ray has not started the driver"
    known, raylet = ray.get(ray.remote(Coordinator).options(num_cpus=0).remote().workers.remote())
    assert told == str(raylet)
    for name in ("_", "SHLVL", "PWD", "OLDPWD", "OMP_NUM_THREADS"):
        known.pop(name, None)
        found.pop(name, None)
    assert known == found


def test_ranks_outlive_their_server_and_the_next_ones_have_another(ray_session: Any, tmp_path: Path) -> None:
    runner = TrialRunner(tmp_path)
    try:
        runner.run(sound)
        before = runner.pids
        (server,) = {psutil.Process(pid).ppid() for pid in before}
        psutil.Process(server).kill()
        runner.run(sound)
        assert runner.pids == before and runner.replaced_because == ""
        psutil.Process(before[0]).kill()
        with pytest.raises(StartFailed):
            runner.run(sound)
        runner.run(sound)
        (other,) = {psutil.Process(pid).ppid() for pid in runner.pids}
        assert other != server and set(runner.pids).isdisjoint(before)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os._exit(7)", "exit status 7"),
        ("os._exit(0)", "exit status 0"),
        ("pass", "exit status 0"),
    ],
)
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_how_a_forked_process_ended_is_known(
    client: Any, tmp_path: Path, how: str, end: str, said: str
) -> None:
    (tmp_path / "program.py").write_text(f"{PROGRAM}\nimport signal\nsys.stdout.flush()\n{end}\n")
    facts = client(how=how)
    assert fork_server.death_of(client.directory, facts["pid"], since=0.0) == said
    assert fork_server.death_of(client.directory, facts["pid"], since=0.0) == "", "it is told once"


def test_a_process_that_is_started_anew_has_nothing_of_the_servers(client: Any, tmp_path: Path) -> None:
    facts = client("a", "b c", how="exec", MARK="x")
    assert not facts["has_torch"] and facts["mark"] == "x"
    assert facts["argv"] == [str(tmp_path / "program.py"), "a", "b c"]
    assert facts["group"] == facts["pid"] and facts["directory"] == str(tmp_path)


@pytest.mark.parametrize(
    ("pythons_folder", "forks"),
    [("ours", True), ("another", False), ("unknown", True)],
)
def test_on_another_host_ranks_are_forked_where_rays_python_is_ours(
    client: Any, tmp_path: Path, pythons_folder: str, forks: bool
) -> None:
    """The daemon's command line is read, as Ray writes it; no more of Ray is needed to see this."""
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "python").symlink_to(sys.executable)
    python = {"ours": f"{Path(sys.executable).parent}/python", "another": f"{tmp_path}/another/python"}
    told = python.get(pythons_folder)
    daemon = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "input()",
            *([f"--python_worker_command={told} worker.py --a"] if told else []),
        ],
        stdin=subprocess.PIPE,
    )
    try:
        environment = fork_server.runtime_env(make_spec(num_slots=1), client.directory, {}, elsewhere=True)
        assert environment is not None
        words = shlex.split(environment["py_executable"])
        facts = client("a", "b c", prefix=words, RAY_RAYLET_PID=str(daemon.pid))
    finally:
        daemon.communicate(b"\n", timeout=60)
    assert facts["has_torch"] is forks
    assert facts["argv"] == [str(tmp_path / "program.py"), "a", "b c"]
    if not forks:
        assert facts["executable"] == told


def test_the_death_of_a_process_that_had_the_same_number_earlier_is_not_taken_for_this_ones(
    tmp_path: Path,
) -> None:
    (tmp_path / "7.death").write_text("-9 1000.0")
    assert fork_server.death_of(tmp_path, 7, since=2000.0) == ""


def test_a_forked_process_ends_as_soon_as_rays_daemon_has() -> None:
    program = """
import subprocess, sys, time
from horovod_tune.gloo.fork_server.server import leave_with
daemon = subprocess.Popen(["sleep", "600"])
leave_with(daemon.pid)
print("watches", daemon.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            psutil.Process(int(child.stdout.readline().split()[1])).kill()
            assert child.wait(timeout=30) == 1
        finally:
            child.kill()


def test_a_forked_process_ends_where_rays_daemon_is_gone_already() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    program = f"from horovod_tune.gloo.fork_server.server import leave_with; leave_with({gone.pid})"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 1


def test_mangled_requests_do_no_harm(client: Any) -> None:
    before = client()
    (path,) = (each for each in client.directory.iterdir() if not each.suffix)
    source = random.Random(1)
    entry = os.open(client.directory, os.O_RDONLY)
    body = json.dumps({"command": ["/nonexistent"], "environment": {"A": "b"}, "directory": "/"}).encode()
    files = psutil.Process(before["server"]).num_fds()
    for _ in range(200):
        data = bytearray(struct.pack("!Q", len(body)) + body)
        match source.randrange(4):
            case 0:
                data = bytearray(source.randbytes(source.randrange(200)))
            case 1:
                data[:8] = struct.pack("!Q", source.choice([0, 1, 1 << 26, (1 << 26) + 1, 1 << 63]))
            case 2:
                del data[source.randrange(len(data)) :]
            case 3:
                deep = b"[" * source.choice([10, 100_000])
                data = bytearray(struct.pack("!Q", len(deep)) + deep)
        with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
            stranger.connect(f"/proc/self/fd/{entry}/{path.name}")
            streams = array.array("i", [0] * source.choice([0, 1, 3, 4, 30]))
            stranger.sendmsg([data[:8]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            stranger.sendall(data[8:])
    os.close(entry)
    assert client()["server"] == before["server"]
    assert psutil.Process(before["server"]).num_fds() <= files
