"""What a run shows on a terminal: a progress bar, one readable line at each log, and a summary at the end."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments


# (metric, label, format) of the log line, in this order; a metric that was not logged is left out
_SHOWN = (
    ("eval_reward", "held-out reward", "{:.3f}"),
    ("reward", "reward", "{:.3f}"),
    ("lze/pass_rate", "pass rate", "{:.3f}"),
    ("lze/energy", "energy", "{:.3f}"),
    ("lze/selected_share", "trained", "{:.0%} of groups"),
    ("lze/dead_share", "dead", "{:.0%}"),
    ("lze/pruned_prompts", "pruned", "{:.0f}"),
    ("completions/mean_length", "length", "{:.0f}"),
    ("loss", "loss", "{:.4f}"),
    ("learning_rate", "lr", "{:.1e}"),
)


def log_line(step: int, logs: dict[str, Any]) -> str:
    """One line for the metrics of a log, or an empty one if none of those shown is among them."""
    shown = [f"{label} {form.format(float(logs[name]))}" for name, label, form in _SHOWN if logs.get(name) is not None]
    return f"step {step:>5}  " + "  ".join(shown) if shown else ""


class ReadableProgress(ProgressCallback):
    """Progress bar with one line at each log; all metrics still go to the trackers."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        # Differs from transformers: the dictionary of some 40 metrics is not printed
        if self.training_bar is not None:
            line = log_line(state.global_step, logs)
            if line:
                self.training_bar.write(line)


def count(number: float) -> str:
    """A count with a thousands unit: 1234 → `1.23 k`."""
    for limit, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            divisor = 1e3 if unit == "k" else limit
            return f"{number / divisor:.3g} {unit}"
    return f"{number:,.0f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def summary_tables(savings: dict[str, float], accuracy: dict[str, float | None]) -> dict[str, Table]:
    """
    Tables of what a run did and cost, by their headings.

    Args:
        savings (`dict[str, float]`): Totals of the run, see [`~lze_trl.ledger.Ledger.summary`].
        accuracy (`dict[str, float | None]`): Held-out accuracy `before` and `after`; `None` where not measured.
    """
    tables = {
        "Rollouts": _rollout_table(savings),
        "Cost, against full data over the same passes": _cost_table(savings),
    }
    before, after = accuracy["before"], accuracy["after"]
    if before is not None or after is not None:
        table = _table("before", "after", "gain", first_justify="right")
        shown = [f"{value:.3f}" if value is not None else "–" for value in (before, after)]
        table.add_row(*shown, f"{after - before:+.3f}" if before is not None and after is not None else "–")
        tables["Sampled accuracy on held-out prompts"] = table
    return tables


def _table(*columns: str, first_justify: str = "left") -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify=first_justify if i == 0 else "right")
    return table


def _rollout_table(savings: dict[str, float]) -> Table:
    table = _table("", "groups", "completions")
    for label, name in (("rolled out", "rolled_out"), ("trained on", "trained"), ("pruned", "pruned")):
        table.add_row(label, f"{savings[f'groups_{name}']:,.0f}", f"{savings[f'rows_{name}']:,.0f}")
    shares = (_share(savings[f"{unit}_trained"], savings[f"{unit}_rolled_out"]) for unit in ("groups", "rows"))
    table.add_row("trained on / rolled out", *shares)
    return table


def _cost_table(savings: dict[str, float]) -> Table:
    table = _table("", "tokens", "full data", "FLOPs", "full data", "share", "seconds")
    full_tokens = {
        "rollout": savings["full_rollout_tokens"],
        "logprob": savings["full_rollout_tokens"] * savings["logprob_passes"],
        "update": savings["full_update_tokens"],
    }
    total = full_total = 0.0
    for label, name in (("rollout", "rollout"), ("log-probabilities", "logprob"), ("update", "update")):
        flops, full = savings[f"{name}_flops"], savings[f"full_{name}_flops"]
        total, full_total = total + flops, full_total + full
        tokens = (count(savings[f"{name}_tokens"]), count(full_tokens[name]))
        table.add_row(
            label, *tokens, count(flops), count(full), _share(flops, full), f"{savings[f'{name}_seconds']:.1f}"
        )
    table.add_row("together", "", "", count(total), count(full_total), _share(total, full_total), "", style="bold")
    return table


def show_summary(savings: dict[str, float], accuracy: dict[str, float | None], files: dict[str, Path | str]):
    """Print the tables of a run, and where its files are."""
    console = Console(highlight=False)
    for heading, table in summary_tables(savings, accuracy).items():
        console.print(heading, style="bold")
        console.print(table)
    for label, path in files.items():
        console.print(f"{label + ':':<11}{path}", soft_wrap=True, markup=False)
