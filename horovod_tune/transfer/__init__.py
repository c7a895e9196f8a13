"""Copies directories between Ray nodes that share no disk. Runs in the coordinator and in ranks."""
