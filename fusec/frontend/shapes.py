"""Convert torch's types and symbolic sizes to the IR's; only ``size_facts.py`` uses sympy, too.

A ``SymInt`` holds a sympy expression over symbols of a ShapeEnv. ``SizeMap`` turns it into an
``Index`` over ``Size`` atoms without evaluating any condition on it, since that would add a guard.
Equal sizes become equal indices: where the trace has proven that n divides a symbol s, s is written
as n times ``Quotient(s, n)``.

``Max(1, e)`` in a stride, torch's form for an extent e that may be 0, becomes ``e``: an empty
tensor has no elements to address. Any other ``Max`` or ``Min`` becomes the argument that it is
proven to equal, or else an expression of a new size (``Minimum``), which the graph computes first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from fusec.errors import Unsupported
from fusec.frontend.size_facts import SizeFacts
from fusec.ir.atoms import Minimum
from fusec.ir.dtype import DTYPES, F64, PART, DType
from fusec.ir.expr import Cast, Const, Expr, IndexValue, op
from fusec.ir.graph import Comparison, Condition, Junction, sizes_in
from fusec.ir.index import (
    FloorDiv,
    Index,
    Mod,
    Quotient,
    Size,
    index,
    is_nonnegative,
    most,
    product,
)
from fusec.ir.scalar import SCALAR_OPS

_TO_TORCH: dict[DType, torch.dtype] = {
    dtype: getattr(torch, dtype.torch_name)
    for dtype in DTYPES.values()
    if hasattr(torch, dtype.torch_name)
}
_FROM_TORCH = {theirs: own for own, theirs in _TO_TORCH.items()}


def from_torch_dtype(dtype: torch.dtype) -> DType:
    """Return the IR's type; quantised and future types are ``unknown``, which is opaque."""
    return _FROM_TORCH.get(dtype, DTYPES["unknown"])


def to_torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's type of the same name."""
    return _TO_TORCH[dtype]


def from_end(position: int | Index, extent: Index) -> Index:
    """Return a position that may count from the end as one that counts from the front."""
    at = index(position)
    return at + extent if at.hint() < 0 else at


@dataclass(frozen=True, slots=True)
class TensorType:
    """The traced type of a tensor: shape and strides (in elements), element type, device.

    Attributes:
        is_strided: it has plain memory, in a ``NumberForm``: it is not sparse or quantised.
    """

    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    dtype: DType
    device: torch.device
    is_strided: bool = True

    @property
    def is_opaque(self) -> bool:
        """True if only eager kernels compute with it."""
        return not self.is_strided or self.part.dtype.is_opaque

    @property
    def is_complex(self) -> bool:
        return self.dtype in PART

    @property
    def part(self) -> TensorType:
        """One part of a complex tensor, as a tensor beside the other; any other tensor itself."""
        return replace(self, dtype=PART[self.dtype]) if self.is_complex else self

    @property
    def memory(self) -> TensorType:
        """The tensor in memory, where the parts of a complex one have an axis."""
        if not self.is_complex:
            return self
        strides = (*(stride * 2 for stride in self.strides), index(1))
        return replace(self.part, shape=(*self.shape, index(2)), strides=strides)

    @property
    def overlaps(self) -> bool:
        """True if some axis of more than one element has stride 0, as after an expand."""
        return any(
            s is index(0) and e is not index(1)
            for e, s in zip(self.shape, self.strides, strict=True)
        )


