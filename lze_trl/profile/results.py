"""What the groups of a profile say: a dataset, the memory that a training begins with, a picture, and a summary in words."""

import copy
import io
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xxhash
from datasets import Dataset, Features, Value, concatenate_datasets
from scipy.stats import beta

from .. import checkpoint
from ..batch import Batch, places
from ..files import write_atomically
from ..forecast import forecast
from ..forecast.sample import GroupSample, Horizon
from ..forecast.shares import OF_NORMAL, Interval, posteriors
from ..memory.identity import ID_COLUMN
from ..memory.state import PromptState
from ..record.causes import causes
from ..record.numbers import number, percent
from . import folder as store


NUMBERS = ("rewards", "scores", "signals", "logprobs", "rewards_per_func", "prompt_tokens", "completion_tokens", "cut_off")  # fmt: skip
"""Row columns of a batch that are written for each completion; the last three are integers."""


def write_results(trainer: Any, folder: Path, keep: tuple[float, float] | None) -> str:
    """Write all that a folder says whose prompts were all rolled out. Returns the summary."""
    groups, args, state = store.read_groups(folder), trainer.args, copy.deepcopy(trainer.prompt_state)
    batch, per_batch = batch_of(groups, copy.deepcopy(state)), args.generation_batch_size // args.num_generations
    remember(batch, state, per_batch)
    parts = {"prompts": state, "foresight": state.foresight.model, "gate": state.threshold}
    checkpoint.save(folder, checkpoint.STATE_NAME, parts, {"global_step": 0})
    sample = groups_of(batch, per_batch)
    found, results = forecast(sample), results_of(batch, sample.causes)
    dataset, rates = with_results(trainer.train_dataset, results), results["pass_rate"].to_numpy()
    never, always = (percent(float((rates == rate).mean())) for rate in (0.0, 1.0))
    tokens, seconds = (batch.prompt_tokens + batch.completion_tokens).sum(), sum(group["seconds"] for group in groups)
    counts = f"{len(groups):,} prompts, {batch.num_rows:,} completions, {number(tokens)} tokens, {number(seconds)} s"
    lines = [f"{counts}. {never} of the prompts never pass, {always} always."]
    tables = {"data": dataset}
    if keep is not None:
        kept = (rates >= keep[0]) & (rates <= keep[1])
        if kept.any():  # `datasets` reads no file without rows
            tables["kept"] = dataset.select(np.flatnonzero(kept))
        lines += filtered(sample, rates, kept, keep, args.num_generations)
    configs = []
    for place, rows in tables.items():
        (path := folder / place / store.DATA).parent.mkdir(exist_ok=True)
        rows.to_parquet(content := io.BytesIO())
        write_atomically(path, content.getvalue())
        # `datasets` takes a folder of the same name with the same card for this one: what differs is the description
        hash, name = xxhash.xxh64(content.getvalue()).hexdigest(), "default" if place == "data" else place
        configs.append(f'- {{config_name: {name}, data_files: {place}/{store.DATA}, description: "{hash}"}}')
    if "kept" not in tables:  # that of another filter
        shutil.rmtree(folder / "kept", ignore_errors=True)
    with suppress(ImportError):  # without `lze_trl[app]` there is none
        write_atomically(folder / "profile.png", picture(results, found.dead))
    text = "\n".join([*lines, "", str(found)])
    card = _CARD.format(configs="\n".join(configs), columns=", ".join(dataset.column_names), text=text)
    write_atomically(folder / "README.md", card.encode())
    return text


def batch_of(groups: list[dict[str, Any]], state: PromptState) -> Batch:
    """All groups as one batch, with outcomes by the range of all scores."""
    columns = {name: np.concatenate([np.array(one[name], dtype=np.float64) for one in groups]) for name in NUMBERS}
    columns |= {name: columns[name].astype(np.int64) for name in NUMBERS[-3:]}
    state.update_range(columns["scores"])
    group = np.repeat(np.arange(len(groups)), [len(one["scores"]) for one in groups])
    ids = np.array([one["prompt_id"] for one in groups], dtype=np.int64)
    return Batch.of(ids, group, state.range.outcomes(columns["scores"]), **columns)


