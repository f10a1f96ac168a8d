r"""
Fixes for math-verify 0.9: rewrites before it reads an answer, and checks of what it calls equal.

Every rewrite stands in `REWRITES`, with an example. `tests/test_answers.py` has an answer that each example equals and one that it
does not, and fails for an entry that is not needed, as it may be with a newer math-verify: then delete the entry.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any
from unicodedata import normalize

import sympy
from latex2sympy2_extended.math_normalization import units
from sympy.core.relational import Relational


_SPACE = r"(?:,?\\!\s*|\\[,;:> ]|\\thinspace\s*|\{\s*,\s*\}|[ ~\u00a0\u2009\u202f])"
_CIRCLE = r"(?:[°º˚∘]|\\(?:text)?degree(?![a-zA-Z]))"
_DEGREES = r"[({]?\s*(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*[)}]?"
_THOUSANDS = rf"(?<![\d.,}}])\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d|\s*/\s*\d)"
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # with two levels of braces in it
_BEGIN_FONT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|[mh]box|emph|math(?:bf|rm|it|sf|tt)|boldsymbol|bm)\s*"
_FONT = re.compile(_BEGIN_FONT + _GROUP)
MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = rf"(?<=\d)(?:\s|~|\\[,;: ])*(\\text\s*\{{\s*|\b)({'|'.join(MAGNITUDES)})s?\b\s*"


def _repeating(match: re.Match) -> str:
    whole, once, again = match[1] or "0", match[2], match[3]
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


REWRITES: tuple[tuple[str, str | Callable[[re.Match], str], str], ...] = (
    # Characters
    ("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe0f\ufeff]", "", "1\u200b2"),
    ("[¼-¾⅐-⅞]", lambda match: rf"\frac{{{normalize('NFKC', match[0]).replace('⁄', '}{')}}}", "3½"),
    ("[²³⁴-⁹]", lambda match: f"^{normalize('NFKC', match[0])}", "x²+y³"),
    ("[₀-₉]+", lambda match: f"_{{{normalize('NFKC', match[0])}}}", "52₈"),
    ("[\u3000！-～\U0001d400-\U0001d7ff]", lambda match: normalize("NFKC", match[0]), "１２"),
    (r"(?<!\w)[‐-―﹣](?=\s*[\w\\(.])", "-", "–3"),
    (r"√\s*(\d+|[a-zA-Z]|\([^()]*\))", r"\\sqrt{\1}", "2√3"),
    (r"[€£¥]\s*(?=\d)|(?<=\d)\s*[€£¥¢]", "", "5 €"),
    ("·", r"\\cdot ", "4.5·10^3"),
    ("∞", r"\\infty ", "(1,∞)"),
    ("∈", r"\\in ", "x∈(1,2)"),
    # Layout
    (r"^(\*{1,3}|`{1,3})([^*`]+?)\.?\1$", r"\2", "**7**"),  # Markdown around all of an answer
    (rf"\\textcolor\s*\{{[^{{}}]*\}}\s*{_GROUP}", r"\1", r"\textcolor{red}{12}"),
    (r"\\color\s*\{[^{}]*\}\s*", "", r"\color{red}12"),
    (r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|displaystyle)(?![a-zA-Z])\s*", "", r"\large 12"),
    (r"\\[bB]igg?[lrm]?(?![a-zA-Z])\s*|(?<=\\left)\s+|(?<=\\right)\s+", "", r"\left ( 1,2 \right )"),
    # "27." would be plain text; the dots of "1,2,..." are a part of it
    (r"(?:\\\\|\\[,;:! ]|[\s~]|(?<![.,;])(?<!\.m)[.,;])+$", "", r"12\\"),
    (rf"^{_FONT.pattern}$", lambda match: rewrite(match[1]), r"\text{6 cm}"),
    (rf"^{_BEGIN_FONT}\{{\s*\(?([A-J])[).:]\s*\}}(?:\s|~|\\[ ,;:]|\\q?quad\b)*(?=.)", r"(\1) ", r"\textbf{(B)}\ 27"),
    (rf"\\(?:boldsymbol|bm|mathbf(?=\s*\{{-?[\d\\]))\s*{_GROUP}", r"{\1}", r"-\mathbf{\frac12}"),
    (
        r"(?i)^(?:\\text\s*\{\s*)?(?:(?:the|final)\s+)*(?:answer(?:\s+is\b|\s*:)|option\b)[\s:]*\}?\s*",
        "",
        r"\text{Answer: }6",
    ),
    # Values
    (r"(?<![\w.,/}])(\d+)[ \u00a0]+(\d+)\s*/\s*(\d+)(?![\w.,/])", r"\1\\frac{\2}{\3}", "2 3/4"),  # 5/4
    (r"(\\[dtc]?frac)\s*\\pi(?![a-zA-Z])\s*", r"\1{\\pi}", r"\frac\pi2"),
    (r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", _repeating, r"0.1\overline{6}"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset", r"\varnothing"),
    (r"^\(\s*([\dA-F]+)\s*\)\s*(?=_)", r"\1", "(101)_2"),
    (r"(?:\s|~|\\[,;: ])+(?=\\?%)", "", r"20\,\%"),
    (rf"\^\s*\{{\s*{_CIRCLE}\s*\}}|\^?\s*{_CIRCLE}", r"^\\circ ", "90°"),  # read as text
    (r"(\^\s*(?:\\circ|\{\s*\\circ\s*\}))\s*[CF]$", r"\1", "25 °C"),  # temperatures
    (rf"(\\(?:sin|cos|tan|cot|sec|csc))\s*{_DEGREES}", r"\1(\\frac{\2\\pi}{180})", r"\sin 30^\circ"),
    (r"^(?:\\(?:approx|simeq|thickapprox|sim\b)|=|~=?|(?:about|approximately|roughly)\s)\s*", "", r"\approx 17.10"),
    (_THOUSANDS, lambda match: re.sub(_SPACE, "", match[0]), r"1\,234"),  # read as a product
    (_MAGNITUDE, lambda match: rf" \times 10^{{{MAGNITUDES[match[2]]}}}{match[1] or ' '}", r"5\text{ million}"),
    (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?!\w|\.\d)", r"\1 \\times 10^{\2}", "4.5e33"),  # 4.5·e·33
    (r"(?<=\d)i(?![a-zA-Z])", " i", "3i-2j"),  # not the same i
)
"""Patterns, their replacements, and an example each, applied one after the other."""

_SET = re.compile(
    r"(?:\\left\s*)?\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\(?:mathbb|mathbf)\s*\{?\s*R\s*\}?\s*)?"
    r"(?:\\m?id(?:dle)?\s*\|?|\\?\||:|\\vert|\\colon)(?P<condition>.*?)(?:\\right\s*)?\\\}"
)
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne)(?:q|qslant)?(?![a-zA-Z])")

_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|rm)\s*\{([^{}]*)\}")
_TEXT_UNITS = re.compile(rf"(?:(?:\s|~|\\[,;: ]|/|\\cdot)*{_TEXT.pattern}(?:\^\s*(?:\d|\{{\s*-?\d\s*\}}))?)+\s*$")
# Words that change the value before them
CHANGES = (
    r"or|nor|no|never|wait|actually|rather|instead|maybe|perhaps|possibly|alternatively|either|wrong|incorrect|than|unless|mod|"
    r"modulo|squared|cubed|factorial|half|halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|"
    r"(?:dozen|hundred|thousand|[mbtr]+illion)s?"
)
# Anything can be counted, so the list is of what is not a unit
_NO_UNIT = re.compile(
    rf"""[^\w\s./^°$¢'’()-] | \d | [或和不万亿千百十] | \btimes(?!\s*$|\s+as\b) | \bpoint\s+\w | \b(?:{CHANGES}|
        and|not|but|if|is|it|its|was|are|be|to|then|else|except|without|percent|probably|false|plus|minus|over|into|power|negative|
        zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|
        (?:twen|thir|for|fif|six|seven|eigh|nine)ty|sqrt|sin|cos|tan|log|exp|alpha|beta|theta|phi|infinity)\b""",
    re.IGNORECASE | re.VERBOSE,
)
# math-verify's, and short ones. Two letters without a space are mostly a product, as "ab" is
_SHORT_UNITS = "N J W V A F L a in of oz mL ml Hz eV kW kJ Pa an as on USD EUR"
_UNITS = {unit.strip() for unit in units} | {*_SHORT_UNITS.split()}
_CLOSE_UNITS = {unit for unit in _UNITS if len(unit) > 2} | {"km", "cm", "mm", "kg", "ft", "hr", "am", "pm"}
_PLAIN_UNITS = re.compile(r"(?P<value>.*[\d})$])(?P<gap>\s*)(?P<unit>[a-zA-Z][a-zA-Z\s/-]*)(?:\^\{?\d\}?)?\.?\s*")
_COMMAND = re.compile(r"\\[a-zA-Z]+")

# Units of one kind, and their names. A power is no other unit
_KINDS_OF_UNITS = (
    "$ dollar dollars usd | cent cents ¢ | € euro euros eur | £",
    "am | pm",
    "mm | cm centimeter centimeters | m meter meters | km kilometer kilometers | inch inches | ft foot feet | yard yards | mile miles",
    "s sec second seconds | min minute minutes | h hr hour hours | day days | week weeks | month months | year years",
    "mg | g gram grams | kg kilogram kilograms | ounce ounces oz | pound pounds lb lbs",
)
_NAMES_OF_UNITS = [(kind, names.split()) for kind, line in enumerate(_KINDS_OF_UNITS) for names in line.split("|")]
_UNIT_OF = {name: (kind, names[0]) for kind, names in _NAMES_OF_UNITS for name in names}

_OPTION = re.compile(r"(?:\(([A-J])\)|([A-J])(?:[).:](?=\s)|\)$))(?:\s+([^\s+*/^_=<>!,;&|].*))?|([A-J])")
_FURTHER_OPTION = re.compile(
    r"(?<![\\\w])[B-HJ](?!\w)|\(A\)|(?:or|and|,|/)\s*\(?A\b|^(?:or|and|not?|maybe)\b|^-\s|^\\(?:lor|vee|[cl]?dots|\\)"
)

_NAMES = re.compile(
    r"\\(?:begin|end|operatorname)\*?\s*\{[a-zA-Z*]*\}|(?:arc(?:sin|cos|tan)|sinh|cosh|tanh|sqrt|infinity|percent)\b"
)
_PROSE = re.compile(
    r"(?<![\\a-zA-Z])(?:[a-zA-Z]{4}|(?:not|nor|may|but)(?![a-zA-Z]))"
    r"|\\(?:text[a-z]*|mbox)\s*\{(?!\W*(?:and|or)\W*\})[^{}]*[a-zA-Z]{2}"
)

# math-verify's parser computes these, whatever their size: (10!)!, 9^{9^9}, 10^{100000000}, \binom{10^8}{5000000}
_TOO_LARGE = re.compile(
    r"!\s*\)*\s*!|\d{5}\s*!|\^\s*\{?\s*-?\d+\s*\^\s*\{?-?\d|\^\s*\{?\s*-?\d{5}"
    r"|binom\s*\{[^{}]*(?:\d{5}|!|\^|binom)|(?:\d{5}|!|\^).*choose|(?:gcd|lcm).*(?:\d{9}|!|\^)"
    r"|(?:Gamma|exp|sinh|cosh|tanh)\W+\d+\s*\^"
)
_LONGEST, _DEEPEST = 400, 12  # characters and nested brackets beyond which the parser takes seconds

_BASE = re.compile(r"(?<=[\dA-F)}])_\s*\{?\s*(?:\\text\{)?\s*(\d+)")
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_SMALL, _TOLERANCE, _DERIVED = 1e-3, 2e-6, 1e-2  # the last of the sides of "10/3 = 3.33"
_DATE = re.compile(r"\d{4}([-/])\d\d?\1\d\d?|\d\d?([-/])\d\d?\2\d{4}")


def _integers(text: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", text))]


def _shares(text: str) -> list[Fraction]:
    parts = [*map(Fraction, text.split(":"))]
    return [part / (sum(parts) or 1) for part in parts]


# Forms that math-verify does not compare by value: names, orders such as BCA, and words; dates; times; ratios
_FORMS: tuple[tuple[re.Pattern, Callable[[str], list]], ...] = (
    (
        re.compile(
            r"(?=.*[A-Z])[a-zA-Z]{3,}|(?i:no|on)|(?=.*(?:[A-Z][a-z]|[a-zA-Z]{4}))[a-zA-Z]+(?:[\s,-]+[a-zA-Z]+)*"
        ),
        lambda text: sorted(" ".join(part.split()) for part in re.split(r",|\b(?:and|or)\b", text.casefold())),
    ),
    (_DATE, _integers),
    (re.compile(r"\d\d?(?:\s*:\s*[0-5]\d){1,2}(?:\s*\\text\{)?\s*(?:[apAP]\.?\s*[mM]\.?)?\s*\}?"), _integers),
    (re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+"), _shares),
)
_SET_OF_VALUES, _PAIR = re.compile(r"\\\{[^()\[\]]*\\\}"), re.compile(r"\([^()\[\]]*\)")
PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # as math-verify has it


def rewrite(text: str) -> str:
    """
    Rewrite an answer, LaTeX or plain text, so that math-verify reads what is meant. Removes units after a value, and turns a set of
    the numbers in a range into the inequality.
    """
    text = text.strip()
    for pattern, replacement, _ in REWRITES:
        text = re.sub(pattern, replacement, text)
    text = _without_units(text)
    match = _SET.fullmatch(text)
    return match["condition"].strip() if match and _INEQUALITY.search(match["condition"]) else text


def _without_units(text: str) -> str:
    match = _TEXT_UNITS.search(text)
    if match and text[: match.start()].strip() and all(map(_is_unit, _TEXT.findall(match[0]))):
        return text[: match.start()]
    match = _PLAIN_UNITS.fullmatch(text)
    if match is None or re.search(r"[a-zA-Z]", _COMMAND.sub("", match["value"].rpartition("=")[2])):
        return text
    is_close = match["gap"] or re.sub(r"(?:s|es)?$", "", re.split(r"[\s/]", match["unit"])[0]) in _CLOSE_UNITS
    return match["value"] if is_close and _is_unit(match["unit"], longer=3) else text


def _is_unit(text: str, longer: int = 2) -> bool:
    """Return whether words are a unit: known units, or words of more than `longer` letters that are not known to be something else."""
    words = re.findall(r"[^\W\d_]+", text)
    known = [len(word) > longer or {word, word.removesuffix("s")} & _UNITS for word in words]
    return all(known) and _NO_UNIT.search(text) is None


def unit_names(text: str) -> frozenset[tuple[int, str]]:
    """Return kinds and names of the units in an answer as it was given."""
    tokens = re.findall(r"[a-z]+(?:\.[a-z]\b)*|[$¢€£]", _COMMAND.sub(" ", text).lower())
    return frozenset(_UNIT_OF[name] for name in (token.replace(".", "") for token in tokens) if name in _UNIT_OF)


def differ_in_units(gold: frozenset[tuple[int, str]], answer: frozenset[tuple[int, str]]) -> bool:
    """Return whether two answers name different units of a kind, as dollars and cents; one without a unit does not differ."""
    kinds = {kind for kind, _ in gold} & {kind for kind, _ in answer}
    return any(kind in kinds for kind, _ in gold ^ answer)


def split_option(text: str) -> tuple[str | None, str | None]:
    """Split an option into letter and text: B and 27 of "(B) 27". A text that names a further option has no letter."""
    match = _OPTION.fullmatch(text)
    if match is None or _FURTHER_OPTION.search(match[3] or ""):
        return None, text
    return match[1] or match[2] or match[4], match[3]


def as_words(text: str) -> str | None:
    """
    Return the text of an answer that has words in it, else `None`: math-verify multiplies their letters, and takes a set or an
    interval out of any sentence.
    """
    return " ".join(_FONT.sub(r"\1", text).split()) if _PROSE.search(_NAMES.sub("", text)) else None


def with_union(text: str, values: list[Any]) -> list[Any]:
    """Add the union of intervals that "x < 1 or x > 2" means to what math-verify reads: a set of two inequalities."""
    sides = values[0].args if isinstance(values[0], sympy.FiniteSet) and _OR.search(text) else ()
    is_union = sides and all(isinstance(side, Relational) and str(side.free_symbols) == "{x}" for side in sides)
    return [sympy.Union(*(side.as_set() for side in sides)), *values] if is_union else values


def is_too_large(text: str) -> bool:
    """Return whether math-verify would take too long to read an answer, which is then compared as text."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return len(text) > _LONGEST or deepest > _DEEPEST or _TOO_LARGE.search(text) is not None


