"""Checks that the versions installed on a machine, or on each node of a Ray cluster, are compatible."""
