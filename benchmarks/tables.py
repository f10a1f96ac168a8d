"""The benchmark's results as Markdown."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .comparison import (
    COSTS,
    NEAR,
    PRICES,
    Curve,
    Matched,
    Pairs,
    Spread,
    bootstrap_interval,
    cheapest,
    cost_to_target,
    exchanged,
    matched,
    mean_cost_to_target,
    on_one_processor,
    pairs,
    plain_of,
    processor,
    reaches,
    window,
)
from .sections import Result, Section
from .strategies import BASELINE, STRATEGIES


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, all others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def ratio(spread: Spread | None) -> str:
    """Return the median and range over the seeds; says in how many of them a target was not reached."""
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
    """Return a ratio of averaged curves, with its interval."""
    if value is None:
        return "–"
    text = "not reached" if math.isinf(value) else f"{value:.2f}"
    if interval is None or math.isinf(interval[0]):
        return text
    low, high = ("∞" if math.isinf(end) else f"{end:.2f}" for end in interval)
    return f"{text} ({low}–{high})"


def accuracy(spread: Spread) -> str:
    """Return the mean and standard deviation over the seeds."""
    deviation = spread.deviation
    return f"{spread.mean:.3f}" if deviation is None else f"{spread.mean:.3f} ± {deviation:.3f}"


def points(found: Matched) -> str:
    """Return the mean difference in accuracy, in percentage points, smallest to largest, and with how many of the seeds it is ahead."""
    spread = found.gain
    mean = f"{100 * spread.mean:+.1f}"
    if len(spread.values) == 1:
        return mean
    return f"{mean} ({100 * spread.low:+.1f} to {100 * spread.high:+.1f}), ahead {found.ahead} of {len(spread.values)}"


def mean_of(spread: Spread) -> str:
    """Return the mean over the seeds, with the range."""
    mean = f"{spread.mean:.2f}"
    return mean if f"{spread.low:.2f}" == f"{spread.high:.2f}" else f"{mean} ({spread.low:.2f}–{spread.high:.2f})"


def by(shape: tuple[int, int]) -> str:
    """Return a shape: prompts of a step, and completions of each."""
    return f"{shape[0]} × {shape[1]}"


class Names:
    """
    What rows are called: the title of the strategy and, where several versions of the code made the runs of a section, which of them.

    Plain TRL does not depend on this package: its version is that of the libraries.

    Args:
        results (`Sequence[dict]`): Results of the section.
    """

    _LIBRARIES = ("trl", "transformers", "torch")

    def __init__(self, results: Sequence[Result]):
        self.codes: dict[tuple, str] = {}  # by strategy and seed, which one made it
        self.last: dict[tuple, str] = {}  # when each made its last run
        for result in results:
            code = self._code(result)
            self.last[code] = max(self.last.get(code, ""), f"{result['date']} {result.get('time', '')}".strip())
        newest_first = sorted(self.last, key=lambda code: (self.last[code], code), reverse=True)
        ours = [code for code in newest_first if code[0]]
        self.letters = {code: f"v{len(ours) - i}" for i, code in enumerate(ours)} if len(ours) > 1 else {}
        plain = [code for code in newest_first if not code[0]]
        self.letters |= {code: f"t{len(plain) - i}" for i, code in enumerate(plain)} if len(plain) > 1 else {}
        self.made = {
            (r["settings"]["strategy"], r["settings"]["seed"], r["settings"]["learning_rate"]): self._code(r)
            for r in results
        }

    def _code(self, result: Result) -> tuple[str, ...]:
        plain = STRATEGIES[result["settings"]["strategy"]].trl
        versions = result["versions"]
        own = "" if plain else f"lze-trl {versions['lze-trl']}, source {result['source']}"
        return own, ", ".join(f"{name} {versions[name]}" for name in self._LIBRARIES)

    def of(self, runs: Sequence[Curve]) -> str:
        """Return the title of the strategy of some runs, with the version that made them where there are several."""
        title = STRATEGIES[runs[0].strategy].title
        if not self.letters:
            return title
        codes = {self.made[run.strategy, run.seed, run.rate] for run in runs}
        marks = sorted(self.letters[code] for code in codes if code in self.letters)
        if not marks:
            return title
        kind = bool(next(iter(codes))[0])
        newest = max(last for code, last in self.last.items() if bool(code[0]) == kind)
        older = sum(self.last[self.made[run.strategy, run.seed, run.rate]] < newest for run in runs)
        how = {0: "", len(runs): ", **older code**"}.get(older, f", **{older} of {len(runs)} runs by older code**")
        return f"{title} [{', '.join(marks)}{how}]"

    def legend(self) -> str:
        """Return the versions, the newest first."""
        if not self.letters:
            return "".join(f"All but plain TRL's by {code[0]}." for code in self.last if code[0])
        entries = (
            f"{mark}: {', '.join(filter(None, code))}, to {self.last[code]}" for code, mark in self.letters.items()
        )
        return f"**Several versions of the code made the runs**; rows name them. {'; '.join(entries)}."


def _rows(curves: Sequence[Curve], names: Names, cells: Callable[[Pairs], Sequence[str]]) -> list[list[str]]:
    """Return one row for each strategy that has runs: shape, name and `cells`; by shape, that of the baseline first, and plain TRL first in each."""
    found = [runs for strategy in STRATEGIES if (runs := pairs(curves, strategy, BASELINE))]
    first = found[0][0][1].shape
    found.sort(key=lambda runs: (runs[0][0].shape != first, runs[0][0].shape, not STRATEGIES[runs[0][0].strategy].trl))
    return [[by(runs[0][0].shape), names.of([run for run, _ in runs]), *cells(runs)] for runs in found]


def _seeds(runs: Pairs, curves: Sequence[Curve]) -> str:
    """Return the number of seeds; says so if the baseline has more."""
    every = len(pairs(curves, BASELINE, BASELINE))
    return str(every) if len(runs) == every else f"{len(runs)} of {every}"


def _differences(runs: Pairs, curves: Sequence[Curve], control: str) -> list[str]:
    """Return the points against plain TRL of the same shape, and against the baseline."""
    run, plain = runs[0][0], plain_of(curves, runs[0][0].shape)
    base = "" if run.strategy == BASELINE else points(matched(runs, control))
    if run.strategy == plain:
        return ["", base]
    if plain == BASELINE:
        return [base, "the same"]
    own = pairs(curves, run.strategy, plain) if plain else []
    return [points(matched(own, control)) if own else "plain TRL was not run", base]


def _per_group(found: Matched) -> str:
    """Return the completions for each live group."""
    own = found.own
    ratios = [
        c / live if live else math.nan
        for c, live in zip(own["completions"].values, own["live_groups"].values, strict=True)
    ]
    return "–" if np.isnan(ratios).any() else f"{np.median(ratios):.1f}"


def _of_one_processor(runs: Pairs, shown: Callable[[Pairs], str]) -> str:
    """Return the seconds × of the runs that can be compared; says so if some cannot."""
    comparable = on_one_processor(runs)
    text = shown(comparable) if comparable else "–"
    return text if len(comparable) in (0, len(runs)) else f"{text}, of {len(comparable)} of {len(runs)}"


_FIRST = ["prompts × completions", "strategy"]
_POINTS = ["points against plain TRL of this shape", "points against the baseline"]


def equal_steps_table(curves: Sequence[Curve], names: Names) -> str:
    """Return the accuracy and costs after as many optimizer steps as the baseline made."""

    def cells(runs: Pairs) -> list[str]:
        found = matched(runs, "steps")
        costs = [mean_of(found.ratios[cost]) for cost in COSTS if cost != "seconds"]
        costs.append(_of_one_processor(runs, lambda own: mean_of(matched(own, "steps").ratios["seconds"])))
        ends = [_seeds(runs, curves), f"{found.amount.median:.0f}", accuracy(found.own["accuracy"])]
        return [*ends, *_differences(runs, curves, "steps"), *costs, _per_group(found)]

    header = [*_FIRST, "seeds", "steps", "accuracy", *_POINTS]
    return table([*header, *COSTS.values(), "completions per live group"], _rows(curves, names, cells))


def equal_completions_table(curves: Sequence[Curve], names: Names) -> str:
    """Return the accuracy where as many completions were rolled out."""

    def cells(runs: Pairs) -> list[str]:
        found = matched(runs, "completions")
        ends = [f"{found.amount.median:,.0f}", f"{found.own['steps'].median:.0f}", accuracy(found.own["accuracy"])]
        return [*ends, *_differences(runs, curves, "completions"), mean_of(found.ratios["flops"])]

    header = [*_FIRST, "completions", "steps", "accuracy", *_POINTS]
    return table([*header, COSTS["flops"]], _rows(curves, names, cells))


def trained_table(curves: Sequence[Curve], names: Names) -> str:
    """Return the accuracy on prompts that are trained on, after equal steps, and the share of them that was forgotten."""
    recorded = not any(np.isnan(curve.forgotten[-1]) for curve in curves)

    def cells(runs: Pairs) -> list[str]:
        found = matched(runs, "steps")
        trained, lost = found.own["trained"], found.own["forgotten"]
        base = Spread(
            tuple(base.at("steps", end)["trained"] for (_, base), end in zip(runs, found.amount.values, strict=True))
        )
        against = "" if runs[0][0].strategy == BASELINE else f"{100 * (trained.mean - base.mean):+.1f}"
        return [
            accuracy(trained),
            against,
            *([f"{lost.mean:.0%} ({lost.low:.0%}–{lost.high:.0%})"] if recorded else []),
        ]

    header = [*_FIRST, "accuracy", "points against the baseline", *(["forgotten"] if recorded else [])]
    return table(header, _rows(curves, names, cells))


def price_table(curves: Sequence[Curve], names: Names) -> str:
    """Say what each strategy costs to reach the baseline's final accuracy, by the share of generation in the baseline's time."""

    def costs(runs: Pairs) -> list[str]:
        seconds = _of_one_processor(runs, lambda own: ratio(cost_to_target(own, "seconds")))
        return [*(ratio(cost_to_target(runs, cost)) for cost in _PRICED), seconds]

    def cells(runs: Pairs) -> list[str]:
        steps, finals = (
            Spread(tuple(values))
            for values in zip(*((run.costs["steps"][-1], run.final) for run, _ in runs), strict=True)
        )
        return [_seeds(runs, curves), f"{steps.median:.0f}", accuracy(finals), *costs(runs)]

    rows, noise = _rows(curves, names, cells), exchanged(curves, BASELINE)
    if noise:
        title = f"{STRATEGIES[BASELINE].title}, target of another seed"
        rows.insert(1, [rows[0][0], title, f"{len(noise)} pairs", "", "", *costs(noise)])
    prices = [f"price at {name.removeprefix('price_')} %" if name in PRICES else f"{name} ×" for name in _PRICED]
    return table([*_FIRST, "seeds", "steps", "final accuracy", *prices, "seconds ×"], rows)


_LEADING, *_FURTHER = PRICES
_PRICED = [_LEADING, "rollouts", "updates", *_FURTHER]


def averaged_table(curves: Sequence[Curve], names: Names) -> str:
    """Say what each strategy costs to reach the baseline's final accuracy, on curves averaged over the seeds."""

    def cells(runs: Pairs) -> list[str]:
        both = (_LEADING, "flops")
        return [
            _seeds(runs, curves),
            *(mean_ratio(mean_cost_to_target(runs, cost), bootstrap_interval(runs, cost)) for cost in both),
        ]

    price = f"price at {_LEADING.removeprefix('price_')} % (90 % interval)"
    return table([*_FIRST, "seeds", price, "FLOPs × (90 % interval)"], _rows(curves, names, cells))