class SizeMap:
    """Converter of one graph's symbolic sizes, sympy expressions, to indices; each is cached."""

    def __init__(self) -> None:
        self._normal = True
        self._converted: dict[tuple[Any, bool], Index] = {}
        self._facts: SizeFacts | None = None
        self.used: dict[str, Size] = {}
        self._equal: set[str] = set()
        self._asked: set[str] = set()
        self.minima: dict[tuple[Index, ...], Minimum] = {}
        self._unseen: set[Size] = set()
        self._extents: set[Index] = set()

    def index(self, value: int | torch.SymInt, *, stride: bool = False) -> Index:
        """Return a size, stride or integer argument as an index.

        Args:
            stride: whether it is the stride of a tensor whose extents have been converted.
        Raises:
            Unsupported: if it depends on data, or has a form that an index cannot express.
        """
        if isinstance(value, int):
            return index(value)
        node = value.node
        if not hasattr(node, "expr"):
            raise Unsupported("a size of a nested tensor")
        return self._convert(node.expr, node.shape_env, stride)

    def tensor(self, value: torch.Tensor) -> TensorType:
        """Return the type of a traced tensor."""
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            shape = () if value.is_nested else tuple(map(self.index, value.shape))
            strides = tuple(index(0) for _ in shape)
            return TensorType(shape, strides, DTYPES["unknown"], value.device, False)
        shape = tuple(map(self.index, value.shape))
        self._extents.update(shape)
        return TensorType(
            shape,
            tuple(self.index(n, stride=True) for n in value.stride()),
            from_torch_dtype(value.dtype),
            value.device,
            # No kernel computes other types under a conjugate or negative bit.
            value.dtype.to_real() in (torch.float32, torch.float64)
            or not (value.is_conj() or value.is_neg()),
        )

    def _convert(self, expr: Any, env: Any, stride: bool = False) -> Index:
        stride = stride and not isinstance(expr, sympy.Symbol)
        known = self._converted.get((expr, stride))
        if known is None:
            known = self._converted[expr, stride] = self._convert_new(expr, env, stride)
        return known

    def _convert_new(self, expr: Any, env: Any, stride: bool) -> Index:
        if isinstance(expr, sympy.Integer):
            return index(int(expr))
        if isinstance(expr, sympy.Symbol):
            return self._symbol(expr, env)
        if self._normal and (number := self._facts_of(env).number(expr)) is not None:
            return index(number)
        if isinstance(expr, sympy.Mul):
            return self._product(expr, env, stride)
        if self._normal and (chosen := self._facts_of(env).chosen(expr)) is not None:
            return self._convert(chosen, env)
        name = type(expr).__name__
        if name == "FloorDiv" and (simpler := self._divided_twice(expr, env)) is not None:
            return self._convert(simpler, env)
        rules = _RULES if self._normal else _UNBOUNDED_RULES
        if name not in rules and name not in ("Max", "Min"):
            raise Unsupported(f"a size with {name}")
        ordered = expr.args if name in rules else sorted(expr.args, key=str)
        args = [self._convert(arg, env, stride) for arg in ordered]
        if name == "FloorDiv" and self._normal and self._facts_of(env).divides(*expr.args):
            return _exact_quotient(*args)
        if name in rules:
            return rules[name](args)
        if stride and name == "Max" and len(args) == 2 and index(1) in args:
            extent = args[1] if args[0] is index(1) else args[0]
            if extent in self._extents:  # else the user wrote it, and it may be negative
                return extent
        return functools.reduce(self.greatest if name == "Max" else self.least, args)

    def condition(self, value: torch.SymBool) -> Condition:
        """Return a condition on sizes, or a bool where torch knows its value.

        It may be the guard that establishes a fact or a bound, so none of them simplifies it.

        Raises:
            Unsupported: if it is not made of comparisons of sizes.
        """
        return self.plain()._condition(value.node.expr, value.node.shape_env)

    def plain(self) -> SizeMap:
        """Return a ``SizeMap`` that writes sizes in the trace's own symbols, and uses no facts."""
        plain = SizeMap()
        plain._normal, plain._unseen = False, self._unseen
        plain.used, plain.minima, plain._asked = self.used, self.minima, self._asked
        return plain

    def asked(self, env: Any) -> Iterator[Condition]:
        """Yield the guards of the trace as conditions on sizes.

        Raises:
            Unsupported: as of ``condition``.
        """
        for guard in env.guards:
            condition = self._condition(env.replace(guard.expr), env)
            if condition is not True:
                yield condition

    def _condition(self, expr: Any, env: Any) -> Condition:
        if isinstance(expr, sympy.logic.boolalg.BooleanAtom):
            return bool(expr)
        if isinstance(expr, sympy.And | sympy.Or):
            parts = tuple(self._condition(part, env) for part in sorted(expr.args, key=str))
            return Junction("and" if isinstance(expr, sympy.And) else "or", parts)
        if not isinstance(expr, sympy.Rel) or expr.rel_op not in _SIGNS:
            raise Unsupported("a symbolic condition")
        left, right = (self._convert(side, env) for side in expr.args)
        return Comparison(expr.rel_op, left, right)

    def number(self, value: torch.SymFloat) -> Expr:
        """Return a symbolic float, such as n/(n-1) of a variance, as an f64 expression.

        Raises:
            Unsupported: if it depends on data, or has a form that is not known.
        """
        if not hasattr(value.node, "expr"):
            raise Unsupported("a symbolic float")
        return self._real(value.node.expr, value.node.shape_env)

    def _real(self, expr: Any, env: Any) -> Expr:
        if isinstance(expr, sympy.Rational | sympy.Float):
            return Const(float(expr), F64)
        if type(expr).__name__ == "ToFloat":
            return self._real(expr.args[0], env)
        if expr.is_integer:
            return Cast(IndexValue(self._convert(expr, env)), F64)
        rule = _REAL_RULES.get(type(expr).__name__)
        if rule is None:
            raise Unsupported(f"a symbolic float with {type(expr).__name__}")
        parts = [self._real(arg, env) for arg in expr.args]
        while len(parts) > SCALAR_OPS[rule].arity:
            parts[:2] = [op(rule, *parts[:2])]
        return op(rule, *parts)

    def _product(self, expr: Any, env: Any, stride: bool) -> Index:
        """Multiply; a rational factor p/q is exact in torch's expressions, so it divides last."""
        total, divisor = index(1), 1
        for factor in expr.args:
            if isinstance(factor, sympy.Rational):
                total, divisor = total * int(factor.p), divisor * int(factor.q)
            else:
                total = total * self._convert(factor, env, stride)
        return total if divisor == 1 else total // divisor

    def _divided_twice(self, expr: Any, env: Any) -> Any:
        """Return b for ``a // (a//b)`` where b divides a, else None."""
        dividend, divisor = expr.args
        nested = type(divisor).__name__ == "FloorDiv" and divisor.args[0] == dividend
        exact = nested and self._normal and self._facts_of(env).divides(*divisor.args)
        return divisor.args[1] if exact else None

    def least(self, a: Index, b: Index) -> Index:
        """Return the minimum of two sizes: one of them, where that is proven.

        Else an expression of a new size, one of ``minima``, which has to be computed first. Its
        arguments are sums without negative terms, so that equal minima are equal in form:
        ``min(0, s - 1)`` is ``min(1, s) - 1``.
        """
        difference = a - b
        if self._normal and is_nonnegative(difference):
            return b
        if self._normal and is_nonnegative(-difference):
            return a
        missing = _positive_part(-difference)
        args = tuple(sorted((_positive_part(difference), missing), key=repr))
        made = self.minima.get(args)
        if made is None:
            made = self.minima[args] = _new_minimum(len(self.minima), args)
            if not (self.were_seen(a) and self.were_seen(b)):
                self._unseen.add(made)
        return b - missing + index(made)

    def greatest(self, a: Index, b: Index) -> Index:
        """Return the maximum of two sizes, by way of their minimum."""
        return a + b - self.least(a, b)

    def slice_start(self, start: int | Index | None, extent: Index) -> Index:
        """Return the start of a slice, counted from the front of the sliced axis, within it."""
        zero = index(0)
        first = from_end(0 if start is None else start, extent)
        if first.is_constant and extent.is_constant:
            return index(min(max(first.const, 0), extent.const))
        if self.were_seen(first) and self.were_seen(extent):
            return zero if first.hint() < 0 else first
        return self.least(self.greatest(zero, first), extent)

    def symbol(self, value: torch.SymInt) -> Size | None:
        """Return the ``Size`` of an integer that is a single symbol, else None."""
        node = value.node
        plain = isinstance(getattr(node, "expr", None), sympy.Symbol)
        return self._size(node.expr, node.shape_env) if plain else None

    def is_ragged(self, value: torch.SymInt) -> bool:
        """Return True if an integer is a ragged extent of a nested tensor, which has no value."""
        expr = getattr(value.node, "expr", None)
        if not isinstance(expr, sympy.Symbol):
            return expr is None
        return self._facts_of(value.node.shape_env).is_ragged(expr)

    def needed(self) -> set[str]:
        """Return the names of the sizes in use, without those that are written as other sizes."""
        return set(self.used) - (self._equal - self._asked)

    def _size(self, symbol: Any, env: Any) -> Size:
        name = str(symbol)
        size = self.used.get(name)
        if size is None:
            facts = self._facts_of(env)
            bounds = [self._convert(b, env) for b in facts.bounds(symbol, self.used)]
            size = Size(name, facts.hint(symbol), *facts.ends(symbol), tuple(bounds))
            self.used[name] = size
            if not facts.was_seen(symbol):
                self._unseen.add(size)
        return size

    def were_seen(self, value: Index) -> bool:
        """Return True if all sizes in an index have a traced value, so that signs are guarded."""
        return self._unseen.isdisjoint(sizes_in((value,)))

    def _symbol(self, symbol: Any, env: Any) -> Index:
        """Return a symbol's normal form: an equal expression, or its divisor times a quotient."""
        size = self._size(symbol, env)
        self._converted[symbol, False] = index(size)  # used while its divisor is converted
        facts = self._facts_of(env)
        if not self._normal:
            self._asked.add(size.name)
            return index(size)
        earlier = frozenset(itertools.takewhile(lambda name: name != size.name, self.used))
        value, divisor = facts.value(symbol, earlier), facts.divisor(symbol)
        if value is not None:
            self._equal.add(size.name)
            return self._convert(value, env)
        if divisor is None:
            return index(size)
        factor = self._convert(divisor, env)
        return factor * Quotient(index(size), factor)

    def _facts_of(self, env: Any) -> SizeFacts:
        if self._facts is None:
            self._facts = SizeFacts(env)
        return self._facts


