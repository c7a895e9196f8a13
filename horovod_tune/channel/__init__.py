"""Messages between processes of one host, one protocol for all backends: authenticated, framed, data only."""
