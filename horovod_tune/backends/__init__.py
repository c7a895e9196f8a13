"""How ranks of Horovod, torch.distributed and torch_xla form their worlds; they differ in nothing else."""
