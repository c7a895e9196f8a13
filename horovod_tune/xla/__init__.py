"""Ranks that run on TPU chips: a host actor per host, and below it the processes of torch_xla."""
