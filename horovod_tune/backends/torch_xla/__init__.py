"""Runs ranks on TPUs: a launcher in the coordinator, and an actor on each host with ranks as subprocesses.

No other part of horovod_tune imports torch_xla.
"""
