"""Offline replay: what other selectors would have chosen from the recorded rollouts of a run, and at which cost."""

from .choosing import Choice, ReplayError
from .rerun import Replay, replay
from .show import show_replay


__all__ = ["Choice", "Replay", "ReplayError", "replay", "show_replay"]
