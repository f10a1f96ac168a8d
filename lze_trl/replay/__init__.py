"""Offline replay: what other selectors would have chosen from the recorded rollouts of a run, and at which cost."""

from .comparison import Replay, replay
from .rules import ReplayError
from .strategies import Choice
from .tables import show_replay


__all__ = ["Choice", "Replay", "ReplayError", "replay", "show_replay"]
