"""The HTML of the app and the report, from the macros of `pages.html`, which show every value as text."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..record.ledger import PLAIN, against_plain, headline, skipped_visits, taught_nothing
from ..record.numbers import number, percent


STATES = {
    "frontier": ("◐", "passes some of the time: here the model learns"),
    "solved": ("●", "passed every time at its last visit"),
    "hopeless": ("○", "failed every time at its last visit"),
    "pruned": ("✂", "stayed solved, so it gets no rollouts except re-checks"),
    "forgotten": ("↺", "was pruned, failed its re-check, and is not solved again yet"),
    "unscored": ("?", "no completion could be scored at its last visit"),
}
"""States of a prompt: sign and meaning."""


def _width(share: float) -> str:
    """Width of a bar; nothing for a share that is not a number."""
    return f"{100 * min(max(0.0, share), 1.0):.1f}%"


_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_environment.filters |= {"number": number, "percent": percent, "width": _width}
_environment.globals |= {"states": STATES, "plain": PLAIN}
_functions = (against_plain, headline, skipped_visits, taught_nothing)
_environment.globals |= {function.__name__: function for function in _functions}

HTML: Any = _environment.get_template("pages.html").module
"""The macros, as functions that return `Markup`."""
