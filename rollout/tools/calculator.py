"""Tool `calculate`: arithmetic, bounded in size, so that no expression takes long."""

import ast
import operator
from collections.abc import Callable, Mapping

from rollout.tools.base import ToolError

_MAX_CHARACTERS = 200
_MAX_BITS = 4096
"""Largest whole number."""
_Number = int | float
_BINARY: Mapping[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression with + - * / // % ** and brackets.

    Args:
        expression: such as `(3 + 4) * 2`.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS} are allowed")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ToolError("this is not an arithmetic expression") from error


def _value(node: ast.expr) -> _Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    raise ToolError("only numbers, + - * / // % ** and brackets are allowed")


def _power(base: _Number, exponent: _Number) -> _Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ToolError("the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ToolError("the result is not a real number")
    return _bounded(result)


def _bounded(value: _Number) -> _Number:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolError("the result is too large")
    return value
