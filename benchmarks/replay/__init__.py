"""What other selectors would have chosen from the recorded rollouts of a run, and at which cost."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lze_trl.batch import Table
from lze_trl.record import MissingTelemetryError, Run, open_run
from lze_trl.record.tables import COLUMNS
from lze_trl.seeding import keyed_rng
from lze_trl.select.selectors import Selector, choose_groups, make_selector, quota


THE_RUN = "the run"
"""Name of the run's own choice among the strategies."""


@dataclass(frozen=True)
class Rules:
    """How a run chose, apart from its selector."""

    seed: int
    selection_ratio: float
    num_iterations: int
    named_outcome: bool  # whether a reward that the user named says what is solved
    kept: int | None  # completions of a group that are trained on at most
    num_prompts: int | None  # P where the run drew further prompts until enough groups were alive

    @property
    def draws_prompts(self) -> bool:
        """Whether the run drew prompts until enough groups were alive."""
        return self.num_prompts is not None


@dataclass(frozen=True)
class Batch:
    """A recorded generation batch of P groups, in the order in which the selector of the run saw them."""

    generation: int
    groups: Table
    selected: np.ndarray  # (P,), whether the run trained on each group
    loss_tokens: np.ndarray  # (P,), tokens of each group that the loss covers


@dataclass(frozen=True)
class Choice:
    """What one strategy chose. Shares and means are NaN where there is nothing to divide by."""

    name: str  # the strategy; `"the run"` for what was trained on
    groups: int
    live_share: float
    energy: float
    pass_rate: float
    jaccard: float  # groups that both it and the run chose / groups that either chose
    random_jaccard: float  # the same, expected of a random choice of as many groups in each generation batch
    shared: float  # share of the run's choice that it also chose
    random_shared: float
    update_tokens: float  # trained on, once for every iteration over a generation batch
    update_flops: float
    of_run: float  # its tokens / the run's
    of_plain: float  # its tokens / those of plain GRPO for the same number of optimizer steps


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    run: str  # its name
    generations: int  # batches replayed
    groups: int  # in them
    live_share: float  # share of the groups with a learning signal
    selection_ratio: float  # ρ of the replayed strategies
    seed: int  # of their random numbers
    kept: (
        int | None
    )  # completions of a group trained on at most; which ones is not recorded: token counts are estimates
    choices: list[Choice]  # the run's own, then each strategy's


def replay(
    run_dir: str | Path,
    selectors: Sequence[str | Selector],
    selection_ratio: float | None = None,
    gumbel_scale: float | None = None,
    seed: int | None = None,
) -> Replay:
    """
    Run selectors over the recorded rollouts of a run, finished or not.

    Each selector sees what the run's own saw: the same groups in the same order, the same number of groups to choose, and the
    same random numbers. How its updates would have changed later rollouts is unknown.

    Args:
        run_dir (`str` or `Path`): Output directory of a training, or its `telemetry` folder.
        selectors (`Sequence[str | Selector]`): Names of `LZEGRPOConfig.selector`, or objects with a `select` method.
        selection_ratio (`float`, *optional*): ρ. Defaults to the run's.
        gumbel_scale (`float`, *optional*): Scale of the noise of `"energy"`. Defaults to the run's.
        seed (`int`, *optional*): Seed. Defaults to the run's.
    """
    with closing(open_run(run_dir)) as run:
        given = {"selection_ratio": selection_ratio, "gumbel_scale": gumbel_scale, "seed": seed}
        settings = run.meta.settings | {name: value for name, value in given.items() if value is not None}
        rules, scale = (
            rules_of(settings),
            settings.get("gumbel_scale", settings.get("selector_kwargs.gumbel_scale", 0.05)),
        )
        chosen_by: dict[str, Selector | None] = {THE_RUN: None}
        for one in selectors:
            name = one if isinstance(one, str) else type(one).__name__
            chosen_by[name] = make_selector(one, scale) if isinstance(one, str) else one
        return _replay(run, rules, chosen_by)


def rules_of(settings: dict[str, Any]) -> Rules:
    """Rules of a run, from its settings as in `meta.json`."""
    for name in ("selection_ratio", "seed"):
        if settings.get(name) is None:
            raise ValueError(f"The run has not recorded its `{name}`. Give `--{name}`.")
    if not 0 < settings["selection_ratio"] <= 1:
        raise ValueError(f"`selection_ratio` must be in (0, 1], got {settings['selection_ratio']}.")
    controller, kept = settings.get("controller", "uniform"), settings.get("controller_kwargs.kept")
    if not isinstance(kept, int):
        kept = settings["num_generations"] if controller.startswith("reinforce_ada") else None
    return Rules(
        seed=settings["seed"],
        selection_ratio=settings["selection_ratio"],
        num_iterations=settings.get("num_iterations", 1),
        named_outcome=any(settings.get(name) not in (None, "None") for name in ("pass_reward", "pass_threshold")),
        kept=kept,
        num_prompts=settings["generation_batch_size"] // settings["num_generations"]
        if controller == "dynamic"
        else None,
    )


