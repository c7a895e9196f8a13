"""Horovod ranks that talk over Gloo; the only place that imports Horovod."""
