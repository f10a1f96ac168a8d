r"""
Rewrites answers into the LaTeX that math-verify reads as it is meant.

math-verify takes everything from the first `\text{` to a closing brace at the end for a unit, `10\,000` for a product,
`4.5e33` for 4.5·e·33, bold letters for text, and knows neither `°` nor sets such as `\{x \mid x < 1\}`.
"""

import re

from latex2sympy2_extended.math_normalization import units
from sympy import factorial2


_CHARACTERS = str.maketrans(
    {
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "÷": "/",
        "−": "-",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
    }
)

_SPACE = r"(?:,?\\!\s*|\\[,;:> ]|\\thinspace\s*|\{\s*,\s*\}|[ ~\u00a0\u2009\u202f])"
_DEGREE = re.compile(
    r"\^\s*\{\s*(?:[°º˚∘]|\\degree)\s*\}|\^?\s*(?:[°º˚]|\\degree(?![a-zA-Z])|\\textdegree(?![a-zA-Z]))|\^\s*∘"
)
_ABOUT = re.compile(r"(?:\\approx|\\simeq|\\thickapprox|\\sim(?![a-zA-Z])|=|~=?|(?:about|approximately|roughly)\s)\s*")
_ABOUT_EQUAL = re.compile(r"([a-zA-Z])\s*(?:\\approx|\\simeq)")
_FONT = r"\\(?:mathbf|mathit|boldsymbol|bm|pmb|textbf|textit|vec|hat|overrightarrow)"
_BOLD = rf"(?P<command>\\[a-zA-Z]+)?{_FONT}\s*(?:\{{\s*(\\?[a-zA-Z]|\\[ij]math)\s*\}}|\\([ij])math)"


def _joined(match: re.Match) -> str:
    return re.sub(_SPACE, "", match[0])


def _plain_letter(match: re.Match) -> str:
    letter = match[2] or match[3]
    letter = letter[1] if letter.endswith("math") else letter
    return f"{match['command']} {letter}" if match["command"] else letter


_REWRITES = (
    (rf"(?<![\d.,}}])\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d|\s*/\s*\d)", _joined),  # thousands; "3 125/1000" is mixed
    (rf"\.\d{{3}}(?:{_SPACE}\d{{3}})*{_SPACE}\d{{1,3}}(?!\d)", _joined),  # decimals
    (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?!\w|\.\d)", r"\1 \\times 10^{\2}"),
    (r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)", r" \\times "),
    (r"(?<![\w.^})])(\d{1,3})!!(?!!)", lambda match: str(factorial2(int(match[1])))),  # math-verify reads (10!)!
    (_BOLD, _plain_letter),
    (_BOLD, _plain_letter),  # \hat{\mathbf{i}}
    (r"\\(?:mathrm|text|textrm)\s*\{\s*([eijk])\s*\}", r" \1 "),
    (r"(?<=\d)i(?![a-zA-Z])", " i"),
    (r"(\^\s*(?:\\circ|\{\s*\\circ\s*\}))\s*[CF]$", r"\1"),  # temperatures
)
"""Patterns and their replacements, one after the other."""

_SET = re.compile(
    r"(?:\\left\s*)?\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?\s*R\s*\}?\s*)?"
    r"(?:\\m?id(?:dle)?\s*\|?|\\?\||:|\\vert|\\colon)(?P<condition>.*?)(?:\\right\s*)?\\\}"
)
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?:q|qslant)?(?![a-zA-Z])")

_TEXT_UNITS = re.compile(
    r"(?:(?:\s|~|\\[,;: ]|/|\\cdot)*\\(?:text|mbox|mathrm|textrm|rm)\s*\{[^{}]*\}(?:\^\s*(?:\d|\{\s*-?\d\s*\}))?)+\s*$"
)
# Of math-verify's units; two letters without a space are mostly a product, as "ab" is
_UNITS = sorted((unit.strip() for unit in units if re.fullmatch(r"[a-zA-Z ]+", unit)), key=len, reverse=True)
_CLOSE_UNITS = [unit for unit in _UNITS if len(unit) > 2 or unit in ("km", "cm", "mm", "kg", "ft", "hr", "am", "pm")]
_PLAIN_UNITS = re.compile(
    rf"(?P<value>.*[\d}})$])(?:\s*(?:{'|'.join(_CLOSE_UNITS)})(?:s|es)?|\s+(?:{'|'.join(_UNITS)})(?:s|es)?)"
    rf"(?:(?:\s*/\s*|\s+)(?:{'|'.join(_UNITS)})(?:s|es)?)*(?:\^\{{?\d\}}?)?\.?\s*$"
)
NUMBER_AND_LETTER = re.compile(rf"(-?[\d.,]+)({'|'.join(unit for unit in _UNITS if len(unit) == 1)})")
"""`5m`, which is 5 metres or a product with a variable m."""

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_BASE = re.compile(r"(?<=[\dA-F)}])_(?:\{\s*(?:\\text\{)?\s*(\d+)\s*\}?\s*\}|(\d+))")


def normalise(text: str) -> str:
    r"""
    Rewrite an answer, LaTeX or plain text, as a box or a line holds it.

    Thousands are joined, `4.5e33` becomes `4.5 \times 10^{33}`, bold letters become plain, a set of the numbers in a range
    becomes the inequality, and units behind a value go.
    """
    text = _DEGREE.sub(r"^\\circ ", text).translate(_CHARACTERS).strip()
    text = _ABOUT_EQUAL.sub(r"\1 =", _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text)
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    text = _without_units(text)
    match = _SET.fullmatch(text)
    return match["condition"].strip() if match and _INEQUALITY.search(match["condition"]) else text


def bases(text: str) -> tuple[str, ...]:
    """Bases that numbers are marked with, as in `52_8`, in the order of the text."""
    return tuple(match[1] or match[2] for match in _BASE.finditer(text))


def _without_units(text: str) -> str:
    value = _TEXT_UNITS.sub("", text)
    if value.strip() and value != text:
        return value
    match = _PLAIN_UNITS.fullmatch(text)
    if match and not re.search(r"[a-zA-Z]", _COMMAND.sub("", match["value"].rpartition("=")[2])):
        return match["value"]
    return text
