"""What a run shows: a progress bar on a terminal, one readable line at each log, and a summary at the end."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from .evaluations import first_and_last, read_results, rows_of, text_table
from .ledger import PLAIN, SKIPPED, TAUGHT_NOTHING, against_plain, taught_nothing, time_of_plain, times
from .numbers import count


logger = logging.getLogger(__name__)

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


class ProgressBar(ProgressCallback):
    """The progress bar of transformers, without the dictionary of some 50 metrics at each log."""

    def on_log(self, *args: Any, **kwargs: Any):
        # Differs from transformers: the lines are those of `RunSummary`
        pass


class RunSummary(TrainerCallback):
    """
    Shows one readable line at each log and, at the end of the training, a summary and where the report is.

    All metrics still go to the trackers of `report_to`. Only the main process prints. `savings` returns the totals of the
    run, `flush` writes what is missing in its telemetry, and `write_report` the report of a run's folder. `advice` returns the
    sentences that are due, see [`~lze_trl.record.advice.Advice.lines`]: each is shown once, and all at the end.
    """

    def __init__(
        self,
        savings: Callable[[], dict[str, float]],
        flush: Callable[[], None],
        accuracy_metric: str,
        write_report: Callable[[Path], Path],
        advice: Callable[[bool], dict[str, str]] = lambda ended: {},
    ):
        self.savings = savings
        self.write_report = write_report
        self.flush = flush
        self.accuracy_metric = accuracy_metric
        self.advice = advice
        self._advised: set[str] = set()
        self.ends_with_training = True
        """Whether the run ends with the training: a recipe's does not, it goes on to evaluate and save the model."""

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs: Any):
        line = log_line(state.global_step, logs or {})
        if line and state.is_world_process_zero:
            tqdm.write(line)  # above the progress bar, if there is one
            advice = self.advice(False)
            for cause in advice:
                if cause not in self._advised:
                    tqdm.write(f"advice: {advice[cause]}")
            self._advised |= advice.keys()
            sys.stdout.flush()  # a log file is read while it grows

    def on_train_end(self, args, state, control, **kwargs: Any):
        if self.ends_with_training and state.is_world_process_zero:
            self.show(args, state, self.report(args))

    def report(self, args: Any) -> dict[str, Path | str]:
        """Write report and picture of the run so far, if it has telemetry; label and path of each file."""
        if not args.telemetry:
            return {}
        self.flush()
        run_dir = Path(args.output_dir)
        files: dict[str, Path | str] = {"telemetry": run_dir / "telemetry"}
        try:
            report = self.write_report(run_dir)
        except ImportError as error:
            logger.info("No report was written (%s). Run `pip install -e '.[app]'` in the checkout of lze_trl.", error)
        except Exception:  # nothing that goes wrong here may cost what comes next
            logger.exception("No report was written. Try again with `lze-trl report %s`.", run_dir)
        else:
            files |= {"report": report, "picture": report.with_name("summary.png")}
        return files

    def show(self, args: Any, state: TrainerState, files: dict[str, Path | str]):
        """Print the tables of the run, and where its files are."""
        accuracy = held_out_accuracy(state, self.accuracy_metric)
        console = Console(highlight=False)
        savings = self.savings()
        for heading, table in summary_tables(savings, accuracy).items():
            console.print(heading, style="bold")
            console.print(table)
        if taught_nothing(savings):
            console.print(TAUGHT_NOTHING, style="bold")
        for line in self.advice(True).values():
            console.print(f"advice: {line}", soft_wrap=True, markup=False)
        if evaluations := first_and_last(read_results(args.output_dir)):
            console.print("Evaluations", style="bold")
            console.print(text_table(*rows_of(evaluations)), markup=False, soft_wrap=True)
        for label, path in files.items():
            console.print(f"{label + ':':<11}{path}", soft_wrap=True, markup=False)


def replace_printers(callbacks: CallbackHandler, summary: RunSummary, progress_bar: bool):
    """
    Show readable lines and a summary instead of what transformers prints, and a progress bar on a terminal. Callbacks that a
    user has derived from those of transformers stay.
    """
    stock = (PrinterCallback, ProgressCallback)
    callbacks.callbacks = [callback for callback in callbacks.callbacks if type(callback) not in stock]
    own_bar = any(isinstance(callback, ProgressCallback) for callback in callbacks.callbacks)
    if progress_bar and not own_bar and sys.stdout.isatty():
        callbacks.add_callback(ProgressBar())
    callbacks.add_callback(summary)


def held_out_accuracy(state: TrainerState, metric: str) -> dict[str, float | None]:
    """Held-out accuracy `before` and `after` the training so far; `None` if not evaluated, or nothing could be scored."""
    logged = {logs["step"]: logs[metric] for logs in state.log_history if metric in logs}
    return {"before": logged.get(0), "after": logged.get(state.global_step)}


def summary_tables(savings: dict[str, float], accuracy: dict[str, float | None]) -> dict[str, Table]:
    """Tables of what a run did and cost, by their headings, from the totals and accuracies of a run."""
    rollouts = _table("", "groups", "completions")
    for label, name in (("rolled out", "rolled_out"), ("trained on", "trained")):
        rollouts.add_row(label, *(f"{savings[f'{unit}_{name}']:,.0f}" for unit in ("groups", "rows")))
    pairs = ((savings[f"{unit}_trained"], savings[f"{unit}_rolled_out"]) for unit in ("groups", "rows"))
    rollouts.add_row("trained on / rolled out", *(f"{part / whole:.1%}" if whole else "–" for part, whole in pairs))
    rollouts.add_row(SKIPPED, f"{savings['visits_skipped']:,.0f}", "")

    cost = _table("", "tokens", "seconds", "FLOPs", "plain GRPO", "ratio")
    for work in against_plain(savings):
        is_total = work.name == "total"
        flops = (count(work.flops), count(work.plain_flops), work.times)
        tokens = "" if is_total else count(work.tokens)
        cost.add_row(work.name, tokens, f"{work.seconds:.1f}", *flops, style="bold" if is_total else None)
        if is_total and (plain := time_of_plain(savings)) is not None:
            cost.add_row("time", "", f"{work.seconds:.1f}", "", f"{plain[1]:.1f} s", times(work.seconds / plain[1]))

    tables = {"Rollouts": rollouts}
    if cost.rows:
        tables[f"Cost, against {PLAIN}"] = cost
    before, after = accuracy["before"], accuracy["after"]
    if before is not None or after is not None:
        shown = [f"{value:.3f}" if value is not None else "–" for value in (before, after)]
        gain = f"{after - before:+.3f}" if before is not None and after is not None else "–"
        tables["Sampled accuracy on held-out prompts"] = table = _table("before", "after", "gain")
        table.add_row(*shown, gain)
    return tables


def _table(*columns: str) -> Table:
    """A table of numbers, with labels in the first column if it has no heading."""
    headers = (Column(name, justify="right" if name else "left") for name in columns)
    return Table(*headers, box=SIMPLE, pad_edge=False)
