"""Ranks of torch.distributed: what is its own, below the training actors that Horovod's ranks have too."""
