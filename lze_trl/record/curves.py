"""
Curves over a run, reduced to a few hundred points however long it is.

Steps count from 1: that of a generation batch is the optimizer step that it is rolled out for.
"""

from typing import Any

import numpy as np
import pandas as pd

from .advice import accuracy_reward
from .causes import CAUSES
from .evaluations import task_curves
from .ledger import KINDS, UNITS
from .reader import PAID, STATE, STATES, Run


HELD_OUT = "held-out"
"""With what the names of curves over prompts that are never trained on begin."""

GRADED = "mean outcome"
UNSEEN = "never seen"
PASSES = 0.5
"""Outcome from which a completion counts as one that passes, where outcomes are graded."""

FEW_VISITS = 3
"""Latest visits without a pass from which a prompt counts as stuck."""

_MOST_LEVELS = 16  # of outcomes that are shown one by one
_Z = 1.96  # standard errors to each side of a 95 % interval


# Each generation batch with its bin of neighbouring ones, and the step at the end of the bin
_BINS = """bins AS (SELECT generation, bin, max(step) OVER (PARTITION BY bin) + 1 AS until FROM (
    SELECT generation, step, (row_number() OVER (ORDER BY generation) - 1) * least(?::BIGINT, count(*) OVER ())
        // count(*) OVER () AS bin FROM generations))"""


def curve(run: Run, bins: int = 200) -> pd.DataFrame:
    """
    Gather neighbouring generation batches in at most `bins` rows: `generation` and `step` at their end; means as they were logged; what became of
    the groups, as shares that add up to 1: `live`, `dead` and drawn in full, `stopped`; and the work so far by [`UNITS`], of which
    tokens are those rolled out, with those of plain GRPO as `plain_tokens`.
    """
    columns = {"generation": "max(generation)", "step": "max(step) + 1"}
    means = ("pass_rate", "reward_mean", "energy_mean", "dead_share")
    columns |= {name: f"avg({name})" for name in means}
    parts = {"live": "groups - dead", "dead": PAID, "stopped": "stopped"}
    columns |= {name: f"sum({part}) / sum(groups)" for name, part in parts.items()}
    for unit in UNITS:
        kinds = ["rollout"] if unit == "tokens" else KINDS
        total = " + ".join(f"coalesce(ledger['{kind}_{unit}'], 0)" for kind in kinds)
        columns[unit] = f"arg_max({total}, generation)"
    columns["plain_tokens"] = "arg_max(ledger['plain_tokens'], generation)"
    return _binned(run, columns, bins)


def reward_curves(run: Run, bins: int = 200) -> pd.DataFrame:
    """Return the mean of every reward function as it was logged, columns named by `reward_labels`, indexed by step."""
    means = {name: f"avg(rewards[{index}])" for index, name in enumerate(run.meta.reward_labels, start=1)}
    frame = _binned(run, {"": "max(step) + 1"} | means, bins)  # a reward function may be named `step`
    return frame.set_index("").rename_axis("step")


def main_reward(run: Run) -> pd.Series:
    """Return the reward that the run is judged by, by step and as it was logged: that of [`accuracy_metric`], named by what it is called."""
    name = accuracy_reward(run.meta.settings.get("pass_reward"), run.meta.reward_names)
    if name in run.meta.reward_labels:
        return reward_curves(run)[str(name)].dropna()
    return curve(run).set_index("step")["reward_mean"].rename("reward").dropna()


