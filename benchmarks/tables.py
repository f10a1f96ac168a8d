"""The benchmark's results as Markdown."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from .comparison import (
    COSTS,
    PHASES,
    PRICES,
    WINDOW,
    Curve,
    Pairs,
    Spread,
    bootstrap_interval,
    cost_to_target,
    exchanged,
    lasting_crossing,
    matched,
    mean_cost_to_target,
    on_one_processor,
    pairs,
    processor,
    read_curve,
)
from .sections import Section
from .strategies import BASELINE, STRATEGIES


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, all others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def ratio(spread: Spread | None) -> str:
    """Median and range over the seeds; says in how many of them a target was not reached."""
    if spread is None:
        return "–"
    seeds = len(spread.values)
    if spread.reached == 0:
        return "not reached"
    missing = "" if spread.reached == seeds else f"; {seeds - spread.reached} of {seeds} not reached"
    if math.isinf(spread.median):
        return f"not reached ({seeds - spread.reached} of {seeds}; else {spread.low:.2f})"
    if seeds == 1:
        return f"{spread.median:.2f}"
    high = max(value for value in spread.values if math.isfinite(value))
    return f"{spread.median:.2f} ({spread.low:.2f}–{high:.2f}{missing})"


def mean_ratio(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """A ratio of averaged curves, with its interval."""
    if value is None:
        return "–"
    text = "not reached" if math.isinf(value) else f"{value:.2f}"
    if interval is None or math.isinf(interval[0]):
        return text
    low, high = ("∞" if math.isinf(end) else f"{end:.2f}" for end in interval)
    return f"{text} ({low}–{high})"


def accuracy(spread: Spread) -> str:
    """Mean and standard deviation over the seeds."""
    deviation = spread.deviation
    return f"{spread.mean:.3f}" if deviation is None else f"{spread.mean:.3f} ± {deviation:.3f}"


def gain(spread: Spread) -> str:
    """Median and range over the seeds of a difference in accuracy, in percentage points."""
    median = f"{100 * spread.median:+.1f}"
    return median if len(spread.values) == 1 else f"{median} ({100 * spread.low:+.1f} to {100 * spread.high:+.1f})"


def shares(runs: Pairs, cost: str) -> str:
    """Mean shares of rollout, log-probs and update, in percent."""
    means = (sum(run.shares[cost][phase] for run, _ in runs) / len(runs) for phase in PHASES)
    return " / ".join(f"{100 * mean:.0f}" for mean in means)


def _rows(curves: Sequence[Curve], cells: Callable[[Pairs], Sequence[str]]) -> list[list[str]]:
    """One row for each strategy that has runs."""
    found = {strategy: pairs(curves, strategy, BASELINE) for strategy in STRATEGIES}
    return [[STRATEGIES[strategy].title, *cells(runs)] for strategy, runs in found.items() if runs]


def _seeds(runs: Pairs, curves: Sequence[Curve]) -> str:
    """Number of seeds; says so if the baseline has more."""
    every = len(pairs(curves, BASELINE, BASELINE))
    return str(every) if len(runs) == every else f"{len(runs)} of {every}"


def _outcome(runs: Pairs, curves: Sequence[Curve]) -> list[str]:
    """Cells of `_OUTCOME`."""
    steps, finals = (
        Spread(values) for values in zip(*((run.costs["steps"][-1], run.final) for run, _ in runs), strict=True)
    )
    return [_seeds(runs, curves), f"{steps.median:.0f}", accuracy(finals)]


def _costs(runs: Pairs, costs: Sequence[str] = COSTS) -> list[str]:
    """Cells of `_COSTS`, or of `_PRICES`."""
    return [_of_one_processor(runs) if cost == "seconds" else ratio(cost_to_target(runs, cost)) for cost in costs]


def _of_one_processor(runs: Pairs) -> str:
    """Seconds ×; says so if some runs were made on another processor than the baseline of their seed, and are left out."""
    comparable = on_one_processor(runs)
    shown = ratio(cost_to_target(comparable, "seconds")) if comparable else "–"
    return shown if len(comparable) == len(runs) else f"{shown}, of {len(comparable)} of {len(runs)}"


_OUTCOME = ["seeds", "steps", "final accuracy"]
_COSTS = ["FLOPs ×", "tokens ×", "seconds ×"]
_LEADING, *_FURTHER = PRICES
_PRICED = [_LEADING, "rollouts", "updates", *_FURTHER]
_PRICES = [f"price at {name.removeprefix('price_')} %" if name in PRICES else f"{name} ×" for name in _PRICED]


def price_table(curves: Sequence[Curve]) -> str:
    """What each strategy costs to reach the baseline's final accuracy, by the share of generation in the baseline's time."""

    def cells(runs: Pairs) -> list[str]:
        live = Spread(tuple(run.completions_per_live_group for run, _ in runs))
        per_group = "–" if math.isnan(live.mean) else f"{live.median:.1f}"
        return [*_outcome(runs, curves), *_costs(runs, _PRICED), per_group]

    rows = _rows(curves, cells)
    noise = exchanged(curves, BASELINE)
    if noise:
        title = f"{STRATEGIES[BASELINE].title}, target of another seed"
        rows.insert(1, [title, f"{len(noise)} pairs", "", "", *_costs(noise, _PRICED), ""])
    return table(["strategy", *_OUTCOME, *_PRICES, "completions per live group"], rows)


def target_table(curves: Sequence[Curve]) -> str:
    """What this machine has spent until each strategy reached the baseline's final accuracy."""

    def cells(runs: Pairs) -> list[str]:
        whole = ratio(cost_to_target(runs, "flops", whole=True))
        return [_seeds(runs, curves), *_costs(runs), whole, shares(runs, "flops"), shares(runs, "seconds")]

    header = ["strategy", "seeds", *_COSTS]
    header += ["FLOPs × of the whole baseline", "FLOPs: rollout / log-probs / update, %", "seconds: the same, %"]
    rows = _rows(curves, cells)
    noise = exchanged(curves, BASELINE)
    if noise:
        whole = ratio(cost_to_target(noise, "flops", whole=True))
        title = f"{STRATEGIES[BASELINE].title}, target of another seed"
        rows.insert(1, [title, f"{len(noise)} pairs", *_costs(noise), whole, "", ""])
    return table(header, rows)


