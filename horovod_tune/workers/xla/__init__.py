"""Ranks that run on TPU chips: a member actor per host, and below it the processes of torch_xla."""
