"""Running on more than one machine: launch, preflight, and the files they use."""
