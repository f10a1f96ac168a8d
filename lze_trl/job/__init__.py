"""The job around the trainer: recipes, the command, training, the demo and the Hub."""

from pathlib import Path


CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the clone of the repository, where there is one."""
