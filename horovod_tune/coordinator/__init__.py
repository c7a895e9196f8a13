"""Runs in the coordinator actor, one per trial: starts, polls, resets and stops workers."""
