"""Ranks that run on TPU chips: a member actor per host, and under it the processes that torch_xla launches."""
