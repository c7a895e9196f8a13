"""Batches that grow while a trial runs: `policies` say when, `batch_growth` does it."""
