"""Run the rules of real operations on complex tensors.

A rule gets a real tensor that stands for each complex one. What it defines is an expression of
loads of these stand-ins, and is computed for both parts: sums, views and choices part by part,
scalar operations by ``complex_numbers.py``. What has no meaning for complex numbers, such as their
maximum, is refused there.

Worked example: ``x * y`` of complex tensors is ``mul[i0] = x[i0] * y[i0]`` of two stand-ins, and
becomes two definitions of the parts::

    mul_re[i0] = x[i0, 0] * y[i0, 0] - x[i0, 1] * y[i0, 1]
    mul_im[i0] = x[i0, 0] * y[i0, 1] + x[i0, 1] * y[i0, 0]
"""

from __future__ import annotations

from collections.abc import Mapping

from fusec.errors import Unsupported
from fusec.frontend.complex_numbers import Parts, computed, truth
from fusec.frontend.value import ComplexValue, Number, TensorValue, Value, make_axes, whole
from fusec.ir.dtype import BOOL, F64, DType
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    Reduce,
    Select,
    cast,
    children,
    postorder,
    rebuild,
)
from fusec.ir.monoid import SUM


class StandIns:
    """The complex tensors of one graph that real ones stand for."""

    def __init__(self) -> None:
        self._meant: dict[Buffer, ComplexValue] = {}

    def of(self, z: ComplexValue) -> Value:
        """Return a real tensor that stands for a complex one."""
        buffer = Buffer.row_major("z", z.shape, z.re.dtype)
        self._meant[buffer] = z
        return whole(buffer)

    def number(self, value: complex) -> Number:
        """Return a number that stands for a complex one."""
        return Number(self.of(constant(value, F64)).expr)

    def resolved(self, made: Value) -> TensorValue:
        """Return the tensor that a rule has made: a complex one, if stand-ins are in it."""
        parts = self.split(made.expr)
        re = made if parts.re is made.expr else Value(made.shape, made.dtype, made.axes, parts.re)
        if parts.im is None:
            return re
        return ComplexValue(re, Value(made.shape, made.dtype, made.axes, parts.im))

    def split(self, root: Expr) -> Parts:
        """Return the parts of an expression that may load stand-ins.

        Raises:
            Unsupported: for an operation without a meaning for complex numbers.
        """
        if not self._meant:
            return Parts(root)
        found: dict[Expr, Parts] = {}
        for node in postorder((root,)):
            if isinstance(node, Load) and node.buffer in self._meant:
                found[node] = self._loaded(node, found)
            elif any(child in found for child in children(node)):
                found[node] = _split(node, found)
        return found.get(root, Parts(root))

    def _loaded(self, load: Load, found: Mapping[Expr, Parts]) -> Parts:
        if any(child in found for child in load.children):
            raise Unsupported("an index computed from complex numbers")
        meant = self._meant[load.buffer]
        re, im = (x.at(load.indices, load.guard) for x in (meant.re, meant.im))
        return Parts(re, im)


def constant(value: complex, kind: DType, shape: tuple[()] = ()) -> ComplexValue:
    """Return a number as a tensor without axes."""
    numbers = (value.real, value.imag)
    re, im = (Value(shape, kind, make_axes(shape), Const(number, kind)) for number in numbers)
    return ComplexValue(re, im)


def _split(node: Expr, found: Mapping[Expr, Parts]) -> Parts:
    """Return the parts of a node of which some children have parts of their own."""
    below = {child: found.get(child, Parts(child)) for child in children(node)}
    if all(part.im is None for part in below.values()):
        return Parts(rebuild(node, {child: part.re for child, part in below.items()}, None))
    match node:
        case Op(name=name, args=args):
            return computed(name, tuple(below[arg] for arg in args))
        case Cast(arg=arg, dtype=kind) if kind is BOOL:
            return truth(below[arg])
        case Cast(arg=arg, dtype=kind) if kind.is_float:
            re, im = below[arg].both
            return Parts(cast(re, kind), cast(im, kind))
        case Select(condition=condition, then=then, other=other):
            chosen = zip(below[then].both, below[other].both, strict=True)
            re, im = (Select(below[condition].re, a, b) for a, b in chosen)
            return Parts(re, im)
        case Reduce(monoid=monoid, over=over, bodies=(body,)) if monoid is SUM:
            re, im = below[body].both
            return Parts(Reduce(SUM, over, re), Reduce(SUM, over, im))
        case Reduce(monoid=monoid):
            raise Unsupported(f"{monoid} of complex numbers")
        case _:
            raise Unsupported("an operation on complex numbers")
