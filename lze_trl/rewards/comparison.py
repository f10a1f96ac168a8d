"""What math-verify would compute without end, and what it calls equal though it is not."""

import math
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.functions.elementary.hyperbolic import HyperbolicFunction


MOST_DIGITS = 100_000
"""Digits beyond which a number is not computed."""

_SMALL = 1e-3
_TOLERANCE = 2e-6
"""Numbers below the first are compared to six digits. math-verify compares six decimals, which are all 0 for small ones."""


def is_computable(value: Any) -> bool:
    """Whether every number that computing a value takes has at most `MOST_DIGITS` digits. Nothing is computed for it."""
    return _digits(value) <= MOST_DIGITS


def is_really_equal(gold: Any, answer: Any) -> bool:
    """
    Whether two values are equal that math-verify calls equal.

    It compares equations by their solutions, so all without one are equal, and rounds numbers, so all small ones are.
    """
    if type(gold) is type(answer) and gold == answer:
        return True
    if not (
        gold.has(sympy.UnevaluatedExpr) or answer.has(sympy.UnevaluatedExpr)
    ):  # a percentage equals its number, too
        small, others = _small_numbers(gold), _small_numbers(answer)
        if not (_are_among(small, others) and _are_among(others, small)):
            return False
    if all(isinstance(value, (Relational, sympy.And)) for value in (gold, answer)):
        return _is_multiple(gold, answer) or _is_solvable(gold)
    # "1 > 0" holds for all numbers and so does an interval of all of them; of "24 + 3 = 27", the right side was compared
    return not any(
        isinstance(value, Relational) and not isinstance(value, sympy.Eq) and not value.free_symbols
        for value in (gold, answer)
    )


def _is_solvable(relation: sympy.Basic) -> bool:
    if not relation.free_symbols:
        return False
    equations = [relation] if isinstance(relation, Relational) else list(relation.args)
    if not all(isinstance(part, sympy.Eq) for part in equations):
        return True
    try:
        return bool(sympy.solve(equations, dict=True))
    except NotImplementedError:  # math-verify could not solve it either, and found another way
        return True


def _is_multiple(a: sympy.Basic, b: sympy.Basic) -> bool:
    """Whether a relation is the other one times a number, as x² + 1 = 0 and 2x² + 2 = 0."""
    if isinstance(a, sympy.And) and isinstance(b, sympy.And):
        return len(a.args) == len(b.args) and all(map(_is_multiple, a.args, b.args))
    if not (isinstance(a, Relational) and isinstance(b, Relational) and a.free_symbols):
        return False
    ratio = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)


def _small_numbers(value: Any) -> list[sympy.Expr]:
    """Numbers near zero within a value; of a formula, its value at one point."""
    if isinstance(value, sympy.Eq):
        return _small_numbers(value.rhs) if isinstance(value.lhs, sympy.Symbol) else []
    if isinstance(value, (sympy.Set, sympy.Tuple, sympy.MatrixBase)):
        parts = value.flat() if isinstance(value, sympy.MatrixBase) else value.args
        return [number for part in parts for number in _small_numbers(part)]
    if not isinstance(value, sympy.Expr):
        return []
    symbols = sorted(value.free_symbols, key=str)
    number = value.subs({symbol: sympy.Rational(10 + index, 9) for index, symbol in enumerate(symbols)})
    size = abs(number.evalf())
    is_small = isinstance(size, sympy.Number) and bool(0 < size < _SMALL)
    return [number] if is_small and sympy.simplify(number) != 0 else []


def _are_among(numbers: list[sympy.Expr], others: list[sympy.Expr]) -> bool:
    return all(
        any(abs(a - b).evalf() <= _TOLERANCE * max(abs(a).evalf(), abs(b).evalf()) for b in others) for a in numbers
    )


def _digits(value: Any) -> float:
    """Upper bound of the digits of every number that computing a value takes."""
    if isinstance(value, sympy.MatrixBase):
        return sum(map(_digits, value.flat()))
    if isinstance(value, sympy.Number) and value.is_finite:
        parts = (value.p, value.q) if isinstance(value, sympy.Rational) else (value,)
        return max([math.log10(2), *(abs(math.log10(abs(part))) for part in parts if part)])
    if not isinstance(value, sympy.Basic) or not value.args:
        return 1
    digits = [_digits(argument) for argument in value.args]
    if isinstance(value, sympy.Pow) and not value.exp.free_symbols:
        return digits[0] * max(1, _size(value.exp, digits[1]))
    if isinstance(value, (sympy.factorial, sympy.gamma, sympy.exp, HyperbolicFunction)) and not value.free_symbols:
        return digits[0] * max(1, _size(value.args[0], digits[0]))
    if isinstance(value, (sympy.Sum, sympy.Product)):
        terms = [_size(end, _digits(end)) for limits in value.limits for end in limits[1:]]
        return digits[0] * max([1, *terms])
    return sum(digits)


def _size(value: sympy.Expr, digits: float) -> float:
    """Upper bound of the size of a value that has at most so many digits."""
    if isinstance(value, sympy.Number) and value.is_finite and digits < 300:
        return abs(float(value))
    return 10 ** min(digits, 300)
