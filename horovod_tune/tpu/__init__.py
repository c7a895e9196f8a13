"""What trials with torch_xla and with TorchTPU share: their slices, hosts and chips."""
