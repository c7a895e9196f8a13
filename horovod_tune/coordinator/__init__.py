"""The ranks of a trial: a group of training actors, over Gloo or XLA."""