def last_fifth(values: pd.Series) -> tuple[float, float]:
    """Return the mean over the last fifth of a curve, and its difference from the mean over the fifth before, NaN where there is none."""
    size = max(1, len(values) // 5)
    now, before = values[-size:].mean(), values[-2 * size : -size].mean()
    return float(now), float(now - before)


def waste(run: Run) -> tuple[float, str, float]:
    """
    Return the share of the groups of the last fifth of the generation batches that were dead and drawn in full, the most frequent cause, one of
    [`CAUSES`], and its share of these dead groups; a share is NaN, and the cause `""`, where that is not known.
    """
    query = f"""SELECT coalesce(sum({PAID}) / nullif(sum(groups), 0), 'nan') AS share, min(generation) AS first FROM (
        FROM generations QUALIFY row_number() OVER (ORDER BY generation DESC) <= greatest(1, count(*) OVER () // 5))"""
    (row,) = run.arrow(query).to_pylist()
    causes = run.sql("SELECT cause FROM groups WHERE dead AND generation >= ? AND cause <> 'stopped'", [row["first"]])
    shares = causes["cause"].value_counts(normalize=True)
    cause = next((name for name in shares.index if name in CAUSES), "")
    return float(row["share"]), cause, float(shares.get(cause, np.nan))


def value_tables(run: Run) -> dict[str, pd.DataFrame]:
    """
    Tabulate by column of the data what its values have cost so far, the most expensive first; the reward that the run is judged by and the share of
    dead groups, means over its last fifth, and the reward on held-out prompts now; and the cause of most dead groups, one of [`CAUSES`].
    """
    held_out = accuracy_metric(run.meta.settings.get("pass_reward"), run.meta.reward_names)
    found = run.sql(
        r"""WITH paths AS (
            SELECT name, regexp_extract(name, '^((?:eval_)?by)/([^/]+)/([^/]+)/(.+)', ['kind', 'data_column', 'data_value', 'metric']) AS path
            FROM (SELECT DISTINCT name FROM steps WHERE contains(name, 'by/'))
        ), logged AS (
            SELECT path.*, step, value AS number, step > 0.8 * max(step) OVER () AS recent FROM steps JOIN paths USING (name) WHERE path.kind <> ''
        ) SELECT data_column, data_value AS value, max(number) FILTER (metric = 'completions')::BIGINT AS completions,
            max(number) FILTER (metric = 'tokens')::BIGINT AS "generated tokens", avg(number) FILTER (recent AND kind = 'by' AND metric = ?) AS reward,
            arg_max(number, step) FILTER (kind = 'eval_by' AND metric = ?) AS held_out,
            avg(number) FILTER (recent AND metric = 'dead_share') AS "dead share",
            arg_max(metric, (number, metric)) FILTER (starts_with(metric, 'dead/') AND metric <> 'dead/stopped') AS mostly
        FROM logged GROUP BY ALL HAVING completions IS NOT NULL ORDER BY completions DESC, value""",
        [held_out.removeprefix("eval_")] * 2,
    ).rename(columns={"held_out": HELD_OUT})
    found["mostly"] = [CAUSES.get(str(name).removeprefix("dead/"), "") for name in found["mostly"]]
    return {str(column): rows.drop(columns="data_column") for column, rows in found.groupby("data_column")}


def interval(run: Run, name: str, value: float) -> tuple[float, float]:
    """
    Return the 95 % interval of the last score of [`held_out_curves`] by a name, NaN where it is not known. Completions of one prompt resemble each
    other, so that only prompts are counted: it is rather too wide. A share has the interval of Wilson.
    """
    count = run.meta.settings.get("held_out_prompts") or np.nan
    if is_share(name):
        middle, width = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count), _Z / (1 + _Z**2 / count)
        half = width * np.sqrt(value * (1 - value) / count + (_Z / (2 * count)) ** 2)
    else:
        # The spread of a sum is at most the sum of those of its parts
        names, weights = run.meta.reward_names, run.meta.settings.get("reward_weights")
        parts = {name.removeprefix(f"{HELD_OUT} "): 1.0}
        if parts.keys() == {"reward"}:
            parts = dict(zip(names, weights or [1.0] * len(names), strict=False))
        logged = logged_curves(run, [f"eval_rewards/{part}/std" for part in parts], bins=10**9)
        spreads = {name.split("/")[1]: values.iloc[-1] for name, values in logged.items()}
        half = _Z * sum(abs(weight) * spreads.get(part, np.nan) for part, weight in parts.items()) / np.sqrt(count)
        middle = value
        half = half or np.nan  # equal rewards tell nothing of those of other prompts
    ends = np.array([middle - half, middle + half])
    return tuple(np.clip(ends, 0.0, 1.0).tolist() if is_share(name) else ends.tolist())


