"""What a run shows: a progress bar on a terminal, one readable line at each log, and a summary at the end."""

import logging
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from .cards import cards, saved
from .curves import value_tables
from .evaluations import results_table
from .numbers import PACED, fixed, pace
from .reader import open_run
from .schema import TelemetryError


logger = logging.getLogger(__name__)

# (metric, label, format) of the log line, in this order; a metric that was not logged is left out
_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("eval_reward", "held-out reward", "{:.3f}".format),
    ("reward", "reward", "{:.3f}".format),
    ("lze/pass_rate", "pass rate", "{:.3f}".format),
    ("lze/energy", "energy", "{:.3f}".format),
    ("lze/selected_share", "trained", "{:.0%} of groups".format),
    ("lze/wasted_share", "wasted", "{:.0%}".format),
    ("lze/total_vs_plain", "saved", lambda ratio: f"{1 - ratio:z.0%}"),
    ("lze/pruned_prompts", "pruned", "{:.0f}".format),
    ("completions/mean_length", "length", "{:.0f}".format),
    ("loss", "loss", "{:.4f}".format),
    ("learning_rate", "lr", "{:.1e}".format),
)


class ProgressBar(ProgressCallback):
    """The progress bar of transformers, without the dictionary of some 50 metrics at each log."""

    def on_log(self, *args: Any, **kwargs: Any):
        pass  # differs from transformers: the lines are those of `RunSummary`


@dataclass(eq=False)
class RunSummary(TrainerCallback):
    """
    Shows one readable line at each log and, at the end of the training, a summary and where the report is.

    All metrics still go to the trackers of `report_to`. Only the main process prints. `advice` returns the sentences that are due, see
    [`~lze_trl.record.advice.Advice.lines`]: each is shown once, and all at the end.
    """

    savings: Callable[[], dict[str, float]]  # totals of the run
    flush: Callable[[], None]  # writes what is missing in its telemetry
    held_out: dict[str, str]  # see [`~lze_trl.record.curves.held_out_metrics`]
    write_report: Callable[[Path], Path]  # of a run's folder
    advice: Callable[[bool], dict[str, str]]
    without: tuple[str, ...] = ()  # metrics that say nothing under this strategy
    ends_with_training: bool = True  # a recipe's run goes on to evaluate and save the model
    _advised: set[str] = field(default_factory=set)
    _seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PACED))

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs: Any):
        others = [(metric, name, "{:.3f}".format) for metric, name in self.held_out.items() if metric != "eval_reward"]
        shown = (_SHOWN[0], *others, *_SHOWN[1:])
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        logged = {name: number for name, number in numbers.items() if name not in self.without}
        known = [f"{label} {form(logged[name])}" for name, label, form in shown if name in logged]
        if logged.keys() & {"reward", "eval_reward"} and state.is_world_process_zero:  # the last log has only totals
            if "loss" in logged:
                self._seen.append((state.global_step, time.time()))
                if each := pace([*self._seen]):
                    left = tqdm.format_interval((state.max_steps - state.global_step) * each)
                    known.append(f"{each:.3g} s a step  {left} left")
            _write("  ".join([f"step {state.global_step:>5}", *known]))
            for cause, sentence in self.advice(False).items():
                if cause not in self._advised:
                    _write(f"advice: {sentence}")
                    self._advised.add(cause)

    def on_train_end(self, args, state, control, **kwargs: Any):
        if self.ends_with_training and state.is_world_process_zero:
            self.show(args, state, self.report(args))

    def report(self, args: Any) -> dict[str, Path | str]:
        """Write the report of the run so far, if it has telemetry. Returns label and path of each file."""
        if not args.telemetry:
            return {}
        self.flush()
        run_dir = Path(args.output_dir)
        files: dict[str, Path | str] = {"telemetry": run_dir / "telemetry"}
        try:
            files["report"] = self.write_report(run_dir)
        except Exception as error:  # nothing that goes wrong here may cost what comes next
            again = f"It needs lze_trl[app]; try again with `lze-trl report {run_dir}`."
            logger.warning("No report was written: %r. %s", error, again)
        return files

    def show(self, args: Any, state: TrainerState, files: dict[str, Path | str]):
        """Print what the run learned, wasted and saved, its evaluations, and where its files are."""
        answers, by_value = [saved(self.savings())], []
        if args.telemetry:
            # That it could not be written was said then
            with suppress(TelemetryError, OSError), closing(open_run(args.output_dir)) as run:
                answers = cards(run) or answers
                for column, rows in (value_tables(run) if args.report_by else {}).items():
                    by_value += [f"By {column}", rows.to_string(index=False, float_format=fixed, na_rep="–")]
        lines = [str(answer) for answer in answers]
        if len(answers) == 1:  # no telemetry says what was learned
            for metric, name in self.held_out.items():
                known = {when: value for when, value in held_out_accuracy(state, metric).items() if value is not None}
                shown = ", ".join(f"{value:.3f} {when} the training" for when, value in known.items())
                lines += [f"{name.capitalize()} (sampled): {shown}"] if shown else []
        lines += [f"advice: {line}" for line in self.advice(True).values()]
        if len(evaluations := results_table(args.output_dir)):
            lines += ["Evaluations", f"{evaluations.to_string(index=False)}\n"]
        lines += by_value
        lines += [f"{label + ':':<11}{path}" for label, path in files.items()]
        _write("\n".join(["", *lines]))


def _write(text: str):
    """Write lines above the progress bar, if there is one. A terminal that lacks their characters, or is gone, ends no training."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with suppress(OSError, ValueError):
        tqdm.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()  # a log file is read while it grows


def quiet_transformers():
    """Leave out what transformers says at each step of names that TRL uses and a user cannot change."""
    warnings.filterwarnings("ignore", r".*gradient_checkpointing\w*` is deprecated", FutureWarning, "transformers")


def replace_printers(callbacks: CallbackHandler, summary: RunSummary, progress_bar: bool):
    """
    Show readable lines and a summary instead of what transformers prints, and a progress bar on a terminal. Callbacks that a
    user has derived from those of transformers stay.
    """
    quiet_transformers()
    stock = (PrinterCallback, ProgressCallback)
    callbacks.callbacks = [callback for callback in callbacks.callbacks if type(callback) not in stock]
    own_bar = any(isinstance(callback, ProgressCallback) for callback in callbacks.callbacks)
    if progress_bar and not own_bar and sys.stdout.isatty():
        callbacks.add_callback(ProgressBar())
    callbacks.add_callback(summary)


def held_out_accuracy(state: TrainerState, metric: str) -> dict[str, float | None]:
    """Return a metric of held-out prompts `before` and `after` the training so far; `None` if not evaluated, or nothing could be scored."""
    logged = {logs["step"]: logs[metric] for logs in state.log_history if metric in logs}
    return {"before": logged.get(0), "after": logged.get(state.global_step)}
