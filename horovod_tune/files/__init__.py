"""Copies directories, and keeps the ranks' logs. Independent of Ray; runs in every process."""
