"""A small, safe evaluator for the formulas in checkpoint files; never `eval`.

Names, numbers, + - * / **, exp, log, sqrt, parentheses and signs; nothing else parses. Length and depth are
bounded and every number is a float, so no formula can hang or fill the memory.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from blasst.core.errors import ProfileError

MAX_FORMULA_LENGTH = 256
MAX_FORMULA_DEPTH = 32

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS: dict[str, Callable[[float], float]] = {"exp": math.exp, "log": math.log, "sqrt": math.sqrt}


@dataclass(frozen=True)
class Formula:
    """A checked formula.

    Attributes:
        text: as it was written.
        names: the names it refers to, functions left out.
    """

    text: str
    names: frozenset[str]
    _body: ast.expr

    def evaluate(self, values: Mapping[str, float]) -> float:
        """The value of the formula; a finite float.

        Args:
            values: one number per name.

        Raises:
            ProfileError: a name has no value, or the result is not a finite real number.
        """
        missing = sorted(self.names - set(values))
        if missing:
            raise ProfileError(f"formula {self.text!r}: no value for {missing}, have {sorted(values)}")
        try:
            result = _evaluate(self._body, values)
        except (ArithmeticError, ValueError) as error:
            raise ProfileError(f"formula {self.text!r} with {dict(values)}: {error}") from error
        if not math.isfinite(result):
            raise ProfileError(f"formula {self.text!r} with {dict(values)}: gives {result}")
        return result

    def same_as(self, text: str) -> bool:
        """Whether another text is the same formula but for spaces and redundant parentheses."""
        return ast.dump(self._body) == ast.dump(parse_formula(text)._body)


def parse_formula(text: str) -> Formula:
    """Check a formula.

    Args:
        text: for example "a * exp(b * target_sparsity)"; at most 256 characters.

    Raises:
        ProfileError: it is too long, too deep, or holds anything but names, numbers, + - * / **, exp, log,
            sqrt and parentheses.
    """
    if not isinstance(text, str) or not text.strip():
        raise ProfileError(f"formula: found {text!r}, wanted a non-empty string")
    if len(text) > MAX_FORMULA_LENGTH:
        raise ProfileError(f"formula: found {len(text)} characters, wanted at most {MAX_FORMULA_LENGTH}")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProfileError(f"formula {text!r}: not an expression: {error}") from error
    names: set[str] = set()
    _check(body, text, 0, names)
    return Formula(text, frozenset(names), body)


def _check(node: ast.expr, text: str, depth: int, names: set[str]) -> None:
    if depth > MAX_FORMULA_DEPTH:
        raise ProfileError(f"formula {text!r}: nested deeper than {MAX_FORMULA_DEPTH}")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.Name(id=name) if name not in _FUNCTIONS:
            names.add(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _check(left, text, depth + 1, names)
            _check(right, text, depth + 1, names)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            _check(operand, text, depth + 1, names)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            _check(argument, text, depth + 1, names)
        case _:
            found = ast.get_source_segment(text.strip(), node) or type(node).__name__
            raise ProfileError(
                f"formula {text!r}: {found!r} is not allowed; allowed are names, numbers, + - * / **, "
                "exp(x), log(x), sqrt(x) and parentheses"
            )


def _evaluate(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return float(values[name])
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_evaluate(operand, values))
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return _FUNCTIONS[name](_evaluate(argument, values))
    raise ProfileError(f"formula: {type(node).__name__} is not allowed")
