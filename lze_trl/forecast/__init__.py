"""Forecasts: what a GRPO training would waste, why, and what each strategy would cost. The core imports this when someone asks."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from ..record.causes import CAUSES
from ..record.numbers import number
from .prices import DRIFT, GENERATION, LUCK, Price, chosen, prices
from .sample import GroupSample
from .shares import Interval, dead_share, mean, to_gain


SIZES = (4, 8, 16)  # of groups, for which dead groups are forecast
_LARGEST, _MANY = 64, 0.5  # group size that is forecast while so large a share of the groups of smaller ones is dead


@dataclass(frozen=True)
class Forecast:
    """A forecast. `print` shows it, and `to_dict` has all its numbers, with 80 % intervals."""

    sample: GroupSample  # what it rests on
    dead: dict[int, Interval]  # share of dead groups by group size
    causes: dict[str, Interval]  # share of all groups that are dead by each cause
    accuracy: Interval  # mean outcome of a completion
    gain: Interval | None  # mean outcome of the best of `best_of` completions, less that; `None`: not recorded
    best_of: int
    step: dict[str, float]  # of plain GRPO: `rows`, `length`; seconds of `rollout` and `update`, bytes of `memory`
    prices: list[Price]
    chosen: Price | None  # `None` if nothing is to be saved

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as JSON can hold them."""
        own = asdict(replace(self, sample=None))  # type: ignore[arg-type]  # its rows are no numbers of the forecast
        return own | {"sample": self.sample.source, "groups": len(self.sample), "unit": self.sample.unit}

    def __str__(self) -> str:
        step, sample = self.step, self.sample
        lines = [f"{sample.source}: {len(sample):,} groups of {sample.size} completions. In brackets 80 % intervals."]
        lines += ["", "Dead groups", *(f"  G = {size:<3} {_percent(share)}" for size, share in self.dead.items())]
        lines += [f"  because  {_percent(share)} {CAUSES[cause]}" for cause, share in self.causes.items()]
        constant = {name: "None" if np.isnan(value) else f"{value:g}" for name, value in sample.constant.items()}
        lines += [f"  the reward `{name}` was {value} for every completion" for name, value in constant.items()]
        enough = next((size for size, share in self.dead.items() if size > sample.size and share.value < _MANY), None)
        if enough and self.dead[sample.size].value >= _MANY:
            lines.append(f"  With `num_generations: {enough}`, less than half of the groups would be dead.")
        more = "was not recorded" if self.gain is None else f"has {self.gain:+.2f} more"
        gain = f"mean outcome {self.accuracy:.2f}; the best of {self.best_of} {more}"
        size = f"{number(step['rows'])} completions, {number(step['length'])} {sample.unit}"
        lines += ["", "To gain", f"  {gain}", "", "A step of plain GRPO", f"  {size}"]
        if "rollout" in step:
            share = step["rollout"] / (step["rollout"] + step["update"])
            seconds = f"rollouts {step['rollout']:.2f} s, update {step['update']:.2f} s"
            lines.append(f"  {seconds}: R : U = {share:.0%} : {1 - share:.0%}")
        if "memory" in step:
            lines.append(f"  peak memory of the largest micro-batch {step['memory'] / 2**30:.1f} GiB")
        last = "seconds ×" if "rollout" in step else f"time × at {GENERATION:.0%} rollouts"
        rows = [[p.name, f"{p.rollouts:.2f}", f"{p.updates:.2f}", f"{p.seconds:.2f}"] for p in self.prices]
        table = pd.DataFrame(rows, columns=["strategy", "rollouts ×", "updates ×", last]).to_string(index=False)
        choice = self.choice
        if self.chosen is not None:
            choice = "\n  ".join(["Choose", *self.chosen.settings.splitlines()])
        lines += ["", "Price to plain GRPO's accuracy, × plain GRPO", table, "", choice]
        return "\n".join([*lines, "", "Assumed", *(f"  {line}" for line in self.assumed)])

    @property
    def choice(self) -> str:
        """The strategy to choose, in a sentence."""
        if self.chosen is None:
            return "Do not bother: no strategy surely saves a tenth. `exact`, the default, has plain GRPO's weights and costs no more."
        settings, time = self.chosen.settings.replace("\n", "`, `"), self.chosen.seconds
        span = f"{time.value:.2f} × [{time.low:.2f}, {time.high:.2f}]"
        return f"Choose `{settings}`: it takes {span} the time of plain GRPO to the same accuracy."

    @property
    def assumed(self) -> list[str]:
        """What the forecast assumes, in sentences."""
        sample = self.sample
        horizon, how = sample.horizon, "with the graded groups as they are, without smoothing"
        if sample.binary:
            how = "with pass rates as they are now"
        return [
            "A live group teaches the same, whichever strategy has drawn it.",
            f"While the model learns, live shares change by a factor of e^±{DRIFT}, and a seed's luck is e^±{LUCK} (one standard deviation each).",
            f"The training: {horizon.batches:,} generation batches of {horizon.per_batch:,} prompts, {horizon.prompts:,} different ones.",
            "Group sizes below the one that was drawn: all subsets of each group. Above it: a beta-binomial fit.",
            f"The gate: its own rule, simulated {how}."
            if sample.completions_known
            else "The recording lacks the rewards of single completions: nothing is said of other group sizes, and of the gate. Forecast the recipe, "
            "or call `trainer.forecast()`, to price them.",
            f"Seconds are not known: generation takes {GENERATION:.0%} of plain GRPO's time."
            if sample.costs is None
            else "Seconds of rollouts follow their tokens; two rounds on a server that is not full save less. An update is forward and "
            "backward passes.",
        ]


def _percent(share: Interval) -> str:
    return f"{100 * share.value:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def forecast(sample: GroupSample, seed: int = 0) -> Forecast:
    """Forecast by a sample. Raises a `ValueError` if it has fewer than two groups of two completions."""
    if len(sample) < 2 or sample.size < 2:
        told = f"got {len(sample)} groups, the smallest of {sample.size}. Give more prompts."
        raise ValueError(f"A forecast needs two groups of two completions or more, {told}")
    rng, batch = np.random.default_rng(seed), sample.batch
    of_size = {size: dead_share(sample, size, rng) for size in sorted({*SIZES, sample.size})}
    accuracy, gain, best_of = to_gain(sample, 8, rng)
    while (last := of_size[size := max(of_size)]) is not None and last.value >= _MANY and size < _LARGEST:
        of_size[2 * size] = dead_share(sample, 2 * size, rng)
    found, rows = prices(sample, rng), sample.horizon.per_batch * sample.size
    step = {"rows": rows, "length": rows * float((batch.prompt_tokens + batch.completion_tokens).mean())}
    if sample.costs is not None:
        step |= {"rollout": rows * sample.costs.rollout, "update": rows * sample.costs.update}
        step |= {"memory": sample.costs.memory} if sample.costs.memory else {}
    causes = {cause: mean(sample.causes == cause, rng) for cause in CAUSES if (sample.causes == cause).any()}
    sizes = {size: estimate for size, estimate in sorted(of_size.items()) if estimate is not None}
    causes = dict(sorted(causes.items(), key=lambda item: -item[1].value))
    return Forecast(sample, sizes, causes, accuracy, gain, best_of, step, found, chosen(found))
