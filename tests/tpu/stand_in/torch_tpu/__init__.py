"""Stands in for the package of the same name in tests: a device "tpu" on CPU memory, `tpu_dist` over Gloo."""
