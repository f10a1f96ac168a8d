"""Docstring, help and default of every field of the configuration agree."""

import re
from dataclasses import MISSING, fields

import pytest
from trl import GRPOConfig

from lze_trl import LZEGRPOConfig


OURS = [f for f in fields(LZEGRPOConfig) if f.name in LZEGRPOConfig.__annotations__]
ENTRY = re.compile(
    r"^        (\w+) \(`([^`]+)`, \*optional\*(?:, defaults to `(.+?)`)?\):\n((?:            .+\n)+)", re.M
)
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
    assert documented == (None if default is None else _shown(default)) or (default is None and documented == "")
    annotated = {bool: "bool", int: "int", float: "float", str: "str"}
    if field.type in annotated:
        assert kind == annotated[field.type]
    assert text.strip().endswith(".")


def _shown(value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_fields_of_trl_keep_their_defaults():
    theirs = {f.name: f.default for f in fields(GRPOConfig)}
    changed = [f.name for f in OURS if f.name in theirs and f.default != theirs[f.name]]
    assert changed == []