def averaged_table(curves: Sequence[Curve]) -> str:
    """What each strategy costs to reach the baseline's final accuracy, on curves averaged over the seeds."""

    def cells(runs: Pairs) -> list[str]:
        first = {cost: mean_cost_to_target(runs, cost) for cost in ("flops", "tokens")}
        return [
            _seeds(runs, curves),
            mean_ratio(mean_cost_to_target(runs, _LEADING), bootstrap_interval(runs, _LEADING)),
            mean_ratio(mean_cost_to_target(runs, _LEADING, lasting_crossing)),
            mean_ratio(first["flops"], bootstrap_interval(runs, "flops")),
            mean_ratio(mean_cost_to_target(runs, "flops", lasting_crossing)),
            mean_ratio(first["tokens"]),
        ]

    price = _PRICES[0]
    header = ["strategy", "seeds", f"{price} (90 % interval)", f"{price}, lasting"]
    header += ["FLOPs × (90 % interval)", "FLOPs ×, lasting", "tokens ×"]
    return table(header, _rows(curves, cells))


def matched_table(curves: Sequence[Curve], control: str) -> str:
    """Accuracy at an equal number of optimizer steps, of completions rolled out or of update tokens."""

    def cells(runs: Pairs) -> list[str]:
        result = matched(runs, control)
        return [f"{result.amount.median:,.0f}", accuracy(result.accuracy), gain(result.gain), ratio(result.flops)]

    amount = {"steps": "steps", "completions": "completions", "update_tokens": "update tokens"}[control]
    header = ["strategy", amount, "accuracy", "against the baseline, points", "FLOPs ×"]
    return table(header, _rows(curves, cells))


def short_table(curves: Sequence[Curve]) -> str:
    """The leading price and what it is made of, in few columns."""

    def cells(runs: Pairs) -> list[str]:
        return [_seeds(runs, curves), _outcome(runs, curves)[-1], *_costs(runs, _PRICED[:3])]

    return table(["strategy", "seeds", "final accuracy", *_PRICES[:3]], _rows(curves, cells))


def tuned_table(section: Section) -> str:
    """The first table again, each strategy at the learning rate that suits it best."""
    rates, curves = section.rates, [read_curve(result, "held_out") for result in section.tuned]
    tried = {
        strategy: sorted(
            {
                result["settings"]["learning_rate"]
                for result in section.tuning
                if result["settings"]["strategy"] == strategy
            }
        )
        for strategy in rates
    }

    def rate(strategy: str) -> str:
        edge = rates[strategy] in (tried[strategy][0], tried[strategy][-1]) and len(tried[strategy]) > 1
        return f"{rates[strategy]:.1e}{' (edge of the grid)' if edge else ''}"

    def cells(runs: Pairs) -> list[str]:
        return [rate(runs[0][0].strategy), *_outcome(runs, curves), *_costs(runs, _PRICED)]

    return table(["strategy", "learning rate", *_OUTCOME, *_PRICES], _rows(curves, cells))