def groups_of(batch: Batch, per_batch: int) -> GroupSample:
    """A batch as the sample of a forecast for one pass over its prompts."""
    count = batch.num_groups
    return GroupSample(batch, causes(batch), "The profile", Horizon(count, per_batch, max(1, count // per_batch)))


def remember(batch: Batch, state: PromptState, per_batch: int):
    """Enter the groups of a batch into a memory, as visits of generation batches of `per_batch` prompts."""
    for start in range(0, batch.num_groups, per_batch):
        rows = slice(*np.searchsorted(batch.group, (start, start + per_batch)))
        own: dict[str, Any] = {name: column[rows] for name, column in vars(batch.rows).items()}
        state.update_range(own["scores"])
        own |= {"group": own["group"] - start, "outcomes": state.range.outcomes(own["scores"])}
        part = Batch.of(batch.prompt_ids[start : start + per_batch], **own)
        # A gate learns from groups of the size of the training, each of which was drawn for certain
        scored = np.bincount(part.group, ~np.isnan(part.scores), minlength=part.num_groups) > 0
        first = part.take(places(part.group) < state.group_size)
        state.threshold.fit(state.prompts(part.prompt_ids), first, scored.astype(np.float64))
        state.score_and_store(part)


def results_of(batch: Batch, why: np.ndarray) -> pd.DataFrame:
    """A row for each prompt. Standard deviations have Bessel's correction, as TRL's."""
    names = {"outcomes": "pass_rate", "rewards": "mean_reward", "completion_tokens": "mean_length"}
    rows = pd.DataFrame({name: getattr(batch, name) for name in (*names, "cut_off")}).groupby(batch.group)
    means = rows.mean().rename(columns=names | {"cut_off": "truncated_share"}).assign(reward_std=rows["rewards"].std())
    return means.assign(num_completions=batch.sizes, cause=[cause or None for cause in why])


def with_results(dataset: Dataset, results: pd.DataFrame) -> Dataset:
    """A dataset with its own columns as they are, its prompt ids and the results, whose names have a prefix if it has one of them."""
    dataset = dataset.with_format(None)
    has_ids = "prompt_id" in dataset.column_names
    dataset = dataset.remove_columns(ID_COLUMN) if has_ids else dataset.rename_column(ID_COLUMN, "prompt_id")
    prefix = store.PREFIX if {*results} & {*dataset.column_names} else ""
    if both := {f"{prefix}{name}" for name in results} & {*dataset.column_names}:
        raise store.ProfileError(f"The dataset has columns {sorted(both)}, as those of a profile. Rename them.")
    features = dict.fromkeys(results, Value("float64")) | {"num_completions": Value("int64"), "cause": Value("string")}
    values = {name: [None if pd.isna(one) else one for one in results[name].tolist()] for name in results}
    own = Dataset.from_dict(values, Features(features)).rename_columns({name: f"{prefix}{name}" for name in results})
    return concatenate_datasets([dataset, own], axis=1)


def filtered(
    sample: GroupSample, rates: np.ndarray, kept: np.ndarray, keep: tuple[float, float], size: int
) -> list[str]:
    """What a filter drops, how much of it by chance, and how many completions it saves a training with groups of `size`."""
    counts = [int(found.sum()) for found in (kept, rates < keep[0], rates > keep[1], np.isnan(rates))]
    words = "Kept are pass rates from {:g} to {:g}: {:,} prompts. {:,} are lower, {:,} higher, {:,} have none."
    lines, gone = [words.format(*keep, *counts)], ~kept & ~np.isnan(rates)
    if sample.binary and gone.any():
        low, high = (beta.cdf(bound, *posteriors(sample))[gone] for bound in keep)
        wrong, reach = (high - low).sum(), OF_NORMAL * float(((high - low) * (1 - high + low)).sum()) ** 0.5
        told = f"{wrong:.1f} [{max(0.0, wrong - reach):.1f}, {wrong + reach:.1f}]"
        lines += [f"{told} of those that go have a pass rate within, and fell outside by chance."]
    less = f"{(~kept).sum() * size:,} completions fewer, {percent(float((~kept).mean()))}"
    return [*lines, f"A pass over the kept ones with G = {size} draws {less}."]


def picture(results: pd.DataFrame, dead: dict[int, Interval]) -> bytes:
    """Histogram of pass rates, shares of dead groups, and lengths by pass rate, as PNG."""
    from matplotlib.figure import Figure  # without pyplot, whose backend may be the user's

    figure, rates = Figure(figsize=(11.0, 3.2), dpi=110, layout="constrained"), results["pass_rate"]
    histogram, shares, lengths = figure.subplots(1, 3)
    histogram.hist(rates.dropna(), bins=np.linspace(0.0, 1.0, 21))
    histogram.set(title="Prompts by pass rate", xlabel="pass rate", ylabel="prompts")
    values, ends = [s.value for s in dead.values()], np.array([[s.low, s.high] for s in dead.values()]).T
    shares.bar([f"G = {size}" for size in dead], values, yerr=np.abs(ends - values))
    shares.set(title="Share of dead groups", ylim=(0.0, 1.0))
    lengths.scatter(rates, results["mean_length"], s=6, alpha=0.4)
    lengths.set(title="Length by pass rate", xlabel="pass rate", ylabel="mean tokens")
    figure.savefig(content := io.BytesIO(), format="png")
    return content.getvalue()


_CARD = """---
tags: [lze, grpo]
configs:
{configs}
---

# Pass rates of prompts

Every prompt of a training set, rolled out as GRPO would. Columns: {columns}. `manifest.json` says by what.

![Pass rates, dead groups, lengths](profile.png)

```text
{text}
```
"""
