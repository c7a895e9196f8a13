"""Restores a rank's process after a trial, for the next one."""