def _exact_quotient(dividend: Index, divisor: Index) -> Index:
    """Divide where nothing is left: where the divisor is one product, it cancels the quotient."""
    value = dividend // divisor
    is_product = [c for _, c in divisor.terms] == [1] and not divisor.const
    plain = value is index(FloorDiv(dividend, divisor)) and dividend.as_size() is None
    return index(Quotient(dividend, divisor)) if plain and is_product else value


def _power(args: list[Index]) -> Index:
    base, exponent = args
    if not exponent.is_constant or not 0 <= exponent.const <= 8:
        raise Unsupported("a size with a power")
    return product([base] * exponent.const)


def _positive_part(value: Index) -> Index:
    """Return the sum of the terms with positive coefficients."""
    added = (product((c, *monomial)) for monomial, c in value.terms if c > 0)
    return sum(added, index(max(value.const, 0)))


def _new_minimum(number: int, args: tuple[Index, ...]) -> Minimum:
    lows = (k for k in (2, 1, 0) if all(is_nonnegative(a - k) for a in args))
    highs = (high for a in args if (high := most(a)) is not None)
    hint = min(a.hint() for a in args)
    return Minimum(f"min_{number}", hint, next(lows, None), min(highs, default=None), args)


_SIGNS = frozenset(("==", "!=", "<", "<=", ">", ">="))
"""The comparisons that Python and sympy spell the same."""

_REAL_RULES = {
    "Add": "add",
    "Mul": "mul",
    "Pow": "pow",
    "FloatPow": "pow",
    "IntTrueDiv": "div",
    "FloatTrueDiv": "div",
    "OpaqueUnaryFn_sqrt": "sqrt",
    "OpaqueUnaryFn_exp": "exp",
    "OpaqueUnaryFn_log": "log",
}

_RULES: dict[str, Callable[[list[Index]], Index]] = {
    "Add": lambda args: sum(args, index(0)),
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": lambda args: args[0] // args[1],
    "CleanDiv": lambda args: args[0] // args[1],
    "Mod": lambda args: args[0] % args[1],
    "PythonMod": lambda args: args[0] % args[1],
    "ModularIndexing": lambda args: (args[0] // args[1]) % args[2],
    "CeilDiv": lambda args: (args[0] + args[1] - 1) // args[1],
}

_UNBOUNDED_RULES: dict[str, Callable[[list[Index]], Index]] = {
    **_RULES,
    "FloorDiv": lambda args: index(FloorDiv(*args)),
    "Mod": lambda args: index(Mod(*args)),
    "PythonMod": lambda args: index(Mod(*args)),
}
"""The rules that do not simplify by known bounds of the arguments."""