def prompt_flow(run: Run, bins: int = 120) -> pd.DataFrame:
    """Count the prompts in each of [`STATES`] that occurs after at most `bins` steps, indexed by step, and those never seen, if that is known."""
    changes = run.sql(
        f"""WITH {_BINS}, visited AS (SELECT *, cause IS DISTINCT FROM 'stopped' AS whole FROM groups), sums AS (
            SELECT prompt_id, generation, pruned, max(generation) FILTER (whole) OVER before AS last_whole,
                max(generation) FILTER (whole AND pass_rate = 1) OVER before AS last_solved,
                max(generation) FILTER (replayed AND pass_rate < 1) OVER before AS last_failed_recheck,
                nullif(coalesce(last_value(CASE WHEN whole THEN coalesce(pass_rate, -1) END IGNORE NULLS) OVER before, pass_rate), -1) AS pass_rate,
                coalesce(last_value(CASE WHEN whole THEN dead END IGNORE NULLS) OVER before, dead) AS dead
            FROM visited WINDOW before AS (PARTITION BY prompt_id ORDER BY generation)
        ), states AS (
            SELECT prompt_id, generation, {STATE} AS state FROM sums
        ), moves AS (
            SELECT generation, state, lag(state) OVER (PARTITION BY prompt_id ORDER BY generation) AS earlier FROM states
        ), changes AS (
            SELECT generation, state, 1 AS change FROM moves WHERE state IS DISTINCT FROM earlier
            UNION ALL SELECT generation, earlier, -1 FROM moves WHERE state <> earlier
        ) SELECT until AS step, state, coalesce(sum(change), 0) AS change
        FROM bins LEFT JOIN changes USING (generation) GROUP BY ALL""",
        [bins],
    )
    counts = changes.dropna().pivot_table(index="step", columns="state", values="change", aggfunc="sum")
    counts = counts.reindex(sorted(changes["step"].unique())).fillna(0).cumsum()
    counts = counts[[state for state in STATES if state in counts]].astype(int)
    if known := run.meta.settings.get("train_prompts"):
        counts.insert(0, UNSEEN, (known - counts.sum(axis=1)).clip(lower=0))
    return counts


def outcome_histogram(run: Run, bins: int = 120) -> pd.DataFrame:
    """
    Return the shares of the groups that were drawn in full by their mean outcome: a column for 0, one for 1, and those between for the nearest of
    equal steps, `1 / num_generations` wide if these are few; at most `bins` rows, indexed by step.
    """
    size = int(run.meta.settings.get("num_generations") or 8)
    levels = max(2, size if size <= _MOST_LEVELS else 10)
    counts = run.sql(
        f"""WITH {_BINS} SELECT until AS step, count(*) AS groups, CASE WHEN pass_rate IN (0, 1) THEN pass_rate * ?
            ELSE greatest(1, least(? - 1, round(pass_rate * ?))) END::INTEGER AS level
        FROM groups JOIN bins USING (generation) WHERE pass_rate IS NOT NULL AND cause IS DISTINCT FROM 'stopped' GROUP BY ALL""",
        [bins, levels, levels, levels],
    )
    table = counts.pivot(index="step", columns="level", values="groups").reindex(columns=range(levels + 1)).fillna(0)
    return table.div(table.sum(axis=1), axis=0).rename(columns=lambda level: f"{level}/{levels}")


def lengths(run: Run, bins: int = 120) -> dict[str, pd.Series]:
    """
    Return tokens of completions by step: the mean of all as it was logged, and mean and 90th percentile of the recorded ones by their outcome,
    see [`PASSES`].
    """
    found = run.sql(
        f"""WITH {_BINS} SELECT until AS step, outcome >= {PASSES} AS passed, avg(completion_tokens) AS mean,
            quantile_cont(completion_tokens, 0.9) AS p90
        FROM completions JOIN bins USING (generation) WHERE outcome IS NOT NULL GROUP BY ALL ORDER BY step""",
        [bins],
    )
    every = logged_curves(run, [name := "completions/mean_length"], bins).get(name)
    names, shown = {True: f"outcome at least {PASSES}", False: f"outcome below {PASSES}"}, dict[str, pd.Series]()
    for passed, rows in found.groupby("passed"):
        rows, name = rows.set_index("step"), names[bool(passed)]
        shown |= {name: rows["mean"], f"{name}, p90": rows["p90"]}
    return ({} if every is None else {"all": every}) | shown


