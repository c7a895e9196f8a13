"""Horovod ranks over Gloo: the launcher runs in the coordinator, the training actor in each rank.

The only place that imports Horovod.
"""
