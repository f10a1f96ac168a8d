"""What a trainer of models should look at: conditions of the latest generation batches, each with what to do."""

import json

import numpy as np

from ..record import Run
from ..record.curves import logged_curves
from ..record.ledger import TAUGHT_NOTHING, taught_nothing
from ..record.numbers import number, percent


_BATCHES = 8
"""Latest generation batches that are looked at."""

_RECHECKS = 0.7
_PRECISION_LOST = 0.05


def alerts(run: Run) -> list[str]:
    """A sentence for each condition that holds now."""
    latest = run.sql("SELECT groups, dead, replayed FROM generations ORDER BY generation DESC LIMIT ?", [_BATCHES])
    found = [_range_left(run), _precision_falls(run)]
    nothing = taught_nothing(run.summary()["ledger"])
    if nothing:
        found.append(f"{TAUGHT_NOTHING} Check the reward, or train on prompts that the model passes some of the time.")
    groups = latest["groups"].sum()
    if len(latest) == _BATCHES and not groups:
        found.append(
            "The pool of prompts is exhausted: pruning has left nothing of the latest batches. Add prompts, or stop."
        )
    elif len(latest) == _BATCHES:
        if latest["dead"].sum() == groups and not nothing:
            found.append(
                f"All groups of the latest {_BATCHES} generation batches are dead: nothing is learned. Check the reward, or "
                "train on prompts that the model passes some of the time."
            )
        rechecks = latest["replayed"].sum() / groups
        if rechecks >= _RECHECKS:
            found.append(
                f"{percent(rechecks)} of the latest groups are re-checks of pruned prompts: the pool of prompts is nearly "
                "exhausted. Add prompts, or stop."
            )
    return [sentence for sentence in found if sentence]


def _range_left(run: Run) -> str | None:
    """Whether mean rewards of groups lie outside of the range that the settings give."""
    settings = run.meta.settings
    try:
        low, high = json.loads(settings.get("reward_range") or "")
    except (ValueError, TypeError):
        return None
    name = settings.get("pass_reward")
    place = run.meta.reward_names.index(name) + 1 if name in run.meta.reward_names else None
    column = "reward_mean" if place is None else f"rewards[{place}]"
    seen = run.sql(
        f"""SELECT min({column}) AS low, max({column}) AS high FROM groups
        WHERE generation > (SELECT max(generation) - {_BATCHES} FROM generations)"""
    ).iloc[0]
    margin = 1e-6 * max(abs(low), abs(high))
    if not (seen["low"] < low - margin or seen["high"] > high + margin):
        return None
    outside = f"from {number(seen['low'])} to {number(seen['high'])}"
    return (
        f"Mean rewards of groups are {outside}, outside of `reward_range` [{number(low)}, {number(high)}]. Widen it."
    )


def _precision_falls(run: Run) -> str | None:
    """Whether labels that a run makes for itself are right less often than before."""
    logged = logged_curves(run, ["majority/label_precision"]).get("majority/label_precision")
    if logged is None or len(logged) < 2:
        return None
    now, best = float(logged.iloc[-3:].mean()), float(logged.rolling(3, min_periods=1).mean().max())
    if not np.isfinite([now, best]).all() or best - now < _PRECISION_LOST:
        return None
    return (
        f"The precision of the labels has fallen from {percent(best)} to {percent(now)}: the model learns more and more wrong "
        "answers. Stop, or go back to a checkpoint."
    )
