"""Generation batches as they were recorded: what the selector of the run saw."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..energy import anchor, energy, pass_rate_momentum
from ..groups import Groups
from ..telemetry import Run
from .rules import Rules


_ROWS = 100_000  # groups that are read at a time
_COLUMNS = (
    *("generation", "prompt_id", "size", "pass_rate", "difficulty", "uncertainty", "momentum", "energy"),
    *("first_pass_rate", "ema", "visits", "reward_mean", "reward_std", "prompt_tokens", "completion_tokens"),
    *("replayed", "selected"),
)


@dataclass(frozen=True)
class Batch:
    """
    A recorded generation batch.

    Attributes:
        generation (`int`): Counter of generation batches.
        groups ([`Groups`]): The groups in the order in which the selector of the run saw them.
        selected (`np.ndarray` of shape `(P,)`): Whether the run trained on each group, bool.
        scored (`np.ndarray` of shape `(P,)`): Completions of each group that could be scored, int64.
    """

    generation: int
    groups: Groups
    selected: np.ndarray
    scored: np.ndarray


def is_ordered(run: Run, last: int) -> bool:
    """Whether the run has recorded the place of each group in its generation batch."""
    if "position" not in _columns_of(run):
        return False
    missing = run.arrow("SELECT count(*) AS n FROM groups WHERE position IS NULL AND generation <= ?", [last])
    return missing["n"][0].as_py() == 0


def _columns_of(run: Run) -> list[str]:
    return run.arrow("SELECT * FROM groups LIMIT 0").column_names


def read_batches(run: Run, rules: Rules, last: int) -> Iterator[Batch]:
    """
    Generation batches of a run in their order, read piece by piece.

    Args:
        run ([`~lze_trl.telemetry.Run`]): The run.
        rules ([`Rules`]): Its rules.
        last (`int`): Last generation batch to read.
    """
    counts = run.arrow(
        "SELECT generation, count(*) AS groups FROM groups WHERE generation <= ? GROUP BY generation ORDER BY generation",
        [last],
    )
    generations, piece = counts["generation"].to_numpy(), np.cumsum(counts["groups"].to_numpy()) // _ROWS
    starts = np.flatnonzero(np.diff(piece, prepend=-1))
    columns = _columns_of(run)
    place = "position, prompt_id" if "position" in columns else "prompt_id"
    scored = "coalesce(scored, size)" if "scored" in columns else "size"
    query = f"""SELECT {", ".join(_COLUMNS)}, {scored} AS scored FROM groups
        WHERE generation BETWEEN ? AND ? ORDER BY generation, {place}"""
    for start, end in zip(starts, [*starts[1:], len(generations)], strict=True):
        table = run.arrow(query, [int(generations[start]), int(generations[end - 1])])
        columns = {name: table[name].to_numpy() for name in table.column_names}
        groups, scored_rows = rebuild(columns, rules)
        found, first = np.unique(columns["generation"], return_index=True)
        for generation, begin, stop in zip(found, first, [*first[1:], len(groups)], strict=True):
            rows = np.arange(begin, stop)
            yield Batch(int(generation), groups.take(rows), columns["selected"][rows], scored_rows[rows])


def rebuild(columns: dict[str, np.ndarray], rules: Rules) -> tuple[Groups, np.ndarray]:
    """
    What the selector of the run saw, from columns of `groups`.

    The files hold 32 bits of each number. A pass rate is a fraction, a first pass rate and a moving average had 32 bits
    in the memory of the run, and the rest follows from them, so all of it is found again in full. Where it does not
    follow, because outcomes were graded or the constants are others, and for the mean and the spread of the rewards, it
    is the recorded value.

    Args:
        columns (`dict[str, np.ndarray]`): Arrays of shape `(n,)`.
        rules ([`Rules`]): The rules of the run.

    Returns:
        `tuple[Groups, np.ndarray]`: The groups, and the number of scored completions of each, shape `(n,)`.
    """
    settings = rules.state
    recorded = {name: columns[name].astype(np.float64) for name in _COLUMNS if columns[name].dtype == np.float32}
    sizes, visits = columns["size"].astype(np.int64), columns["visits"].astype(np.int64)
    pass_rates, scored = recorded["pass_rate"], columns["scored"].astype(np.int64)
    if rules.graded:
        scored = np.where(np.isnan(pass_rates), 0, scored)
    else:
        pass_rates, scored = fractions(columns["pass_rate"], scored)
    first = np.where(visits == 1, pass_rates, recorded["first_pass_rate"])
    average = np.where(visits == 1, pass_rates, recorded["ema"])
    difficulty = _refined(anchor(first, settings.difficulty_floor), recorded["difficulty"])
    uncertainty = _refined(np.minimum(4.0 * pass_rates * (1.0 - pass_rates), 1.0), recorded["uncertainty"])
    momentum = _refined(pass_rate_momentum(pass_rates, average), recorded["momentum"])
    energies = _refined(energy(difficulty, uncertainty, momentum, settings.momentum_weight), recorded["energy"])
    groups = Groups(
        prompt_ids=columns["prompt_id"],
        sizes=sizes,
        pass_rates=pass_rates,
        difficulty=difficulty,
        uncertainty=uncertainty,
        momentum=momentum,
        energies=energies,
        first_pass_rates=first,
        ema=average,
        visits=visits,
        reward_mean=recorded["reward_mean"],
        reward_std=recorded["reward_std"],
        prompt_tokens=columns["prompt_tokens"].astype(np.int64),
        completion_tokens=columns["completion_tokens"].astype(np.int64),
        replayed=columns["replayed"],
    )
    return groups, scored


def fractions(rates: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    The fractions k / n that were rounded to 32 bits, with n as large as `sizes` allows.

    Args:
        rates (`np.ndarray` of shape `(n,)`): Rates, float32, NaN where nothing was scored.
        sizes (`np.ndarray` of shape `(n,)`): Largest denominators.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: Rates, float64, and denominators, int64, both of shape `(n,)`. A rate that is no
        such fraction is left as it is, over its `sizes`.
    """
    found, denominators = rates.astype(np.float64), np.where(np.isnan(rates), 0, sizes)
    pending = np.flatnonzero(~np.isnan(rates))
    for missing in range(int(sizes.max(initial=0))):
        scored = sizes[pending] - missing
        pending, scored = pending[scored > 0], scored[scored > 0]
        if len(pending) == 0:
            break
        exact = np.rint(rates[pending].astype(np.float64) * scored) / scored
        hit = exact.astype(np.float32) == rates[pending]
        found[pending[hit]], denominators[pending[hit]] = exact[hit], scored[hit]
        pending = pending[~hit]
    return found, denominators


def _refined(exact: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """The exact values where they are what was recorded, to its precision."""
    recorded = np.nan_to_num(recorded)
    return np.where(np.isclose(exact, recorded, rtol=1e-5, atol=1e-7), exact, recorded)
