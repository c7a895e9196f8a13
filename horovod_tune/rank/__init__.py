"""The template of a host, and the ranks that it forks, whatever their backend."""
