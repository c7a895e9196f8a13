"""Runs in the driver: the training function checked, and pickled for its ranks."""
