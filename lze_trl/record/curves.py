"""
Curves over a run, reduced to a few hundred points however long it is.

Steps count from 1: that of a generation batch is the optimizer step that it is rolled out for.
"""

import numpy as np
import pandas as pd

from .advice import accuracy_reward
from .evaluations import task_curves
from .ledger import KINDS, UNITS
from .reader import PAID, Run
from .schema import NUM_ENERGY_BINS


HELD_OUT = "held-out"
"""With what the names of curves over prompts that are never trained on begin."""

GRADED = "mean outcome"


def curve(run: Run, bins: int = 200) -> pd.DataFrame:
    """
    Neighbouring generation batches in at most `bins` rows: `generation` and `step` at their end; means as they were logged; what became of
    the groups, as shares that add up to 1: `live`, `dead` and drawn in full, `stopped`; and the work so far by [`UNITS`], of which
    tokens are those rolled out.
    """
    columns = {"generation": "max(generation)", "step": "max(step) + 1"}
    means = ("pass_rate", "selected_pass_rate", "reward_mean", "energy_mean", "dead_share")
    columns |= {name: f"avg({name})" for name in means}
    parts = {"live": "groups - dead", "dead": PAID, "stopped": "stopped"}
    columns |= {name: f"sum({part}) / sum(groups)" for name, part in parts.items()}
    for unit in UNITS:
        kinds = ["rollout"] if unit == "tokens" else KINDS
        total = " + ".join(f"coalesce(ledger['{kind}_{unit}'], 0)" for kind in kinds)
        columns[unit] = f"arg_max({total}, generation)"
    return _binned(run, columns, bins)


def reward_curves(run: Run, bins: int = 200) -> pd.DataFrame:
    """Mean of every reward function as it was logged, columns named by `reward_labels`, indexed by step."""
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
    Name of the metric by which held-out prompts are judged first: the mean of `pass_reward` over their completions, by default of
    the one reward function whose name says that it is an accuracy, else of the total.
    """
    name = accuracy_reward(pass_reward, reward_names)
    return "eval_reward" if name is None else f"eval_rewards/{name}/mean"


def held_out_metrics(pass_reward: str | None, reward_names: list[str]) -> dict[str, str]:
    """
    Metrics of held-out prompts, and what they are called: that of [`accuracy_metric`] first, of several rewards then each other one.
    A reward is called an accuracy only if the user, or its own name, says that it is one.
    """
    first = accuracy_metric(pass_reward, reward_names)
    names = {first: f"{HELD_OUT} {'reward' if first == 'eval_reward' else 'accuracy'}"}
    several = dict.fromkeys(reward_names) if len(reward_names) > 1 else {}
    return names | {f"eval_rewards/{n}/mean": f"{HELD_OUT} {n}" for n in several if f"eval_rewards/{n}/mean" != first}


def held_out_curves(run: Run) -> dict[str, pd.Series]:
    """What was logged of held-out prompts by step, under the names of [`held_out_metrics`]; each series is named by its metric."""
    metrics = held_out_metrics(run.meta.settings.get("pass_reward"), run.meta.reward_names)
    logged = logged_curves(run, list(metrics), bins=10**9)
    found = {called: logged[metric].rename(metric) for metric, called in metrics.items() if metric in logged}
    accuracy = found.get(f"{HELD_OUT} accuracy", pd.Series(dtype=float))
    if not accuracy.between(0.0, 1.0).all():
        found = {f"{HELD_OUT} reward": accuracy} | {
            name: values for name, values in found.items() if values is not accuracy
        }
    return found


def evaluated(run: Run) -> dict[str, pd.Series]:
    """Every score on prompts that are not trained on, by step: [`held_out_curves`], then the tasks that the run was evaluated on."""
    return held_out_curves(run) | task_curves(run.directory.parent)


def is_share(name: str) -> bool:
    """Whether one of the curves of [`evaluated`] is a share of completions, and not the mean of a reward."""
    return not name.startswith(HELD_OUT) or name == f"{HELD_OUT} accuracy"


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
