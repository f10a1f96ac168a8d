"""The pages as HTML. Every text that comes from a run is escaped: it is shown, never interpreted."""

from html import escape
from typing import Any

import numpy as np
import pandas as pd

from ..record import Run, TelemetryError
from ..record.curves import curve, energy_heat_map, reward_curves
from ..record.ledger import (
    PLAIN,
    against_plain,
    headline,
    skipped_visits,
)
from ..record.reader import parse_columns
from .charts import (
    Series,
    heat_map,
    line_chart,
    number,
    percent,
)
from .runs import RunBook, seed_groups


PAGE_SIZE = 25

STATE_LABELS = {
    "frontier": ("◐", "frontier", "passes some of the time: here the model learns"),
    "solved": ("●", "solved", "passed every time at its last visit"),
    "hopeless": ("○", "hopeless", "failed every time at its last visit"),
    "pruned": ("✂", "pruned", "stayed solved, so it gets no rollouts except re-checks"),
    "forgotten": ("↺", "forgotten", "was pruned, failed its re-check, and is not solved again yet"),
    "unscored": ("?", "unscored", "no completion could be scored at its last visit"),
}

AXES = {"step": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "time (s)"}
METRICS = {
    "pass_rate": "pass rate of all rollouts",
    "reward_mean": "reward",
    "energy_mean": "mean energy",
    "dead": "share of dead groups",
    "pruned": "share of pruned prompts",
}
_SHARES = {"pass_rate", "dead", "pruned"}
_HISTORY_POINTS = 400


def problem(error: TelemetryError) -> str:
    """What is shown where there is nothing else to show."""
    return f'<div class="lze-problem" role="status"><h3>Nothing to show</h3><p>{escape(str(error))}</p></div>'


def overview(run: Run) -> str:
    """Where the run stands: numbers, curves, the energy distribution, and what was saved."""
    points, summary = curve(run), run.summary()
    if points.empty:
        return problem(TelemetryError("The run has started, and its first batch is not scored yet."))
    steps = points["step"].to_numpy()
    rewards = reward_curves(run)
    heat_steps, shares = energy_heat_map(run)
    lines = {name: points[name].to_numpy(dtype=float) for name in points}
    charts = [
        line_chart(
            "Accuracy",
            [
                Series("all rollouts", steps, lines["pass_rate"]),
                Series("trained on", steps, lines["selected_pass_rate"]),
            ],
            "step",
            y_range=(0.0, 1.0),
            as_percent=True,
        ),
        line_chart(
            "Reward",
            [
                Series("total", steps, lines["reward_mean"]),
                # A single reward is the total
                *(
                    Series(name, steps, rewards[name].to_numpy(dtype=float))
                    for name in rewards
                    if len(rewards.columns) > 1
                ),
            ],
            "step",
        ),
        heat_map("Energy of the groups", heat_steps, shares, run.meta.energy_max, "step"),
        line_chart(
            "Shares",
            [
                Series("selected", steps, lines["selected"]),
                Series("dead", steps, lines["dead"]),
                Series("replayed", steps, lines["replayed"]),
                Series("pruned prompts", steps, lines["pruned"]),
            ],
            "step",
            y_range=(0.0, 1.0),
            as_percent=True,
        ),
    ]
    return f"{_tiles(points, summary)}{_damage(run)}<div class='lze-grid2'>{''.join(charts)}</div>{savings(summary['ledger'])}"


def _tiles(points: pd.DataFrame, summary: dict[str, Any]) -> str:
    prompts = summary["prompts"]
    times = {work.name: work.times for work in against_plain(summary["ledger"])}
    # Of a batch of which pruning left nothing, there is none
    pass_rates = points["pass_rate"].dropna()
    first, last = (pass_rates.iloc[0], pass_rates.iloc[-1]) if len(pass_rates) else (None, None)
    tiles = [
        ("step", f"{summary['steps']:,}", f"pass {summary['pass_index']} over the data"),
        ("accuracy", percent(last), f"{percent(first)} at the start"),
        ("prompts seen", f"{sum(prompts.values()):,}", f"{prompts['frontier']:,} on the frontier"),
        ("solved or pruned", f"{prompts['solved'] + prompts['pruned']:,}", f"{prompts['forgotten']:,} forgotten"),
        ("groups trained on", percent(summary["selected"] / max(summary["groups"], 1)), f"of {summary['groups']:,}"),
        (
            "FLOPs of plain GRPO",
            times.get("total", "–"),
            f"rollouts {times.get('rollouts', '–')}, updates {times.get('updates', '–')}",
        ),
    ]
    return "<div class='lze-tiles'>{}</div>".format(
        "".join(
            f'<div class="lze-tile" data-tile="{name}"><span>{name}</span><strong>{escape(value)}</strong>'
            f"<small>{escape(note)}</small></div>"
            for name, value, note in tiles
        )
    )


def _damage(run: Run) -> str:
    if not run.damaged:
        return ""
    names = ", ".join(escape(name) for name in run.damaged)
    return f'<p class="lze-note">Left out, because cut off or damaged: {names}</p>'


