"""Replaying a recorded run with other selectors."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..record import MissingTelemetryError, Run, open_run
from ..select.selectors import Selector
from .choosing import Choice, Chooser, load_selector, ratio_of
from .foresight import Foreseer, Foresight
from .history import ReplayError, Rules, read_batches, rules_of


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

    Returns:
        [`Replay`]: What each would have chosen, and at which cost.

    Raises:
        MissingTelemetryError: If nothing has been recorded.
        TelemetryError: If the records cannot be read.
        ReplayError: If a selector or a number is not allowed.
    """
    run = open_run(run_dir)
    try:
        settings = run.meta.settings
        rules = rules_of(settings, selection_ratio, seed)
        scale = settings.get("gumbel_scale", 0.05) if gumbel_scale is None else gumbel_scale
        return _replay(run, rules, _choosers(selectors, rules, scale))
    finally:
        run.close()


def _replay(run: Run, rules: Rules, choosers: dict[str, Chooser]) -> Replay:
    last, ledger = _end(run)
    ids = run.arrow("SELECT DISTINCT prompt_id FROM groups WHERE generation <= ? ORDER BY prompt_id", [last])
    foreseer, own = Foreseer(ids["prompt_id"].to_numpy(), rules.memory), Chooser(rules)
    generations = groups = live = 0
    for batch in read_batches(run, rules, last):
        generations += 1
        groups += len(batch.groups)
        live += int(batch.groups.alive.sum())
        for chooser in (own, *choosers.values()):
            chooser.see(batch)
        foreseer.see(batch.groups, batch.scored)
    run_tokens = own.sums["tokens"] = ledger.get("update_tokens", own.sums["tokens"])
    plain_tokens = ledger.get("plain_tokens", math.nan) * rules.iterations
    per_token = ratio_of(ledger.get("plain_update_flops", math.nan), plain_tokens)
    choosers = {THE_RUN: own} | choosers
    return Replay(
        run=run.name,
        generations=generations,
        groups=groups,
        live_share=ratio_of(live, groups),
        selection_ratio=rules.ratio,
        seed=rules.seed,
        choices=[s.choice(name, run_tokens, plain_tokens, per_token) for name, s in choosers.items()],
        foresight=foreseer.foresight(),
        notes=_notes(run, rules),
    )


def _choosers(selectors: Sequence[str | Selector], rules: Rules, gumbel_scale: float) -> dict[str, Chooser]:
    if not 0 <= gumbel_scale < math.inf:
        raise ReplayError(f"`gumbel_scale` must be at least 0, got {gumbel_scale}. Use 0 to rank without noise.")
    choosers = {}
    for selector in selectors:
        name = selector if isinstance(selector, str) else type(selector).__name__
        loaded = load_selector(selector, gumbel_scale) if isinstance(selector, str) else selector
        if name == THE_RUN or name in choosers:
            raise ReplayError(f"Every strategy needs a name of its own, got {name!r} twice. Leave one of them out.")
        choosers[name] = Chooser(rules, loaded)
    return choosers


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


def _notes(run: Run, rules: Rules) -> list[str]:
    notes = []
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
