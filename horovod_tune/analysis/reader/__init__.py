"""Reads an experiment's folder into plain records."""
