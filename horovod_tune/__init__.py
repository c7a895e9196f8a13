"""Hyperparameter search for distributed training: Horovod functions as Ray Tune trials."""
