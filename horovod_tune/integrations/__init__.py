"""Other libraries' training loops in a trial: each module imports its library when it is imported."""
