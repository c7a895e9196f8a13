"""A module of the user's own, next to the script."""

from pathlib import Path

MESSAGE = (Path(__file__).parent / "data.txt").read_text().strip()
