"""A machine on which the doctor finds nothing wrong."""

from __future__ import annotations

from horovod_tune.doctor.node_info import NodeInfo
from horovod_tune.horovod_build.installed import InstalledHorovod, InstalledTorch
from horovod_tune.horovod_build.patches import PATCH_LEVEL

TORCH = InstalledTorch("2.13.0+cpu")
HOROVOD = InstalledHorovod(f"0.28.1+{PATCH_LEVEL}.cpu", "2.13.0+cpu", gloo=True)
SOUND = NodeInfo(
    host="node1",
    python="3.11.7",
    executable="/venv/bin/python",
    packages={"horovod_tune": "0.1.0", "ray": "2.60.0", "torch": "2.13.0+cpu"},
    torch=TORCH,
    horovod=HOROVOD,
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.3",)},
)
