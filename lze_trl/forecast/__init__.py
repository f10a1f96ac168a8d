"""
Forecasts: what a GRPO training would waste, why, and what each strategy would cost, before it is run or from what was recorded.

Not imported by the trainer until someone asks.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..record.causes import CAUSES
from ..record.evaluations import text_table
from ..record.numbers import count
from .prices import DRIFT, GENERATION, Price, chosen, prices
from .sample import Sample
from .shares import Estimate, dead_share, mean, to_gain


__all__ = ["Estimate", "Forecast", "Price", "Sample", "forecast"]

SIZES = (4, 8, 16)
"""Group sizes for which dead groups are forecast."""


@dataclass(frozen=True)
class Forecast:
    """
    A forecast. `print` shows it; `to_dict` has all its numbers.

    Attributes:
        source (`str`): What it rests on.
        groups, group_size (`int`): Groups that were looked at, and their completions.
        dead (`dict[int, Estimate]`): Share of dead groups by group size.
        causes (`dict[str, Estimate]`): Share of all groups that are dead by each cause that occurs.
        constant (`dict[str, float]`): Reward functions that never differed, with their value.
        accuracy, gain (`Estimate`): Mean outcome of a completion; that of the best of `best_of` less it.
        best_of (`int`): Of how many completions the best is.
        step (`dict[str, float]`): A step of plain GRPO: its completions, tokens or characters, and, where known, seconds of rollouts and
            updates, and bytes of memory.
        prices (`list[Price]`): Of the strategies.
        chosen (`Price`, *optional*): The strategy to use; `None` if nothing is to be saved.
        assumed (`list[str]`): What the numbers take for granted.
    """

    source: str
    groups: int
    group_size: int
    dead: dict[int, Estimate]
    causes: dict[str, Estimate]
    constant: dict[str, float]
    accuracy: Estimate
    gain: Estimate
    best_of: int
    step: dict[str, float]
    prices: list[Price]
    chosen: Price | None
    assumed: list[str] = field(default_factory=list)
    unit: str = "tokens"

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as JSON can hold them."""
        return asdict(self)

    def __str__(self) -> str:
        sections = (self._dead(), self._gain(), self._step(), self._prices(), self._choice(), self._assumed())
        return "\n".join(line for lines in sections for line in lines)

    def _dead(self) -> list[str]:
        lines = [
            f"{self.source}: {self.groups:,} groups of {self.group_size} completions. In brackets 80 % intervals."
        ]
        lines += ["", "Dead groups"]
        lines += [f"  G = {size:<3} {_percent(estimate)}" for size, estimate in self.dead.items()]
        lines += [f"  because  {_percent(share)} {CAUSES[cause]}" for cause, share in self.causes.items()]
        for name, value in self.constant.items():
            was = "None" if np.isnan(value) else f"{value:g}"
            lines.append(f"  the reward `{name}` was {was} for every completion")
        return lines

    def _gain(self) -> list[str]:
        return [
            "",
            "To gain",
            f"  mean outcome of a completion {self.accuracy:.2f}; the best of {self.best_of} has {self.gain:+.2f} more",
        ]

    def _step(self) -> list[str]:
        step = self.step
        lines = [
            "",
            "A step of plain GRPO",
            f"  {count(step['rows'])} completions, {count(step['tokens'])} {self.unit}",
        ]
        if "rollout" in step:
            share = step["rollout"] / (step["rollout"] + step["update"])
            lines.append(
                f"  rollouts {step['rollout']:.2f} s, update {step['update']:.2f} s: R : U = {share:.0%} : {1 - share:.0%}"
            )
        if "memory" in step:
            lines.append(f"  peak memory of the largest micro-batch {step['memory'] / 2**30:.1f} GiB")
        return lines

    def _prices(self) -> list[str]:
        last = "seconds ×" if "rollout" in self.step else f"time × at {GENERATION:.0%} rollouts"
        heading = ["strategy", "rollouts ×", "updates ×", f"{self.unit} ×", last]
        rows = [
            [price.name, *(f"{e:.2f}" for e in (price.rollouts, price.updates, price.tokens, price.seconds))]
            for price in self.prices
        ]
        return ["", "Price to plain GRPO's accuracy, × plain GRPO", text_table(heading, rows).rstrip()]

    def _choice(self) -> list[str]:
        if self.chosen is None:
            return [
                "",
                "Do not bother: no strategy surely saves a tenth. `exact`, the default, gives plain GRPO's weights and costs no more.",
            ]
        return ["", "Choose", f"  {self.chosen.settings}"]

    def _assumed(self) -> list[str]:
        return ["", "Assumed", *(f"  {line}" for line in self.assumed)]


def _percent(share: Estimate) -> str:
    return f"{100 * share.value:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def forecast(sample: Sample, seed: int = 0) -> Forecast:
    """The forecast of a sample. Raises a `ValueError` if it has fewer than two groups of two completions."""
    if len(sample) < 2 or sample.size < 2:
        raise ValueError(
            f"A forecast needs two groups of two completions or more, got {len(sample)} groups, the smallest of {sample.size}. "
            "Give more prompts."
        )
    rng, batch = np.random.default_rng(seed), sample.batch
    of_size = {size: dead_share(sample, size, rng) for size in sorted({*SIZES, sample.size})}
    accuracy, gain, best_of = to_gain(sample, 8, rng)
    found = prices(sample, rng)
    rows = sample.horizon.per_batch * sample.size
    step: dict[str, float] = {
        "rows": rows,
        "tokens": rows * float((batch.prompt_tokens + batch.completion_tokens).mean()),
    }
    if sample.costs is not None:
        step |= {"rollout": rows * sample.costs.rollout, "update": rows * sample.costs.update}
        if sample.costs.memory is not None:
            step["memory"] = sample.costs.memory
    causes = {cause: mean(sample.causes == cause, rng) for cause in CAUSES if (sample.causes == cause).any()}
    return Forecast(
        source=sample.source,
        groups=len(sample),
        group_size=sample.size,
        dead={size: estimate for size, estimate in of_size.items() if estimate is not None},
        causes=dict(sorted(causes.items(), key=lambda item: -item[1].value)),
        constant=sample.constant,
        accuracy=accuracy,
        gain=gain,
        best_of=best_of,
        step=step,
        prices=found,
        chosen=chosen(found),
        assumed=_assumed(sample),
        unit=sample.unit,
    )


def _assumed(sample: Sample) -> list[str]:
    horizon = sample.horizon
    lines = [
        "A live group teaches the same, whichever strategy has drawn it.",
        f"While the model learns, the live share changes by a factor of e^±{DRIFT} (one standard deviation): widened intervals.",
        f"The training: {horizon.batches:,} generation batches of {horizon.per_batch:,} prompts, {horizon.prompts:,} different ones.",
        "Group sizes above the one that was drawn: a beta-binomial fit. Below it: all subsets of the group.",
    ]
    if not sample.settled:
        lines.append(
            "The recording lacks what single completions got: nothing is said of other group sizes, and of the gate."
        )
    else:
        lines.append(
            "The gate: its own rule, simulated with pass rates as they are now"
            if sample.binary
            else "The gate: its own rule, simulated with the groups as they are, without smoothing: graded rewards"
        )
    if sample.costs is None:
        lines.append(f"Seconds are not known: generation takes {GENERATION:.0%} of plain GRPO's time.")
    else:
        lines.append(
            "Seconds of rollouts follow their tokens: two rounds of the gate on a server that is not full save less. An update is "
            "forward and backward passes."
        )
    return lines
