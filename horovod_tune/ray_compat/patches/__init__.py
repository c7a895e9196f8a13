"""Patches of Ray Tune, one file for each part that is changed; installed in the driver, once per process."""
