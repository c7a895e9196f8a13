"""The same loss in Horovod's own elastic mode: `horovodrun --min-np 2`, with a script that names the hosts.

Horovod treats 127.0.0.1 as another host, and never uses it again once its only rank is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.programs import loss, trials

FUNCTION = """
import json, os, signal, sys, time
import horovod.torch as hvd
import torch

steps, died, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
hvd.init()

@hvd.elastic.run
def train(state):
    while hvd.size() == 3 or state.step - state.last < 3:
        if hvd.size() == 3:
            state.last = state.step
        if state.step == 5 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and not os.path.exists(died):
            with open(died, "w") as file:
                file.write(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1), name="step")
        state.step += 1
        if hvd.rank() == 0:
            with open(steps, "a") as file:
                file.write(json.dumps([time.time(), hvd.size()]) + "\\n")
        state.commit()

model = torch.nn.Linear(1 << 18, megabytes, bias=False)
train(hvd.elastic.TorchState(model=model, step=0, last=0))
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(FUNCTION)
        hosts = folder / "hosts.sh"
        hosts.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
        hosts.chmod(0o755)
        horovodrun = [sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo"]
        sizes = ["-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(hosts)]
        train = [sys.executable, str(folder / "train.py"), str(folder / "steps"), str(folder / "died")]
        with (folder / "log").open("w+") as log:
            subprocess.run(
                [*horovodrun, *sizes, *train, str(loss.MEGABYTES)],
                env=os.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=400,
            )
            log.seek(0)
            assert (folder / "died").exists(), log.read()[-4000:]
            death = float((folder / "died").read_text())
            steps = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
            after = [at - death for at, _ in steps if at > death]
            log.seek(0)
            assert after, log.read()[-4000:]
    trials.publish({"loss_s": min(after)})