def stuck_prompts(run: Run, most: int = 8) -> pd.DataFrame:
    """
    List the prompts without a pass in their latest visits, at least [`FEW_VISITS`], that cost most: texts, and since the last pass the first
    `step`, `visits`, `completions` and the `share` of the tokens of all completions; of all such `prompts`, the sums as `all_visits`, ….
    """
    return run.sql(
        f"""WITH passes AS (
            SELECT prompt_id, max(generation) FILTER (NOT dead OR pass_rate >= {PASSES}) AS last FROM groups GROUP BY ALL
        ), stuck AS (
            SELECT prompt_id, min(step) + 1 AS step, count(*) AS visits, sum(size)::BIGINT AS completions,
                sum(completion_tokens) / (SELECT sum(completion_tokens) FROM groups) AS share
            FROM groups JOIN passes USING (prompt_id) WHERE generation > coalesce(last, -1)
            GROUP BY prompt_id HAVING count(*) >= {FEW_VISITS}
        ), page AS (
            SELECT *, count(*) OVER () AS prompts, sum(visits) OVER () AS all_visits,
                sum(completions) OVER () AS all_completions, sum(share) OVER () AS all_share
            FROM stuck ORDER BY share DESC, prompt_id LIMIT ?
        ), texts AS (
            SELECT prompt_id, any_value(text) AS text, any_value(columns) AS columns FROM prompts
            WHERE prompt_id IN (SELECT prompt_id FROM page) GROUP BY prompt_id
        ) SELECT * FROM page LEFT JOIN texts USING (prompt_id) ORDER BY share DESC, prompt_id""",
        [most],
    )


def seconds_per_step(run: Run, bins: int = 120) -> pd.DataFrame:
    """Return the seconds of a step by the kind of work, indexed by step: rollouts and rewards, log-probabilities, updates, and the choice of prompts and groups."""
    kinds = KINDS | {"selection": "selection"}
    columns = {name: f"arg_max(coalesce(ledger['{kind}_seconds'], 0), generation)" for kind, name in kinds.items()}
    totals = _binned(run, {"step": "max(step) + 1"} | columns, bins).set_index("step")
    spent = totals.diff().fillna(totals)
    steps = pd.Series(totals.index, totals.index).diff().fillna(totals.index[0] if len(totals) else 1)
    return spent.div(steps.clip(lower=1), axis=0).clip(lower=0)  # a resumed run may have lost some


def calibration(run: Run) -> pd.DataFrame:
    """
    Compare the forecasts of prompts before their first visit with what came of them, in tenths: mean `forecast`, share of `alive` groups,
    and number of `groups`. Empty without forecasts, and where a gate has stopped groups, of which nobody knows whether they are alive.
    """
    if "forecast" not in run.sql("FROM groups LIMIT 0"):
        return pd.DataFrame(columns=["forecast", "alive", "groups"])
    return run.sql("""SELECT avg(forecast) AS forecast, avg((NOT dead)::INTEGER) AS alive, count(*) AS groups
        FROM groups WHERE visits = 1 AND scored > 0 AND forecast IS NOT NULL AND NOT EXISTS (FROM groups WHERE cause = 'stopped')
        GROUP BY least(floor(10 * forecast), 9) ORDER BY forecast""")


def reward_limits(run: Run) -> pd.DataFrame:
    """Return lowest and highest mean of a group of every reward function, one row each, and of the `total`."""
    columns = {name: f"rewards[{index}]" for index, name in enumerate(run.meta.reward_labels, start=1)}
    found = ", ".join(f"min({column}), max({column})" for column in ["reward_mean", *columns.values()])
    values = run.sql(f"SELECT {found} FROM groups").to_numpy(dtype=float).reshape(-1, 2)
    return pd.DataFrame(values, index=["total", *columns], columns=["low", "high"])


def logged_curves(run: Run, names: list[str], bins: int = 200) -> dict[str, pd.Series]:
    """Return the means of logged metrics over neighbouring steps, indexed by step; a metric that was not logged is left out."""
    frame = run.sql(
        """WITH logged AS (SELECT *, max(step) OVER () + 1 AS total FROM steps WHERE list_contains(?, name))
        SELECT name, max(step) AS step, avg(value) AS value FROM logged
        GROUP BY name, step * least(?::BIGINT, total) // total ORDER BY name, step""",
        [names, bins],
    )
    return {str(name): rows.set_index("step")["value"] for name, rows in frame.groupby("name")}


