"""Trains with growing global batches: `python -m benchmarks.large_batch`."""
