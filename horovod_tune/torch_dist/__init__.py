"""Ranks of torch.distributed, in the training actors that Horovod's ranks use too."""
