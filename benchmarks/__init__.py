"""Programs that check the README's claims: `python -m benchmarks [part ...]`."""
