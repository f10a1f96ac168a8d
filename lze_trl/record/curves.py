"""Curves over a run, reduced to a few hundred points however long it is."""

import numpy as np
import pandas as pd

from .ledger import KINDS, UNITS
from .reader import Run
from .schema import NUM_ENERGY_BINS


def _ledger_total(unit: str) -> str:
    terms = " + ".join(f"coalesce(ledger['{kind}_{unit}'], 0)" for kind in KINDS)
    return f"arg_max({terms}, generation) AS {unit}"


_BINS = """WITH numbered AS (
    SELECT *, row_number() OVER (ORDER BY generation) - 1 AS position, count(*) OVER () AS total FROM generations
), binned AS (
    SELECT *, CASE WHEN total <= ? THEN position ELSE position * ? // total END AS bin FROM numbered
)"""


def curve(run: Run, bins: int = 200) -> pd.DataFrame:
    """
    Means and shares over neighbouring generation batches.

    Args:
        run ([`Run`]): The run.
        bins (`int`, *optional*, defaults to `200`): Largest number of points.

    Returns:
        `pd.DataFrame`: One row per point: `generation` and `step` at its end; `pass_rate`, `selected_pass_rate`,
        `reward_mean`, `energy_mean`; shares of the groups that were `selected`, `dead`, `replayed`, and of the batch's
        prompts that pruning `skipped`; the share of the visited prompts that is `pruned`; and the work done so far in
        `tokens`, `flops` and `seconds`.
    """
    frame = run.sql(
        f"""{_BINS} SELECT
            max(generation) AS generation, max(step) AS step, max(pass_index) AS pass_index,
            avg(pass_rate) AS pass_rate, avg(selected_pass_rate) AS selected_pass_rate,
            avg(reward_mean) AS reward_mean, avg(energy_mean) AS energy_mean,
            sum(selected) / sum(groups) AS selected, sum(dead) / sum(groups) AS dead,
            sum(replayed) / sum(groups) AS replayed, sum(skipped) / sum(groups + skipped) AS skipped,
            sum(forgotten)::BIGINT AS forgotten, sum(new_prompts)::BIGINT AS new_prompts,
            sum(pruned_change)::BIGINT AS pruned_change, {", ".join(_ledger_total(unit) for unit in UNITS)}
        FROM binned GROUP BY bin ORDER BY bin""",
        [bins, bins],
    )
    frame["pruned"] = frame.pop("pruned_change").cumsum() / frame.pop("new_prompts").cumsum().clip(lower=1)
    return frame


def reward_curves(run: Run, bins: int = 200) -> pd.DataFrame:
    """Mean of every reward function, columns named by `reward_labels`, indexed by step."""
    names = run.meta.reward_labels
    means = "".join(f", avg(rewards[{i + 1}]) AS r{i}" for i in range(len(names)))
    frame = run.sql(f"{_BINS} SELECT max(step) AS step{means} FROM binned GROUP BY bin ORDER BY bin", [bins, bins])
    return frame.set_index("step").rename(columns={f"r{i}": name for i, name in enumerate(names)})


def energy_heat_map(run: Run, bins: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """
    Distribution of the energy over the steps.

    Args:
        run ([`Run`]): The run.
        bins (`int`, *optional*, defaults to `120`): Largest number of columns T.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: Steps at the end of each column, shape `(T,)`, and shares of the groups, shape
        `(T, 1 + NUM_ENERGY_BINS)`: first the dead groups, then the live ones in energy bins of equal width up to
        `run.meta.energy_max`.
    """
    sums = ", ".join(f"sum(energy_histogram[{i + 1}])::DOUBLE AS b{i}" for i in range(NUM_ENERGY_BINS))
    frame = run.sql(
        f"""{_BINS} SELECT max(step) AS step, sum(groups)::DOUBLE AS groups, sum(dead)::DOUBLE AS dead, {sums}
        FROM binned GROUP BY bin ORDER BY bin""",
        [bins, bins],
    )
    counts = frame[["dead", *(f"b{i}" for i in range(NUM_ENERGY_BINS))]].to_numpy()
    # Pruning may have left nothing of a generation batch
    return frame["step"].to_numpy(), counts / frame[["groups"]].clip(lower=1).to_numpy()
