"""Runs in every rank, whatever its backend."""
