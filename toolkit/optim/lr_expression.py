"""Learning-rate schedules of users: an expression of the step, or what job.custom_import has registered.

Imports no torch.

An expression has numbers, the names and functions below, + - * / // % **, comparisons and ``a if b else c``:
nothing else is evaluated. Both are parts of optimizer.lr, which the warm-up multiplies.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from toolkit.config import Config
from toolkit.config.schema import added
from toolkit.config.training import LRScheduler
from toolkit.errors import Problem
from toolkit.optim.lr_scheduler import warmup_length

EXPRESSION = "expression"
NAMES = ("step", "total_steps", "warmup_steps")
"""``step`` is 1 for the first update."""
_CONSTANTS = {"pi": math.pi}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "sqrt": math.sqrt, "cos": math.cos, "sin": math.sin, "exp": math.exp,
    "log": math.log, "floor": lambda x: float(math.floor(x)), "abs": abs,
}  # fmt: skip
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
MAX_LENGTH = 1000
FIX = 'write a part of optimizer.lr by step, such as "1 / sqrt(step)"'
_LOOKED_AT = 1000  # steps


def factor(options: LRScheduler, **values: int) -> float:
    """The part of optimizer.lr at ``values`` of :data:`NAMES`.

    Raises:
        ValueError: the expression is none, or has no value there.
    """
    if options.decay_type != EXPRESSION:
        own = added("lr_scheduler.decay_type")[options.decay_type]
        return float(own(values["step"], values["total_steps"]))
    return evaluate(options.expression or "", values)


def wrong_rate(config: Config, steps: range, *, total_steps: int) -> Problem | None:
    """Say which of ``steps`` of a schedule over ``total_steps`` has no rate, or none of at least 0.

    Of more than a thousand as many are looked at, spread evenly.
    """
    options = config.lr_scheduler
    ours = options.decay_type == EXPRESSION
    key = "lr_scheduler.expression" if ours else "lr_scheduler.decay_type"
    fix = FIX if ours else "correct the function"
    total = options.total_steps or total_steps
    warmup = warmup_length(options, total)
    ends = {it for it in (total, *steps[-1:]) if it in steps}
    for step in sorted({*steps[:: max(1, len(steps) // _LOOKED_AT)], *ends}):
        where = f"at step {step} of {steps[-1]}" if len(steps) > 1 else f"at step {step}"
        try:
            value = factor(options, step=step, total_steps=total, warmup_steps=warmup)
        except Exception as error:  # whatever a user's function does wrong
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return Problem(f"{where}: {said}", fix, key, config.value(key), config.origin(key))
        if not (math.isfinite(value) and value >= 0):
            said = f"{where} the rate would be {value} of the peak"
            return Problem(said, fix, key, config.value(key), config.origin(key))
    return None


@cache
def parsed(text: str) -> ast.expr:
    """The tree of an expression.

    Raises:
        ValueError: it is none, or holds what is not evaluated.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has more than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is no expression: {getattr(error, 'msg', 'nested too deep')}") from None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        _check(node, called)
    return tree


def evaluate(text: str, values: Mapping[str, float]) -> float:
    """The value of an expression at ``values`` of :data:`NAMES`.

    Raises:
        ValueError: as :func:`parsed`, or there is no value, such as of a division by zero.
    """
    known = {name: float(value) for name, value in values.items()} | _CONSTANTS
    tree = parsed(text)
    try:
        return float(_value(tree, known))
    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it has no value: {error}") from None


def _check(node: ast.AST, called: set[int]) -> None:
    if isinstance(node, ast.Constant):
        if type(node.value) not in (int, float):
            raise ValueError(f"{node.value!r} is no number")
    elif isinstance(node, ast.Name):
        known = _FUNCTIONS if id(node) in called else (*NAMES, *_CONSTANTS)
        if node.id not in known:
            raise ValueError(
                f"{node.id} is unknown; there are {', '.join((*NAMES, *_CONSTANTS, *_FUNCTIONS))}"
            )
    elif isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.keywords:
            raise ValueError("functions are called by name, with numbers")
    elif not isinstance(
        node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.expr_context, *_OPERATORS)
    ):
        raise ValueError(f"{type(node).__name__} is not evaluated")


def _value(node: ast.AST, known: Mapping[str, float]) -> Any:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int | float)
        return float(node.value)  # of floats a power has a bound
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return _FUNCTIONS[node.func.id](*[_value(argument, known) for argument in node.args])
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, known), _value(node.right, known))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, known))
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, known) else node.orelse, known)
    assert isinstance(node, ast.Compare)
    values = [_value(it, known) for it in (node.left, *node.comparators)]
    pairs = zip(node.ops, values[:-1], values[1:], strict=True)
    return all(_OPERATORS[type(op)](left, right) for op, left, right in pairs)