def _replay(run: Run, rules: Rules, selectors: dict[str, Selector | None]) -> Replay:
    batches = list(read_batches(run, rules.named_outcome))
    if not batches:
        raise MissingTelemetryError(f"The run `{run.name}` has not recorded a generation batch with groups yet.")
    ledger = run.summary()["ledger"]
    plain_tokens = ledger.get("plain_tokens", math.nan) * rules.num_iterations
    per_token = _ratio(ledger.get("plain_update_flops", math.nan), plain_tokens)
    sums = {name: _chosen(batches, rules, selector) for name, selector in selectors.items()}
    run_tokens = sums[THE_RUN]["tokens"] = ledger.get("update_tokens", sums[THE_RUN]["tokens"])
    groups = sum(len(batch.groups) for batch in batches)
    return Replay(
        run=run.name,
        generations=len(run.generations()),
        groups=groups,
        live_share=_ratio(sum(int(batch.groups.alive.sum()) for batch in batches), groups),
        selection_ratio=rules.selection_ratio,
        seed=rules.seed,
        kept=rules.kept,
        choices=[_choice(name, one, run_tokens, plain_tokens, per_token) for name, one in sums.items()],
    )


def read_batches(run: Run, named_outcome: bool) -> Iterator[Batch]:
    """The generation batches of a run that have groups, as their selector saw them, in their order."""
    table = run.arrow("""SELECT * EXCLUDE rewards FROM groups
        WHERE generation IN (SELECT generation FROM generations) ORDER BY generation, position""")
    columns = {name: table[name].to_numpy() for name in table.column_names}
    columns = {name: v.astype(np.int64) if v.dtype.kind == "i" else v for name, v in columns.items()}
    groups, generations = groups_of(columns, named_outcome), columns["generation"]
    for rows in np.split(np.arange(len(generations)), np.flatnonzero(np.diff(generations)) + 1):
        if len(rows):
            further = (columns[name][rows] for name in ("selected", "loss_tokens"))
            yield Batch(int(generations[rows[0]]), groups.take(rows), *further)


def groups_of(columns: dict[str, np.ndarray], named_outcome: bool) -> Table:
    """Groups from columns of `groups`; `named_outcome` if the user named a reward."""
    alive = ~columns["dead"]
    solved = (columns["pass_rate"] == 1.0) & (named_outcome | ~alive)
    names = {column: name for name, column in COLUMNS.items()}
    groups = Table(**{names.get(column, column): values for column, values in columns.items()})
    rest = {"hopeless": ~alive & ~solved, "forgotten": groups.replayed & ~solved}
    scored = ~np.isnan(groups.pass_rates)
    return groups.with_columns(alive=alive, solved=solved, **{name: values & scored for name, values in rest.items()})


def _chosen(batches: list[Batch], rules: Rules, selector: Selector | None) -> Counter:
    """Sums over what a selector chooses as the trainer does; without one, over what the run chose."""
    sums: Counter = Counter()
    for batch in batches:
        groups, chosen = batch.groups, batch.selected
        if selector is not None:
            k = quota(rules.selection_ratio, rules.num_prompts or len(groups))
            make_rng = partial(keyed_rng, rules.seed, batch.generation, "selection")
            chosen = choose_groups(selector, groups, batch.loss_tokens, k, rules.draws_prompts, make_rng)
        rows = groups.sizes if rules.kept is None else np.minimum(groups.sizes, rules.kept)
        tokens = rows * groups.prompt_tokens + groups.completion_tokens * (rows / groups.sizes)
        candidates = int(groups.alive.sum()) if rules.draws_prompts else len(groups)
        count, run = int(chosen.sum()), int(batch.selected.sum())
        scored = groups.pass_rates[chosen & ~np.isnan(groups.pass_rates)]
        sums.update(
            groups=count,
            live=int((groups.alive & chosen).sum()),
            scored=len(scored),
            energy=float(groups.energies[chosen].sum()),
            pass_rate=float(scored.sum()),
            tokens=float(tokens[chosen].sum()) * rules.num_iterations,
            either=count + run,
            run=run,
            common=int((chosen & batch.selected).sum()),
            random_common=count * run / max(candidates, 1),
        )
    return sums


def _choice(name: str, sums: Counter, run_tokens: float, plain_tokens: float, per_token: float) -> Choice:
    return Choice(
        name=name,
        groups=sums["groups"],
        live_share=_ratio(sums["live"], sums["groups"]),
        energy=_ratio(sums["energy"], sums["groups"]),
        pass_rate=_ratio(sums["pass_rate"], sums["scored"]),
        jaccard=_ratio(sums["common"], sums["either"] - sums["common"]),
        random_jaccard=_ratio(sums["random_common"], sums["either"] - sums["random_common"]),
        shared=_ratio(sums["common"], sums["run"]),
        random_shared=_ratio(sums["random_common"], sums["run"]),
        update_tokens=sums["tokens"],
        update_flops=sums["tokens"] * per_token,
        of_run=_ratio(sums["tokens"], run_tokens),
        of_plain=_ratio(sums["tokens"], plain_tokens),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
