"""Replaying a recorded run with other selectors."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..record import MissingTelemetryError, Run, open_run
from ..record.ledger import with_plain
from ..select.selectors import Selector
from .foresight import Foreseer, Foresight
from .records import has_recorded, read_batches
from .rules import (
    ReplayError,
    Rules,
    load_selector,
    rules_of,
)
from .strategies import (
    Choice,
    Strategy,
    Tally,
    ratio_of,
    trained_tokens,
)


THE_RUN = "the run"
"""Name of the run's own choice among the strategies."""


@dataclass(frozen=True)
class Replay:
    """
    Result of a replay.

    Attributes:
        run (`str`): Name of the run.
        generations (`int`): Generation batches replayed.
        groups (`int`): Groups in them.
        live_share (`float`): Share of them with a learning signal.
        selection_ratio (`float`): ρ of the replayed strategies, after warm-up and ramp.
        seed (`int`): Seed of their random numbers.
        choices (`list[Choice]`): The run's own choice, then each strategy's.
        foresight ([`Foresight`]): How well dead groups were foreseen.
        notes (`list[str]`): What the records lack for an exact replay.
    """

    run: str
    generations: int
    groups: int
    live_share: float
    selection_ratio: float
    seed: int
    choices: list[Choice]
    foresight: Foresight
    notes: list[str]

    def write_json(self, path: str | Path):
        """Write all numbers to a file; NaN becomes `null`."""
        content = json.dumps(_without_nan(asdict(self)), indent=2, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(content + "\n", encoding="utf-8")


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

    Returns:
        [`Replay`]: What each would have chosen, and at which cost.

    Raises:
        MissingTelemetryError: If nothing has been recorded.
        TelemetryError: If the records cannot be read.
        ReplayError: If a selector or a number is not allowed.
    """
    run = open_run(run_dir)
    try:
        return _replay(run, selectors, selection_ratio, gumbel_scale, seed)
    finally:
        run.close()


def _replay(
    run: Run,
    selectors: Sequence[str | Selector],
    selection_ratio: float | None,
    gumbel_scale: float | None,
    seed: int | None,
) -> Replay:
    settings = run.meta.settings
    rules = rules_of(settings, selection_ratio, seed)
    strategies = _strategies(
        selectors, rules, settings.get("gumbel_scale", 0.05) if gumbel_scale is None else gumbel_scale
    )
    last, ledger = _end(run)
    prompt_ids = run.arrow("SELECT DISTINCT prompt_id FROM groups WHERE generation <= ? ORDER BY prompt_id", [last])[
        "prompt_id"
    ].to_numpy()
    foreseer, own = Foreseer(prompt_ids, rules.memory), Tally(rules)
    generations = groups = live = 0
    plain_tokens = 0.0
    for batch in read_batches(run, rules, last):
        generations += 1
        groups += len(batch.groups)
        live += int(batch.groups.alive.sum())
        plain_tokens += float(trained_tokens(batch.groups).sum()) * rules.iterations
        own.add(batch.groups, batch.selected, batch)
        for strategy in strategies.values():
            strategy.see(batch)
        foreseer.see(batch.groups, batch.scored)
    own.tokens = ledger.get("update_tokens", own.tokens)
    if "plain_tokens" in ledger:  # else what was rolled out is all that is known
        plain_tokens = ledger["plain_tokens"] * rules.iterations
    per_token = ratio_of(ledger.get("plain_update_flops", math.nan), plain_tokens)
    tallies = {THE_RUN: own} | {name: strategy.tally for name, strategy in strategies.items()}
    return Replay(
        run=run.name,
        generations=generations,
        groups=groups,
        live_share=ratio_of(live, groups),
        selection_ratio=rules.ratio,
        seed=rules.seed,
        choices=[tally.choice(name, own.tokens, plain_tokens, per_token) for name, tally in tallies.items()],
        foresight=foreseer.foresight(),
        notes=_notes(run, rules, last),
    )


def _strategies(selectors: Sequence[str | Selector], rules: Rules, gumbel_scale: float) -> dict[str, Strategy]:
    if not 0 <= gumbel_scale < math.inf:
        raise ReplayError(f"`gumbel_scale` must be at least 0, got {gumbel_scale}. Use 0 to rank without noise.")
    strategies = {}
    for selector in selectors:
        name = selector if isinstance(selector, str) else type(selector).__name__
        loaded = load_selector(selector, gumbel_scale) if isinstance(selector, str) else selector
        if name == THE_RUN or name in strategies:
            raise ReplayError(f"Every strategy needs a name of its own, got {name!r} twice. Leave one of them out.")
        strategies[name] = Strategy(loaded, rules)
    return strategies


def _end(run: Run) -> tuple[int, dict[str, float]]:
    """Last generation batch of which everything is recorded, and the ledger then."""
    # A running run writes its tables one after the other
    row = run.arrow("""SELECT generation, ledger FROM generations
        WHERE groups = 0 OR generation <= (SELECT max(generation) FROM groups) ORDER BY generation DESC LIMIT 1""").to_pylist()
    if not row:
        raise MissingTelemetryError(
            f"The run `{run.name}` has not recorded a generation batch yet. Wait until its first one is scored."
        )
    last = row[0]["generation"]
    return last, with_plain(dict(row[0]["ledger"] or []), last + 1, run.meta.settings.get("generation_batch_size"))


def _notes(run: Run, rules: Rules, last: int) -> list[str]:
    notes = []
    if not has_recorded("position", run, last):
        notes.append(
            "The places of the groups in their batch are not recorded. Noise and ties fall on other groups than in the "
            "run, so that even its own selector does not choose all that it chose."
        )
    if not has_recorded("loss_tokens", run, last):
        notes.append(
            "Numbers are recorded in 32 bits, by an earlier version. Groups whose ranks differ by less may change places."
        )
    if rules.kept is not None:
        notes.append(
            f"At most {rules.kept} completions of a group are trained on. Which ones is not recorded: the tokens of the "
            "strategies are estimates, by the mean length of the group."
        )
    if rules.num_prompts is not None:
        notes.append(
            "Live groups that an update has no room for wait for the next one. Which of them the run took is not "
            "recorded: its groups, and all overlap, are those of each batch itself. Tokens are those of all groups."
        )
    if run.damaged:
        notes.append(f"Left out, because they are cut off: {', '.join(run.damaged)}.")
    return notes


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