def equal_as_text(gold: str, answer: str) -> bool | None:
    """
    Compare two answers by their text, if that decides; else return `None`, and their values have to be compared.

    It decides for two answers that are words, dates, times or ratios, which math-verify takes for products, differences and quotients.
    It is `False` for a date and anything else; for a set and a pair; for different bases, as in `52_8`, which math-verify ignores; and
    for decimals that differ before the end of the shorter one, because math-verify compares six places.
    """
    for form, read in _FORMS:
        if form.fullmatch(gold) and form.fullmatch(answer):
            return read(gold) == read(answer)
    for one, other in ((gold, answer), (answer, gold)):
        if _DATE.fullmatch(one) or (_SET_OF_VALUES.fullmatch(one) and _PAIR.fullmatch(other)):
            return False
    bases = _BASE.findall(gold), _BASE.findall(answer)
    if all(bases) and bases[0] != bases[1]:
        return False
    decimals = _DECIMAL.fullmatch(gold), _DECIMAL.fullmatch(answer)
    if decimals[0] is None or decimals[1] is None:
        return None
    places = min(len(decimals[0][1]), len(decimals[1][1]))
    return False if abs(Decimal(gold) - Decimal(answer)) >= Decimal(1).scaleb(-places) else None


def is_really_equal(gold: Any, answer: Any) -> bool:
    """
    Return whether two values are equal that math-verify calls equal.

    math-verify compares six decimals, so all small numbers are equal; relations by their solutions, so "1 = 0" equals whatever has
    none and "1 > 0" whatever all numbers solve; and of "24 + 3 = 27" only the right side. It takes the ends of "1 < x < 2" for a pair,
    and 1% for 1: a percentage equals its number without the sign only if that is more than 1.
    """
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Relational) and all(map(_is_number, one.args)):
            is_derivation = isinstance(one, sympy.Eq) and isinstance(other, sympy.Expr)
            return _are_near(one.args[0], one.args[1], _DERIVED) if is_derivation else one == other
        is_inequality = isinstance(one, (Relational, sympy.And)) and not isinstance(one, sympy.Eq)
        if is_inequality and isinstance(other, (sympy.FiniteSet, sympy.Tuple)):
            return False
        if one.has(PERCENT) and not other.has(PERCENT) and is_share(other):
            return _are_near(one.doit(), other.doit(), _TOLERANCE)
    if not (_is_number(gold) and _is_number(answer)):
        return True
    a, b = gold.evalf(), answer.evalf()
    return bool(max(abs(a), abs(b)) >= _SMALL) or _are_near(a, b, _TOLERANCE)


def is_share(value: Any) -> bool:
    """Return whether a value is a number of at most 1 by size, which a percent sign would change."""
    return isinstance(value, sympy.Expr) and bool(value.is_number) and bool(abs(value) <= 1)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that is not a percentage."""
    return isinstance(value, sympy.Expr) and value.is_number and not value.has(sympy.UnevaluatedExpr)


def _are_near(a: Any, b: Any, tolerance: float) -> bool:
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))
