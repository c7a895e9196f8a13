"""Training actors with one rank each, which Horovod's and torch.distributed's backends share."""
