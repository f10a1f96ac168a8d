"""Docstring, help and default of every field of the configuration agree."""

import re
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import pytest
from trl import GRPOConfig

from lze_trl import LZEGRPOConfig
from lze_trl.strategies import DEFAULT, settings_of


OURS = [f for f in fields(LZEGRPOConfig) if f.name in LZEGRPOConfig.__annotations__]
ENTRY = re.compile(
    r"^        (\w+) \(`([^`]+)`, \*optional\*(?:, defaults to `(.+?)`)?\):\n((?:            .+\n)+)", re.M
)
HINTS = get_type_hints(LZEGRPOConfig)
DEFAULTS = settings_of(DEFAULT)
DOCUMENTED = {name: (kind, default, text) for name, kind, default, text in ENTRY.findall(LZEGRPOConfig.__doc__)}


def test_every_field_is_documented_in_its_order():
    inherited = {f.name for f in fields(GRPOConfig)}  # these keep the place that they have in TRL
    assert set(DOCUMENTED) == {f.name for f in OURS}
    assert [n for n in DOCUMENTED if n not in inherited] == [f.name for f in OURS if f.name not in inherited]


@pytest.mark.parametrize("field", OURS, ids=lambda field: field.name)
def test_docstring_help_and_default_agree(field):
    kind, documented, text = DOCUMENTED[field.name]
    default = field.default if field.default is not MISSING else field.default_factory()
    assert field.metadata["help"].strip().endswith(".")
    if field.name in DEFAULTS:  # left open, for the strategy to fill in
        assert default is None
        default = DEFAULTS[field.name]
        assert field.metadata["help"].endswith(f"Default: by the strategy, {default!r}.")
    shown = f'"{default}"' if isinstance(default, str) else str(default)
    assert documented in (("", None) if default is None else (shown,))
    annotated = {bool: "bool", int: "int", float: "float", str: "str"}
    hint = HINTS[field.name]  # a parser changes `field.type`
    if hint == dict[str, Any] | str | None:  # text on command lines
        annotated = {dict[str, Any]: "dict[str, Any]"}
    plain = [annotated[option] for option in get_args(hint) or [hint] if option in annotated]
    assert plain in ([], [kind])
    assert text.strip().endswith(".")


def test_no_field_of_trl_is_hidden():
    changed = {f.name for f in fields(GRPOConfig)} & set(LZEGRPOConfig.__annotations__)
    assert changed == {"scale_rewards", "vllm_mode"}
