"""
Curves over a run, reduced to a few hundred points however long it is.

Steps count from 1: that of a generation batch is the optimizer step that it is rolled out for.
"""

import numpy as np
import pandas as pd

from .evaluations import task_curves
from .ledger import KINDS, UNITS
from .reader import Run
from .schema import NUM_ENERGY_BINS


HELD_OUT = "held-out prompts"
"""What the accuracy of [`held_out`] is called among [`accuracies`]."""

GRADED = "mean outcome"


def curve(run: Run, bins: int = 200) -> pd.DataFrame:
    """
    Neighbouring generation batches in at most `bins` rows: `generation` and `step` at their end; means; shares of the groups
    `selected`, `dead`, `replayed`; and the work so far by [`UNITS`].
    """
    columns = {"generation": "max(generation)", "step": "max(step) + 1"}
    columns |= {name: f"avg({name})" for name in ("pass_rate", "selected_pass_rate", "reward_mean", "energy_mean")}
    columns |= {name: f"sum({name}) / sum(groups)" for name in ("selected", "dead", "replayed")}
    for unit in UNITS:
        total = " + ".join(f"coalesce(ledger['{kind}_{unit}'], 0)" for kind in KINDS)
        columns[unit] = f"arg_max({total}, generation)"
    return _binned(run, columns, bins)


def reward_curves(run: Run, bins: int = 200) -> pd.DataFrame:
    """Mean of every reward function, columns named by `reward_labels`, indexed by step."""
    means = {name: f"avg(rewards[{index}])" for index, name in enumerate(run.meta.reward_labels, start=1)}
    frame = _binned(run, {"": "max(step) + 1"} | means, bins)  # a reward function may be named `step`
    return frame.set_index("").rename_axis("step")


def energy_heat_map(run: Run, bins: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """
    Distribution of the energy over at most `bins` steps: the steps, shape `(T,)`, and shares of the groups, shape
    `(T, 1 + NUM_ENERGY_BINS)`: the dead ones, then the live ones in energy bins of equal width up to `run.meta.energy_max`.
    """
    levels = {f"level{index}": f"sum(energy_histogram[{index + 1}])::DOUBLE" for index in range(NUM_ENERGY_BINS)}
    columns = {"step": "max(step) + 1", "groups": "sum(groups)::DOUBLE", "dead": "sum(dead)::DOUBLE"}
    frame = _binned(run, columns | levels, bins)
    groups = frame["groups"].clip(lower=1)  # pruning may have left nothing of a generation batch
    return frame["step"].to_numpy(), frame[["dead", *levels]].div(groups, axis=0).to_numpy()


def logged_curves(run: Run, names: list[str], bins: int = 200) -> dict[str, pd.Series]:
    """What the trainer has logged: the means of these metrics over neighbouring steps, indexed by step; none that is missing."""
    frame = run.sql(
        """WITH logged AS (SELECT *, max(step) OVER () + 1 AS total FROM steps WHERE list_contains(?, name))
        SELECT name, max(step) AS step, avg(value) AS value FROM logged
        GROUP BY name, step * least(?::BIGINT, total) // total ORDER BY name, step""",
        [names, bins],
    )
    return {str(name): rows.set_index("step")["value"] for name, rows in frame.groupby("name")}


def accuracy_metric(pass_reward: str | None, reward_names: list[str]) -> str:
    """
    Name of the metric with the held-out accuracy: the mean of `pass_reward` over held-out completions, by default of
    `accuracy_reward` if that is among the reward functions, else of the total.
    """
    if pass_reward is None and "accuracy_reward" in reward_names:
        pass_reward = "accuracy_reward"
    return "eval_reward" if pass_reward in (None, "total") else f"eval_rewards/{pass_reward}/mean"


def held_out(run: Run) -> pd.Series:
    """Held-out accuracy by step, as it was logged, under the name of [`accuracy_metric`]; empty if it was not."""
    name = accuracy_metric(run.meta.settings.get("pass_reward"), run.meta.reward_names)
    return logged_curves(run, [name], bins=10**9).get(name, pd.Series(dtype=float)).rename(name)


def accuracies(run: Run) -> dict[str, pd.Series]:
    """Every accuracy by step: that of [`held_out`], then those on the tasks that the run was evaluated on."""
    own = held_out(run)
    return ({HELD_OUT: own} if len(own) else {}) | task_curves(run.directory.parent)


def outcome_name(run: Run) -> str:
    """What the mean outcome of a group is called: a pass rate, unless the latest groups show that outcomes are graded."""
    graded = run.sql("""SELECT bool_or(abs(pass_rate * scored - round(pass_rate * scored)) > 1e-6) AS graded
        FROM groups WHERE generation > (SELECT max(generation) - 8 FROM generations)""")
    return GRADED if graded["graded"].eq(True).any() else "pass rate"


def _binned(run: Run, columns: dict[str, str], bins: int) -> pd.DataFrame:
    """Aggregates of neighbouring generation batches, at most `bins` of them."""
    frame = run.sql(
        f"""WITH numbered AS (
            SELECT *, row_number() OVER (ORDER BY generation) - 1 AS position, count(*) OVER () AS total FROM generations
        ) SELECT {", ".join(columns.values())} FROM numbered
        GROUP BY position * least(?::BIGINT, total) // total ORDER BY min(position)""",
        [bins],
    )
    return frame.set_axis(list(columns), axis=1)