def short_table(section: Section) -> str:
    """Return the two numbers, in few columns."""
    curves = section.curves()

    def cells(runs: Pairs) -> list[str]:
        found = matched(runs, "steps")
        return [
            _seeds(runs, curves),
            "" if runs[0][0].strategy == BASELINE else points(found),
            mean_of(found.ratios["completions"]),
            mean_of(found.ratios["flops"]),
        ]

    header = [*_FIRST, "seeds", "points after equal steps", COSTS["completions"], COSTS["flops"]]
    return table(header, _rows(curves, Names([]), cells))


def tuning_table(section: Section, names: Names) -> str:
    """Return the accuracy of each batch and learning rate of the tuning, what it took, and the cheapest setting of plain TRL."""
    target, settings = section.settings
    best, rows = cheapest(settings), []
    has_baseline = math.isfinite(target)
    for setting in settings:
        run = setting.runs[0]
        counts = ("–" if math.isinf(n) else f"{n:,.0f}" for n in (setting.completions, setting.to_target))
        completions, reached = counts
        row = [
            by(run.shape),
            names.of(setting.runs),
            f"{run.rate:.1e}",
            str(len(setting.runs)),
            accuracy(setting.accuracy),
        ]
        row.append(completions)
        if has_baseline:
            at_budget = "–" if math.isnan(setting.at_budget) else f"{setting.at_budget:.3f}"
            row += [at_budget, f"**{reached}, the cheapest**" if setting is best else reached]
        rows.append(row)
    header = [*_FIRST, "learning rate", "seeds", f"accuracy after {section.steps} steps", "completions"]
    seeds = ", ".join(str(seed) for seed in sorted({result["settings"]["seed"] for result in section.tuning}))
    text = f"Validation accuracy, on seeds ({seeds}) and held-out prompts that no other table uses."
    if has_baseline:
        budget = max(s.completions for s in settings if s.runs[0].strategy == BASELINE)
        header += [f"accuracy at {budget:,.0f} completions", f"completions to {target:.3f}"]
        found = "None of them has it."
        if best is not None:
            found = f"It is **{by(best.runs[0].shape)} at {best.runs[0].rate:.1e}**."
        if section.main:
            base = next(curve for curve in section.curves() if curve.strategy == BASELINE)
            found += f" The comparison above is with {by(base.shape)} at {base.rate:.1e}."
        text += (
            f" The cheapest setting of plain TRL is the one with the fewest completions to {target:.3f}, on curves averaged over "
            f"the seeds: {100 * NEAR:g} point less than the best that any of them has for at most the baseline's completions. "
            f"{found} Smaller batches end before they have cost as much."
        )
    return f"{text}\n\n{table(header, rows)}"


