"""Replaying a recorded run with other selectors."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..record import MissingTelemetryError, Run, open_run
from ..record.generation import groups_of
from ..select.selectors import Selector
from .choosing import Choice, Chooser, RecordedBatch, ReplayError, Rules, load_selector, ratio_of, rules_of
from .foresight import Foreseer, Foresight


THE_RUN = "the run"
"""Name of the run's own choice among the strategies."""

_ROWS = 100_000  # groups that are read at a time


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    run: str  # its name
    generations: int  # batches replayed
    groups: int  # in them
    live_share: float  # share of the groups with a learning signal
    selection_ratio: float  # ρ of the replayed strategies, after warm-up and ramp
    seed: int  # of their random numbers
    choices: list[Choice]  # the run's own, then each strategy's
    foresight: Foresight  # how well dead groups were foreseen
    by_pass_rates: Foresight  # the same without log-probabilities
    notes: list[str]  # what the records lack for an exact replay

    def write_json(self, path: str | Path):
        """Write all numbers to a file; NaN becomes `null`."""
        content = json.loads(json.dumps(asdict(self)), parse_constant=lambda name: None)
        Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def replay(
    run_dir: str | Path,
    selectors: Sequence[str | Selector],
    selection_ratio: float | None = None,
    gumbel_scale: float | None = None,
    seed: int | None = None,
) -> Replay:
    """
    Run selectors over the recorded rollouts of a run.

    Each selector sees what the run's own saw: the same groups in the same order, the same number of groups to choose,
    warm-up and ramp included, and the same random numbers. What its updates would have changed in later rollouts is
    unknown. Memory does not grow with the length of the run, except for a few bytes a prompt and a generation batch.

    Args:
        run_dir (`str` or `Path`):
            Output directory of a training, finished or not, or its `telemetry` folder.
        selectors (`Sequence[str | Selector]`):
            Names of `LZEGRPOConfig.selector`, import paths `module:object`, or objects with a `select` method.
        selection_ratio (`float`, *optional*):
            ρ. Defaults to the run's.
        gumbel_scale (`float`, *optional*):
            Scale of the noise of `"energy"`. Defaults to the run's.
        seed (`int`, *optional*):
            Seed. Defaults to the run's.

    Raises:
        TelemetryError: If nothing has been recorded, or it cannot be read.
        ReplayError: If a selector or a number is not allowed.
    """
    with closing(open_run(run_dir)) as run:
        rules = rules_of(run.meta.settings, selection_ratio=selection_ratio, gumbel_scale=gumbel_scale, seed=seed)
        return _replay(run, rules, _choosers(selectors, rules))


def _choosers(selectors: Sequence[str | Selector], rules: Rules) -> dict[str, Chooser]:
    choosers = {THE_RUN: Chooser(rules)}
    for selector in selectors:
        if isinstance(selector, str):
            name, loaded = selector, load_selector(selector, rules.gumbel_scale)
        else:
            name, loaded = type(selector).__name__, selector
        if name in choosers:
            raise ReplayError(f"Every strategy needs a name of its own, got {name!r} twice. Leave one of them out.")
        choosers[name] = Chooser(rules, loaded)
    return choosers


def _replay(run: Run, rules: Rules, choosers: dict[str, Chooser]) -> Replay:
    last, ledger = _end(run)
    foreseers, own = (Foreseer(), Foreseer(logprobs=False)), choosers[THE_RUN]
    generations = groups = live = 0
    for batch in _read_batches(run, rules, last):
        generations += 1
        groups += len(batch.groups)
        live += int(batch.groups.alive.sum())
        for chooser in choosers.values():
            chooser.see(batch)
        for foreseer in foreseers:
            foreseer.see(batch.groups, batch.scored)
    run_tokens = own.sums["tokens"] = ledger.get("update_tokens", own.sums["tokens"])
    plain_tokens = ledger.get("plain_tokens", math.nan) * rules.num_iterations
    per_token = ratio_of(ledger.get("plain_update_flops", math.nan), plain_tokens)
    return Replay(
        run=run.name,
        generations=generations,
        groups=groups,
        live_share=ratio_of(live, groups),
        selection_ratio=rules.selection_ratio,
        seed=rules.seed,
        choices=[s.choice(name, run_tokens, plain_tokens, per_token) for name, s in choosers.items()],
        foresight=foreseers[0].foresight(),
        by_pass_rates=foreseers[1].foresight(),
        notes=_notes(run, rules),
    )


def _end(run: Run) -> tuple[int, dict[str, float]]:
    """Last generation batch of which everything is recorded, and the ledger then."""
    # A running run writes its tables one after the other
    rows = run.arrow("""SELECT generation, ledger FROM generations
        WHERE groups = 0 OR generation <= (SELECT max(generation) FROM groups) ORDER BY generation DESC LIMIT 1""").to_pylist()
    if not rows:
        raise MissingTelemetryError(
            f"The run `{run.name}` has not recorded a generation batch yet. Wait until its first one is scored."
        )
    return rows[0]["generation"], dict(rows[0]["ledger"])


def _read_batches(run: Run, rules: Rules, last: int) -> Iterator[RecordedBatch]:
    """Generation batches of a run in their order, the last one to read being `last`; they are read piece by piece."""
    counts = run.sql(
        "SELECT generation, count(*) AS groups FROM groups WHERE generation <= ? GROUP BY generation ORDER BY generation",
        [last],
    )
    query = """SELECT * EXCLUDE rewards FROM groups WHERE generation BETWEEN ? AND ?
        ORDER BY generation, groups.position"""
    for _, piece in counts.groupby(counts.groups.cumsum() // _ROWS):
        table = run.arrow(query, [int(piece.generation.min()), int(piece.generation.max())])
        columns = {name: table[name].to_numpy() for name in table.column_names}
        columns = {name: v.astype(np.int64) if v.dtype.kind == "i" else v for name, v in columns.items()}
        groups = groups_of(columns, rules.named_outcome)
        ends = piece.groups.cumsum()
        for generation, begin, end in zip(piece.generation, ends - piece.groups, ends, strict=True):
            further = (columns[name][begin:end] for name in ("selected", "scored", "loss_tokens"))
            yield RecordedBatch(int(generation), groups.take(np.arange(begin, end)), *further)


def _notes(run: Run, rules: Rules) -> list[str]:
    notes = []
    if rules.kept is not None:
        notes.append(
            f"At most {rules.kept} completions of a group are trained on. Which ones is not recorded: the tokens of the "
            "strategies are estimates, by the mean length of the group."
        )
    if run.damaged:
        notes.append(f"Left out, because they are cut off: {', '.join(run.damaged)}.")
    return notes