def accuracy_metric(pass_reward: str | None, reward_names: list[str]) -> str:
    """
    Return the name of the metric by which held-out prompts are judged first: the mean of `pass_reward` over their completions, by default of
    the one reward function whose name says that it is an accuracy, else of the total.
    """
    name = accuracy_reward(pass_reward, reward_names)
    return "eval_reward" if name is None else f"eval_rewards/{name}/mean"


def held_out_metrics(pass_reward: str | None, reward_names: list[str]) -> dict[str, str]:
    """
    List the metrics of held-out prompts, and what they are called: that of [`accuracy_metric`] first, of several rewards then each other one.
    A reward is called an accuracy only if the user, or its own name, says that it is one.
    """
    first = accuracy_metric(pass_reward, reward_names)
    names = {first: f"{HELD_OUT} {'reward' if first == 'eval_reward' else 'accuracy'}"}
    several = dict.fromkeys(reward_names) if len(reward_names) > 1 else {}
    return names | {f"eval_rewards/{n}/mean": f"{HELD_OUT} {n}" for n in several if f"eval_rewards/{n}/mean" != first}


def held_out_curves(run: Run) -> dict[str, pd.Series]:
    """Return what was logged of held-out prompts by step, under the names of [`held_out_metrics`]; each series is named by its metric."""
    metrics = held_out_metrics(run.meta.settings.get("pass_reward"), run.meta.reward_names)
    logged = logged_curves(run, list(metrics), bins=10**9)
    found = {called: logged[metric].rename(metric) for metric, called in metrics.items() if metric in logged}
    accuracy = found.get(f"{HELD_OUT} accuracy", pd.Series(dtype=float))
    if not accuracy.between(0.0, 1.0).all():
        found = {f"{HELD_OUT} reward": found.pop(f"{HELD_OUT} accuracy")} | found
    return found


def evaluated(run: Run) -> dict[str, pd.Series]:
    """Return every score on prompts that are not trained on, by step: [`held_out_curves`], then the tasks that the run was evaluated on."""
    return held_out_curves(run) | task_curves(run.directory.parent)


def is_share(name: str) -> bool:
    """Return whether one of the curves of [`evaluated`] is a share of completions, and not the mean of a reward."""
    return not name.startswith(HELD_OUT) or name == f"{HELD_OUT} accuracy"


def reached(runs: dict[str, Run]) -> tuple[str, float, dict[str, tuple[int, float]]] | None:
    """
    Compare runs by the first score of [`held_out_curves`], or else the [`main_reward`], averaged over a tenth of the steps; its highest value that all of
    the runs have reached; and the step and the tokens rolled out at which each first did, none if one of them began there. `None` if they
    are not judged by the same score.
    """
    scores: list[Any] = [next(iter(held_out_curves(run).items()), None) for run in runs.values()]
    if None in scores:
        lines = map(main_reward, runs.values())
        scores = [(str(line.name), line.rolling(max(1, len(line) // 10), min_periods=1).mean()) for line in lines]
    if len(runs) < 2 or len({name for name, _ in scores}) > 1 or any(line.empty for _, line in scores):
        return None
    level, places = min(line.max() for _, line in scores), {}
    for (id, run), (_, line) in zip(runs.items(), scores, strict=True):
        points, step = curve(run), int(line.index[line >= level][0])
        places[id] = step, float(np.interp(step, [0, *points["step"]], [0, *points["tokens"]]))
    begun = any(line.iloc[0] >= level for _, line in scores)
    return scores[0][0], float(level), {} if begun else places


def outcome_name(run: Run) -> str:
    """Return what the mean outcome of a group is called: a pass rate, unless the latest groups show that outcomes are graded."""
    graded = run.sql("""SELECT bool_or(abs(pass_rate * scored - round(pass_rate * scored)) > 1e-6) AS graded
        FROM groups WHERE generation > (SELECT max(generation) - 8 FROM generations)""")
    return GRADED if graded["graded"].eq(True).any() else "pass rate"


def _binned(run: Run, columns: dict[str, str], bins: int) -> pd.DataFrame:
    """Aggregate neighbouring generation batches into at most `bins` rows."""
    query = f"WITH {_BINS} SELECT {', '.join(columns.values())} FROM generations JOIN bins USING (generation) GROUP BY bin ORDER BY bin"
    return run.sql(query, [bins]).set_axis(list(columns), axis=1)
