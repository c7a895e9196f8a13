"""Runs in the coordinator actor, one per trial: starts, polls and stops workers."""
