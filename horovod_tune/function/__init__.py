"""Runs in the driver: checks the training function, and pickles it for its ranks."""