def section_text(section: Section, pictures: Sequence[str]) -> str:
    """Return all tables of a section."""
    names = Names(section.results)
    parts = [f"## {section.title}", _conditions(section, names), *(f"![{section.title}]({name})" for name in pictures)]
    if section.main:
        parts += _comparison(section.curves(), names)
    if section.tuning:
        parts += ["### Batch and learning rate", tuning_table(section, names)]
    if section.tuned:
        parts += [
            "### Each strategy at its best learning rate",
            "The rate with the best validation accuracy above. The baseline is the one at its own best rate.",
            equal_steps_table(section.curves("tuned"), names),
        ]
    return "\n\n".join(parts)


def _comparison(curves: Sequence[Curve], names: Names) -> list[str]:
    noise = exchanged(curves, BASELINE)
    missed = sum(not reaches(run.accuracy, other.final).any() for run, other in noise)
    luck = "With one seed of the baseline, nobody knows how far it differs by chance."
    if noise:
        luck = (
            f"**A baseline misses another seed's final accuracy in {missed} of {len(noise)} pairs**, by chance alone."
        )
    return [
        "### After the same number of steps",
        "Where a run has made as many optimizer steps as the baseline of its seed. Differences are in points, paired by seed: "
        "mean (smallest to largest), and with how many seeds the run is ahead. Costs up to there are relative to the baseline: "
        "mean over the seeds, with the range. *Updates* are log-probs, forward and backward. *Seconds* compare runs that were "
        "made on the same processor, one at a time. A dash: not known.",
        equal_steps_table(curves, names),
        "### At the same completions",
        "Where both runs of a pair have rolled out as many completions: the lesser of what they have in all.",
        equal_completions_table(curves, names),
        "### On prompts that are trained on",
        "After the same number of steps. *Forgotten* is the share of the prompts whose accuracy has fallen by more than 0.5 "
        "from its best; tasks with few prompts record it.",
        trained_table(curves, names),
        "### Price of the baseline's final accuracy: fragile",
        f"{luck} So a run can reach this target early, late or never by luck: the tables above come first. *Rollouts ×* is "
        "what generation cost (FLOPs) until a run first reached the target, *updates ×* what log-probs, forward and backward "
        "cost, each relative to the baseline's own up to its first crossing. Where generation takes the share g of the "
        "baseline's time, the price is g · rollouts × + (1 − g) · updates ×; at 25 % that is FLOPs ×. Median over the seeds, "
        "with the range; a dash where the baseline was at its final accuracy from the start.",
        price_table(curves, names),
        "On curves averaged over the seeds: the target is the final accuracy of the averaged baseline, the interval that of "
        "a bootstrap over the seeds (none with fewer than 3).",
        averaged_table(curves, names),
    ]


