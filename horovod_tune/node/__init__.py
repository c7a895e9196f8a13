"""Programs that run on the machines of a cluster, each with ``python -m horovod_tune.node.NAME``."""
