r"""
The gaps of math-verify 0.9: rewrites before it reads an answer, and checks of what it calls equal.

Every entry has cases in `tests/test_grading.py`. If they pass without it, as they may with a newer math-verify, delete it.
"""

import re
from decimal import Decimal
from typing import Any
from unicodedata import normalize

import sympy
from latex2sympy2_extended.math_normalization import units
from sympy.core.relational import Relational


_SPACE = r"(?:,?\\!\s*|\\[,;:> ]|\\thinspace\s*|\{\s*,\s*\}|[ ~\u00a0\u2009\u202f])"
_CIRCLE = r"(?:[°º˚∘]|\\(?:text)?degree(?![a-zA-Z]))"

_REWRITES = (
    # "1 1/2" is read as 1
    (r"(?<![\w.,/}])(\d+)[ \u00a0]+(\d+)\s*/\s*(\d+)(?![\w.,/])", r"\1\\frac{\2}{\3}"),
    ("[¼-¾⅐-⅞]", lambda match: r"\frac{" + normalize("NFKC", match[0]).replace("⁄", "}{") + "}"),
    ("[²³⁴-⁹]", lambda match: f"^{normalize('NFKC', match[0])}"),
    (r"√\s*(\d+|[a-zA-Z]|\([^()]*\))", r"\\sqrt{\1}"),
    (r"[€£¥]\s*(?=\d)|(?<=\d)\s*[€£¥]", ""),
    (r"^(\*{1,3})([^*]+?)\.?\1$", r"\2"),  # Markdown around all of an answer
    ("·", r"\\cdot "),
    ("∞", r"\\infty "),
    ("∈", r"\\in "),
    (rf"\^\s*\{{\s*{_CIRCLE}\s*\}}|\^?\s*{_CIRCLE}", r"^\\circ "),  # read as text
    (r"(\^\s*(?:\\circ|\{\s*\\circ\s*\}))\s*[CF]$", r"\1"),  # temperatures
    (r"^(?:\\(?:approx|simeq|thickapprox|sim(?![a-zA-Z]))|=|~=?|(?:about|approximately|roughly)\s)\s*", ""),
    # 1\,234 is read as a product
    (rf"(?<![\d.,}}])\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d|\s*/\s*\d)", lambda match: re.sub(_SPACE, "", match[0])),
    (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?!\w|\.\d)", r"\1 \\times 10^{\2}"),  # 4.5e33 is read as 4.5·e·33
    (r"\\(?:mathrm|text|textrm)\s*\{\s*([eijk])\s*\}", r" \1 "),
    (r"(?<=\d)i(?![a-zA-Z])", " i"),
)
"""Patterns and their replacements, one after the other."""

_SET = re.compile(
    r"(?:\\left\s*)?\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?\s*R\s*\}?\s*)?"
    r"(?:\\m?id(?:dle)?\s*\|?|\\?\||:|\\vert|\\colon)(?P<condition>.*?)(?:\\right\s*)?\\\}"
)
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?:q|qslant)?(?![a-zA-Z])")