def _conditions(section: Section, names: Names) -> str:
    """Say how the runs of a section were made."""
    every, steps = section.results, section.steps
    results = section.main or every
    bases = [result for result in results if result["settings"]["strategy"] == BASELINE] or results[:1]
    settings, prompts, training = bases[0]["settings"], bases[0]["prompts"], bases[0]["settings"]["training"]
    size = training["num_generations"]
    groups = training["generation_batch_size"] // size
    stretch = max(result["settings"]["stretch"] for result in results)
    others = f"go on until they have cost as many FLOPs, for at most {stretch:g} times" if stretch > 1 else "make"
    precision = "bfloat16 (of float32 weights, by autocast)" if training["bf16"] else "float32"
    share = {cost: np.mean([_share(result["curve"][-1][cost]) for result in bases]) for cost in ("seconds", "flops")}
    over = window(steps, section.every)
    smoothed = f", smoothed over the last {over} evaluations" if over > 1 else ", not smoothed"
    often = "at each step" if section.every == 1 else f"every {section.every} steps"
    dates = sorted({result["date"] for result in every})
    versions = sorted({", ".join(f"{name} {number}" for name, number in r["versions"].items()) for r in every})
    return "\n\n".join(
        [
            f"The baseline, plain TRL, makes {steps} steps of {groups} prompts × {size} completions, "
            f"{groups * steps / prompts['trained on']:.1f} passes over {prompts['trained on']:,} prompts, in **{precision}** "
            f"at learning rate {settings['learning_rate']:.1e}. Others {others} as many steps. The model has "
            f"{bases[0]['parameters'] / 1e6:.1f} M parameters. Rollouts take {share['seconds']:.0%} of the baseline's seconds "
            f"and {share['flops']:.0%} of its FLOPs.",
            f"Accuracy is that expected of completions sampled at temperature 1, computed exactly, on {prompts['held_out']:,} "
            f"held-out prompts and on {prompts['train']:,} of those trained on, {often}{smoothed}. The time "
            f"of evaluations is not counted. {_check(results)}".rstrip(),
            f"Measured on {'; '.join(sorted({_machine(result['machine']) for result in every}))}. "
            f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}. {'; or '.join(versions)}. {names.legend()}".rstrip(),
        ]
    )


