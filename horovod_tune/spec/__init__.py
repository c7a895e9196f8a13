"""The validated request of one trial."""