def savings(totals: dict[str, float]) -> str:
    """Table of the work done and of plain GRPO's, and the visits that pruning kept out of the passes."""
    works = against_plain(totals)
    if not works:
        return f"<p class='lze-note'>{headline(totals)}</p>"
    rows = "".join(
        f"<tr><th scope='row'>{work.name}</th><td>{'–' if work.name == 'total' else number(work.tokens)}</td>"
        f"<td>{number(work.seconds)}</td><td>{number(work.flops)}</td><td>{number(work.plain_flops)}</td>"
        f"<td>{_bar(work.ratio if work.plain_flops else 0.0)}</td><td>{work.times}</td></tr>"
        for work in works
    )
    return (
        f"<figure class='lze-figure'><figcaption><strong>Cost, against {PLAIN}</strong></figcaption>"
        f"<p class='lze-note'>{headline(totals)}</p><div class='lze-scroll'><table class='lze-table'><thead><tr>"
        "<th>work</th><th>tokens</th><th>seconds</th><th>FLOPs</th><th>plain GRPO</th><th>share</th><th>ratio</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div><p class='lze-note'>{skipped_visits(totals)}</p></figure>"
    )


def _bar(share: float) -> str:
    return f'<span class="lze-bar"><i style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></span>'


def prompt_table(run: Run, state: str, search: str, sort: str, page: int, chosen: str) -> tuple[str, int]:
    """
    One page of the prompts and the number of pages.

    Args:
        run ([`Run`]): The run.
        state (`str`): State to show, `"all"` for every one.
        search (`str`): Text to look for.
        sort (`str`): Column to sort by, with a leading minus for the largest first.
        page (`int`): Page, counted from 0.
        chosen (`str`): Id of the prompt that is open.
    """
    counts = run.prompt_counts(search)
    found = sum(counts.values()) if state == "all" else counts[state]
    pages = max(1, -(-found // PAGE_SIZE))
    page = min(max(page, 0), pages - 1)
    frame = run.prompts(
        state=None if state == "all" else state,
        search=search,
        sort=sort.lstrip("-"),
        descending=sort.startswith("-"),
        limit=PAGE_SIZE,
        offset=page * PAGE_SIZE,
    )
    chips = "".join(
        f'<span class="lze-chip lze-s-{name}" title="{escape(about)}">{sign} {label} <b>{counts[name]:,}</b></span>'
        for name, (sign, label, about) in STATE_LABELS.items()
        if counts[name] or name != "unscored"
    )
    if frame.empty:
        rows = '<tr><td colspan="6" class="lze-empty">No prompt matches. Clear the search or choose another state.</td></tr>'
    else:
        rows = "".join(_prompt_row(row, chosen, run.meta.energy_max) for row in frame.to_dict("records"))
    return (
        f'<div class="lze-chips" role="status">{chips}</div><div class="lze-scroll"><table class="lze-table lze-prompts">'
        "<thead><tr><th>prompt</th><th>state</th><th>energy</th><th>pass rate</th><th>first</th><th>visits</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div>"
        f'<p class="lze-note">{found:,} prompts, page {page + 1:,} of {pages:,}</p>'
    ), pages


def _prompt_row(row: dict[str, Any], chosen: str, energy_max: float) -> str:
    id = escape(str(row["prompt_id"]))
    text = row["text"] if isinstance(row["text"], str) else f"prompt {id}"
    current = ' aria-current="true"' if id == chosen else ""
    return (
        f'<tr{current}><td><button type="button" class="lze-open" data-prompt="{id}">{escape(text[:300])}</button></td>'
        f"<td>{_state(row['state'])}</td><td>{number(row['energy'])}{_bar(row['energy'] / energy_max)}</td>"
        f"<td>{percent(row['pass_rate'])}</td><td>{percent(row['first_pass_rate'])}</td>"
        f"<td>{escape(str(row['visits']))}</td></tr>"
    )


def _state(state: str) -> str:
    sign, label, about = STATE_LABELS[state]
    return f'<span class="lze-chip lze-s-{state}" title="{escape(about)}">{sign} {label}</span>'


def prompt_detail(run: Run, chosen: str) -> str:
    """History of one prompt as a plot, and its latest completions."""
    if not chosen:
        return '<p class="lze-empty">Choose a prompt to see its history.</p>'
    prompt_id = parse_prompt_id(chosen)
    frame = run.prompts(prompt_id=prompt_id) if prompt_id is not None else pd.DataFrame()
    if frame.empty:
        return '<p class="lze-empty">This run has no such prompt.</p>'
    row = frame.iloc[0]
    history = run.groups(prompt_id).tail(_HISTORY_POINTS)
    steps = history["step"].to_numpy()
    mark = len(history) <= 40
    chart = line_chart(
        "History",
        [
            Series("pass rate", steps, history["pass_rate"].to_numpy(dtype=float), points=mark),
            Series("average before", steps, history["ema"].to_numpy(dtype=float)),
            Series("energy", steps, history["energy"].to_numpy(dtype=float), points=mark),
        ],
        "step",
        y_range=(0.0, 0.4 * np.ceil(max(1.0, run.meta.energy_max) / 0.4)),
        height=180,
    )
    facts = {
        **{name: value for name, value in parse_columns(row["columns"]).items() if name != "prompt_id"},
        "visits": row["visits"],
        "trained on": row["times_selected"],
        "re-checks": row["rechecks"],
        "difficulty D": number(row["difficulty"]),
        "uncertainty u": number(row["uncertainty"]),
        "momentum m": number(row["momentum"]),
        "prompt id": prompt_id,
    }
    items = "".join(
        f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items() if v is not None
    )
    text = row["text"] if isinstance(row["text"], str) else "The text of this prompt is not recorded."
    return (
        f'<div class="lze-detail"><h3>{_state(row["state"])} Prompt</h3><pre class="lze-text">{escape(text)}</pre>'
        f'<dl class="lze-facts">{items}</dl>{chart}{_completions(run, prompt_id)}</div>'
    )


def parse_prompt_id(text: str) -> int | None:
    """A prompt id from an address, `None` if it is none."""
    try:
        value = int(text)
    except ValueError:
        return None
    return value if -(2**63) <= value < 2**63 else None


def _completions(run: Run, prompt_id: int) -> str:
    frame = run.completions(prompt_id)
    if frame.empty:
        kept = run.meta.completions
        return f'<p class="lze-note">No completion of this prompt is recorded (telemetry_completions="{escape(kept)}").</p>'
    cards = []
    for row in frame.to_dict("records"):
        passed = row["outcome"] >= 0.5 if row["outcome"] == row["outcome"] else None
        sign = {True: "✓ pass", False: "✗ fail", None: "? unscored"}[passed]
        rewards = ", ".join(
            f"{escape(name)} {number(value)}"
            for name, value in zip(run.meta.reward_labels, row["rewards"], strict=False)
        )
        kind = {True: "lze-pass", False: "lze-fail", None: ""}[passed]
        cards.append(
            f'<li class="lze-completion {kind}"><header><b>{sign}</b> reward {number(row["reward"])} '
            f"<small>{rewards} · {escape(str(row['tokens']))} tokens</small></header>"
            f'<pre class="lze-text">{escape(row["completion"])}</pre></li>'
        )
    step = int(frame["step"].iloc[0])
    return f'<h3>Completions at step {step}</h3><ul class="lze-completions">{"".join(cards)}</ul>'


def compare(book: RunBook, ids: list[str], axis: str, metric: str) -> str:
    """Runs side by side; those that differ in the seed alone as one line with a band."""
    runs, problems = {}, []
    for id in ids:
        try:
            runs[id] = book.open(id)
        except TelemetryError as error:
            problems.append(f'<p class="lze-note"><b>{escape(id)}</b>: {escape(str(error))}</p>')
    if not runs:
        return "".join(problems) or '<p class="lze-empty">Choose the runs to compare.</p>'
    series = []
    for name, members in seed_groups(runs).items():
        curves = [curve(run) for run in members]
        curves = [points for points in curves if not points.empty]
        if curves:
            series.append(_seed_series(name, curves, axis, metric))
    chart = line_chart(
        METRICS[metric][0].upper() + METRICS[metric][1:],
        series,
        AXES[axis],
        as_percent=metric in _SHARES,
        height=320,
    )
    return f"{''.join(problems)}{chart}{_comparison_table(runs)}"


def _seed_series(name: str, curves: list[pd.DataFrame], axis: str, metric: str) -> Series:
    if len(curves) == 1:
        return Series(name, curves[0][axis].to_numpy(dtype=float), curves[0][metric].to_numpy(dtype=float))
    starts = [points[axis].iloc[0] for points in curves]
    ends = [points[axis].iloc[-1] for points in curves]
    # Only where every seed has values: a mean over fewer seeds would jump at the end of each
    grid = np.linspace(max(starts), max(min(ends), max(starts)), 200)
    values = np.stack([np.interp(grid, points[axis], points[metric]) for points in curves])  # (seeds, 200)
    return Series(name, grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _comparison_table(runs: dict[str, Run]) -> str:
    rows = []
    for id, run in runs.items():
        summary, settings = run.summary(), run.meta.settings
        points = curve(run)
        times = {work.name: work.times for work in against_plain(summary["ledger"])}
        cells = [
            settings.get("selector", "–"),
            settings.get("selection_ratio", "–"),
            settings.get("seed", "–"),
            f"{summary['steps']:,}",
            percent(points["pass_rate"].iloc[-1]) if len(points) else "–",
            percent(summary["selected"] / max(summary["groups"], 1)),
            *(times.get(name, "–") for name in ("rollouts", "updates", "total")),
        ]
        rows.append(
            f"<tr><th scope='row'>{escape(id)}</th>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
        )
    head = ("run", "selector", "ρ", "seed", "step", "accuracy", "trained on", "rollouts", "updates", "total")
    return (
        f"<div class='lze-scroll'><table class='lze-table'><thead><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>"
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"<p class='lze-note'>Rollouts, updates and total: FLOPs, of {PLAIN}.</p>"
    )
