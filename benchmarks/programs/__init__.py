"""One small program for each peer and each measurement; every one runs by itself, as `python -m` too."""
