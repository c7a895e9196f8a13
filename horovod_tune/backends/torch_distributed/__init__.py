"""The backend for torch.distributed, with the training actors of `actors`."""