def _share(costs: dict[str, float]) -> float:
    """Return the share of rollouts in a cost of a run."""
    return costs["rollout"] / costs["total"]


def _machine(values: dict[str, Any]) -> str:
    text = f"{processor(values)}, {values['cores']} cores, {values['threads']} thread(s) a run"
    if "at_once" not in values:
        return text
    return f"{text}, {values['at_once']} {'run' if values['at_once'] == 1 else 'runs'} at a time"


_FAR, _LEAST = 4, 0.01  # standard errors of a check by sampling, and accuracy


def _check(results: Sequence[dict[str, Any]]) -> str:
    """Say how far sampling is from the accuracy that it is expected to have, and in which runs it is far."""
    checks = [check for result in results for check in result["checks"]]
    if not checks:
        return ""
    apart = [
        f"{STRATEGIES[result['settings']['strategy']].title}, seed {result['settings']['seed']}: "
        f"{check['expected']:.3f}, sampled {check['mean']:.3f}"
        for result in results
        for check in result["checks"]
        if abs(check["mean"] - check["expected"]) > max(_FAR * check["standard_error"], _LEAST)
    ]
    limit, named = f"{_FAR} standard errors and {100 * _LEAST:.0f} point", "; ".join(apart)
    far = f" **In {len(apart)} it differs by more than {limit}** ({named})." if apart else ""
    difference = sum(check["mean"] - check["expected"] for check in checks) / len(checks)
    error = math.sqrt(sum(check["standard_error"] ** 2 for check in checks)) / len(checks)
    return (
        f"Checked by sampling: over {len(checks)} evaluations, sampled accuracy differs from it by {100 * difference:+.2f} ± "
        f"{100 * error:.2f} points on average.{far}"
    )