# math-verify takes everything from the first `\text{` to a closing brace at the end for a unit
_TEXT_UNITS = re.compile(
    r"(?:(?:\s|~|\\[,;: ]|/|\\cdot)*\\(?:text|mbox|mathrm|textrm|rm)\s*\{[^{}]*\}(?:\^\s*(?:\d|\{\s*-?\d\s*\}))?)+\s*$"
)
# math-verify's, and what else is counted in word problems; two letters without a space are mostly a product, as "ab" is
_COUNTED = ("dollar", "euro", "week", "people", "children", "page", "book", "box", "cookie", "ball")
_UNITS = sorted(
    (unit.strip() for unit in (*units, *_COUNTED) if re.fullmatch(r"[a-zA-Z ]+", unit)), key=len, reverse=True
)
_CLOSE_UNITS = [unit for unit in _UNITS if len(unit) > 2 or unit in ("km", "cm", "mm", "kg", "ft", "hr", "am", "pm")]
_PLAIN_UNITS = re.compile(
    rf"(?P<value>.*[\d}})$])(?:\s*(?:{'|'.join(_CLOSE_UNITS)})(?:s|es)?|\s+(?:{'|'.join(_UNITS)})(?:s|es)?)"
    rf"(?:(?:\s*/\s*|\s+)(?:{'|'.join(_UNITS)})(?:s|es)?)*(?:\^\{{?\d\}}?)?\.?\s*$"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")

# math-verify's parser computes these, whatever their size: (10!)!, 9^{9^9}, 10^{100000000}, \binom{10^8}{5000000}
_TOO_LARGE = re.compile(
    r"!\s*\)*\s*!|\d{5}\s*!|\^\s*\{?\s*-?\d+\s*\^\s*\{?-?\d|\^\s*\{?\s*-?\d{5}"
    r"|binom\s*\{[^{}]*(?:\d{5}|!|\^|binom)|(?:\d{5}|!|\^).*choose|(?:gcd|lcm).*(?:\d{9}|!|\^)"
    r"|(?:Gamma|exp|sinh|cosh|tanh)\W+\d+\s*\^"
)
_LONGEST, _DEEPEST = 400, 12  # characters and nested brackets beyond which the parser takes seconds

_BASE = re.compile(r"(?<=[\dA-F)}])_\s*\{?\s*(?:\\text\{)?\s*(\d+)")
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_SMALL, _TOLERANCE = 1e-3, 2e-6
_DATE, _NAME = re.compile(r"\d{4}-\d\d?-\d\d?"), re.compile(r"(?=.*[A-Z])[a-zA-Z]{3,}")
PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # as math-verify has it


def rewrite(text: str) -> str:
    """
    Rewrite an answer, LaTeX or plain text, so that math-verify reads it as it is meant. Units behind a value go, and a set of the
    numbers in a range becomes the inequality.
    """
    text = text.strip()
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    text = _without_units(text)
    match = _SET.fullmatch(text)
    return match["condition"].strip() if match and _INEQUALITY.search(match["condition"]) else text


def _without_units(text: str) -> str:
    value = _TEXT_UNITS.sub("", text)
    if value.strip() and value != text:
        return value
    match = _PLAIN_UNITS.fullmatch(text)
    if match and not re.search(r"[a-zA-Z]", _COMMAND.sub("", match["value"].rpartition("=")[2])):
        return match["value"]
    return text


def is_too_large(text: str) -> bool:
    """Whether math-verify would take too long to read an answer: such an answer is compared as text."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return len(text) > _LONGEST or deepest > _DEEPEST or _TOO_LARGE.search(text) is not None


def differ_as_text(gold: str, answer: str) -> bool:
    """
    Whether two answers name different bases, as in `52_8`, which math-verify drops; are words or orders with a capital, such as `BCA`, or
    dates, which it compares as products and differences; or are decimals that differ before the end of the shorter one. math-verify
    compares six decimals, however many there are.
    """
    if _NAME.fullmatch(gold) and _NAME.fullmatch(answer):
        return gold.casefold() != answer.casefold()
    if _DATE.fullmatch(gold) or _DATE.fullmatch(answer):
        return [*map(int, re.findall(r"\d+", gold))] != [*map(int, re.findall(r"\d+", answer))]
    bases = _BASE.findall(gold), _BASE.findall(answer)
    if all(bases) and bases[0] != bases[1]:
        return True
    decimals = _DECIMAL.fullmatch(gold), _DECIMAL.fullmatch(answer)
    if decimals[0] is None or decimals[1] is None:
        return False
    places = min(len(decimals[0][1]), len(decimals[1][1]))
    return abs(Decimal(gold) - Decimal(answer)) >= Decimal(1).scaleb(-places)


def is_really_equal(gold: Any, answer: Any) -> bool:
    """
    Whether two values are equal that math-verify calls equal.

    It compares six decimals, so all small numbers are equal, and it compares relations by their solutions: "1 = 0" and "1 > 0" equal
    any that have none, or all. Of "24 + 3 = 27" only the right side was compared.
    """
    for relation, other in ((gold, answer), (answer, gold)):
        says_nothing = isinstance(relation, Relational) and not relation.free_symbols
        if says_nothing and not (isinstance(relation, sympy.Eq) and isinstance(other, sympy.Expr)):
            return relation == other
    return not (_is_number(gold) and _is_number(answer)) or _is_near(gold.evalf(), answer.evalf())


def _is_number(value: Any) -> bool:
    """Whether a value is a number, and no percentage: that equals its number, too."""
    return isinstance(value, sympy.Expr) and value.is_number and not value.has(sympy.UnevaluatedExpr)


def _is_near(a: Any, b: Any) -> bool:
    size = max(abs(a), abs(b))
    return bool(size >= _SMALL or abs(a - b) <= _TOLERANCE * size)
