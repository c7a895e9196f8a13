"""One small program for each peer and each measurement; each also runs by itself, with `python -m`."""
