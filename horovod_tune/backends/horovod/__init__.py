"""Horovod's rendezvous, and its world in each rank."""
