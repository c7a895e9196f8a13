"""Training actors with one rank each, shared by Horovod's and torch.distributed's backends."""
