"""All private APIs of Ray that this package uses, in one place. Checked against Ray 2.60.0.

Each use checks, with `compatibility`, that Ray has the shape that the use was written for. `patches/` has one
file per part of Tune that is changed.
"""

from horovod_tune.ray_compat.queries import announce_end

__all__ = ["announce_end"]  # which copies of cluster/slurm.sbatch call
