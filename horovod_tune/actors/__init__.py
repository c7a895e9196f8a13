"""Ranks that are Ray actors, one each: what Horovod's and torch.distributed's have in common."""
