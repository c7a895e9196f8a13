"""What the README claims, as programs that anyone can run: `python -m benchmarks [part ...]`."""
