"""Other libraries' training loops in a trial. Each module here imports its library."""
