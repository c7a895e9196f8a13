"""A launched script runs as `python SCRIPT` would run it, and its experiments are noted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import pickle, sys, threading
import helper                                     # beside the script

class Model:
    pass

if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Model()))) is Model
    assert sys.modules["__main__"].Model is Model
    print(sys.argv, __file__, helper.__name__)
    from ray.train._internal.storage import StorageContext
    StorageContext(sys.argv[1], "exp")
    threading.Timer(0.2, lambda: print("later", Model.__name__)).start()
    sys.exit(7)
"""


def test_a_script_is_the_main_module_and_its_storage_is_known(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "s.py").write_text(SCRIPT)
    (tmp_path / "work" / "helper.py").write_text("")
    noted = tmp_path / "experiments.jsonl"
    ran = subprocess.run(
        [sys.executable, "-m", "horovod_tune.node.run_script", "s.py", str(tmp_path / "results"), "--x"],
        cwd=tmp_path / "work",
        env={**os.environ, "HOROVOD_TUNE_EXPERIMENTS": str(noted)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 7, ran.stderr
    assert f"['s.py', '{tmp_path}/results', '--x'] s.py helper" in ran.stdout and "later Model" in ran.stdout
    (line,) = map(json.loads, noted.read_text().splitlines())
    assert line == {"file_system": "local", "path": f"{tmp_path}/results/exp"}
