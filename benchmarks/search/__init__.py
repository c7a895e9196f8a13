"""Compares BayesOptSearch with other searchers: `python -m benchmarks.search`."""