def section_text(section: Section, pictures: Sequence[str]) -> str:
    """All tables of a section."""
    curves = section.curves()
    parts = [f"## {section.title}", _conditions(section), *(f"![{section.title}]({name})" for name in pictures)]
    parts += [
        "### Price of the baseline's final accuracy",
        "*Rollouts ×* is what generation cost until a run first reached the baseline's final accuracy, *updates ×* what "
        "log-probs, forward and backward passes cost, each relative to the baseline's own up to its first crossing. Where "
        "generation takes the share g of the baseline's time, the price is g · rollouts × + (1 − g) · updates ×. Median over "
        "the seeds, with the range. A dash stands where the baseline was at its final accuracy from the start, or where live "
        "groups were not counted. Where each baseline has the target of another seed, what differs from 1 is noise: a ratio "
        "within that range means nothing.",
        price_table(curves),
        "### What it cost on this machine",
        "Relative to what the baseline itself has used when it first reaches its final accuracy (in the column that says so, "
        "to all that it has used). *Tokens* are those of rollouts, log-prob passes and update together. Shares are those of "
        "whole runs. *Seconds* compare runs that were made on the same processor, and leave out others.",
        target_table(curves),
        "### Curves averaged over the seeds",
        "Accuracy and costs are averaged over the seeds at each evaluation, the target is the final accuracy of the averaged "
        "baseline, and the interval that of a bootstrap over the seeds (none with fewer than 3). *Lasting* is the cost after "
        "which the curve never falls below the target again, for the baseline too, instead of that of the first crossing.",
        averaged_table(curves),
        "### Equal number of optimizer steps",
        "At the number of steps that both runs have made; FLOPs are those up to there.",
        matched_table(curves, "steps"),
        "### Equal number of rollouts",
        "At the lesser of the completions that both runs have rolled out in all.",
        matched_table(curves, "completions"),
        "### Equal number of update tokens",
        "At the lesser of the update tokens that both runs have used in all: for a strategy that trains on few rows, early in "
        "the baseline's run.",
        matched_table(curves, "update_tokens"),
        "### The same on prompts that are trained on",
        price_table(section.curves("train")),
    ]
    if section.tuned:
        seeds = sorted({result["settings"]["seed"] for result in section.tuning})
        parts += [
            "### Learning rate tuned for each strategy",
            f"The rate with the best accuracy on held-out prompts kept for this alone, on the seeds {seeds}; then run on the "
            "seeds of the tables above. The target is that of the baseline at its own best rate.",
            tuned_table(section),
        ]
    return "\n\n".join(parts)


def _conditions(section: Section) -> str:
    """How the runs of a section were made."""
    results, every = section.main, section.results
    settings, prompts = results[0]["settings"], results[0]["prompts"]
    training = settings["training"]
    groups = training["generation_batch_size"] // training["num_generations"]
    stretch = max(result["settings"]["stretch"] for result in results)
    dates = sorted({result["date"] for result in every})
    versions = sorted({", ".join(f"{name} {number}" for name, number in r["versions"].items()) for r in every})
    return "\n\n".join(
        [
            f"{groups} prompts × {training['num_generations']} completions a step, learning rate "
            f"{settings['learning_rate']:.1e}; the baseline makes {settings['steps']} steps, and the others go on until they "
            f"have cost as many FLOPs, for at most {stretch:g} times as many steps. The model has "
            f"{results[0]['parameters'] / 1e6:.1f} M parameters; {prompts['trained on']:,} prompts are trained on.",
            f"Accuracy is that expected of completions sampled at temperature 1, computed exactly, on {prompts['held_out']:,} "
            f"held-out prompts and on {prompts['train']:,} of those trained on, every {settings['eval_every']} steps, and "
            f"smoothed over {WINDOW} evaluations. The time of evaluations is not counted. {_check(results)}".rstrip(),
            f"Measured on {'; '.join(sorted({_machine(result['machine']) for result in every}))}. "
            f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}. {'; or '.join(versions)}. {_sources(every)}",
        ]
    )


def _machine(values: dict[str, Any]) -> str:
    text = f"{processor(values)}, {values['cores']} cores, {values['threads']} thread(s) a run"
    if "at_once" not in values:
        return text
    return f"{text}, {values['at_once']} {'run' if values['at_once'] == 1 else 'runs'} at a time"


def _sources(results: Sequence[dict[str, Any]]) -> str:
    """Whether the runs were made by the same code of this package."""
    sources = sorted({result["source"] for result in results})
    if len(sources) == 1:
        return f"Source {sources[0]}."
    return f"**The runs were made by {len(sources)} versions of this package: {', '.join(sources)}.**"


def _check(results: Sequence[dict[str, Any]]) -> str:
    """How far sampling is from the accuracy that it is expected to have."""
    checks = [check for result in results for check in result["checks"]]
    if not checks:
        return ""
    difference = sum(check["mean"] - check["expected"] for check in checks) / len(checks)
    error = math.sqrt(sum(check["standard_error"] ** 2 for check in checks)) / len(checks)
    return (
        f"Checked by sampling: over {len(checks)} evaluations, sampled accuracy differs from it by {100 * difference:+.2f} ± "
        f"{100 * error:.2f} points on average."
    )
