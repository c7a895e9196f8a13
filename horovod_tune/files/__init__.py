"""Files and directories as they are copied and kept. Knows nothing of Ray; runs in every process."""
