"""Restores a rank's process after a trial to what a new process would be."""
