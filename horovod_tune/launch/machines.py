"""The one table of what fits together: torch, CUDA, images, machine types and their GPUs. Pure.

The files of `cluster/` and every plan are made from it, or compared with it by a test; the test also compares
it with what pip says of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_tune.launch.values import LaunchError

TORCH = "2.13.0"
TORCH_XLA = "2.9.0"
# What PyPI's build of `TORCH` is made for: Horovod is compiled by this CUDA's compiler.
CUDA = "13.0"
# The oldest NVIDIA driver that runs `CUDA`.
DRIVER = 580
# Builds of torch without CUDA's gigabytes, for machines without GPUs.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_IMAGE = "rayproject/ray:2.60.0-py311-cpu"
GPU_IMAGE = "nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04"
GCP_CPU_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts"
# Has the driver; `node_setup.sh` brings the compiler.
GCP_GPU_IMAGE = (
    "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580"
)


@dataclass(frozen=True)
class MachineType:
    """A cloud's type of machine."""

    cloud: str
    name: str
    cpus: int
    gpus: int = 0
    # What the cloud calls its GPU.
    gpu: str = ""


# The first of a cloud with the wanted number of GPUs is what a launch takes by itself.
MACHINES = (
    MachineType("aws", "m7i.2xlarge", 8),
    MachineType("aws", "m7i.4xlarge", 16),
    MachineType("aws", "g5.2xlarge", 8, 1, "A10G"),
    MachineType("aws", "g5.12xlarge", 48, 4, "A10G"),
    MachineType("aws", "g5.48xlarge", 192, 8, "A10G"),
    MachineType("aws", "g6.2xlarge", 8, 1, "L4"),
    MachineType("aws", "g6.12xlarge", 48, 4, "L4"),
    MachineType("aws", "g6.48xlarge", 192, 8, "L4"),
    MachineType("aws", "p4d.24xlarge", 96, 8, "A100"),
    MachineType("aws", "p5.48xlarge", 192, 8, "H100"),
    MachineType("gcp", "n2-standard-8", 8),
    MachineType("gcp", "n2-standard-16", 16),
    MachineType("gcp", "g2-standard-8", 8, 1, "nvidia-l4"),
    MachineType("gcp", "g2-standard-24", 24, 2, "nvidia-l4"),
    MachineType("gcp", "g2-standard-48", 48, 4, "nvidia-l4"),
    MachineType("gcp", "g2-standard-96", 96, 8, "nvidia-l4"),
    MachineType("gcp", "a2-highgpu-1g", 12, 1, "nvidia-tesla-a100"),
    MachineType("gcp", "a2-highgpu-8g", 96, 8, "nvidia-tesla-a100"),
)


def machine_for(
    cloud: str, *, name: str | None, gpus: int | None, machines: Sequence[MachineType] = MACHINES
) -> MachineType:
    """Return the machine type for a node: the named one, or the first with so many GPUs.

    >>> machine_for("aws", name=None, gpus=4).name, machine_for("aws", name="g5.2xlarge", gpus=None).gpus
    ('g5.12xlarge', 1)

    Raises:
        LaunchError: the named one has another number of GPUs, is not in the table and `gpus` does not say how
            many it has, or no type has so many.
    """
    of_cloud = [machine for machine in machines if machine.cloud == cloud]
    option = "--instance-type" if cloud == "aws" else "--machine-type"
    if name is None:
        for machine in of_cloud:
            if machine.gpus == (gpus or 0):
                return machine
        counts = sorted({machine.gpus for machine in of_cloud})
        raise LaunchError(
            f"--gpus-per-node must be one of {' '.join(map(str, counts))} on {cloud}, got {gpus}; "
            f"or name a machine with {option}"
        )
    for machine in of_cloud:
        if machine.name == name:
            if gpus not in (None, machine.gpus):
                raise LaunchError(f"{option} {name} has {machine.gpus} GPUs, --gpus-per-node says {gpus}")
            return machine
    if gpus is None:
        raise LaunchError(
            f"--gpus-per-node must say how many GPUs {option} {name} has: it is not in the table"
        )
    return MachineType(cloud, name, 0, gpus)
