"""Operations on complex tensors that are not those of real ones on both parts.

A rule of ``of_complex`` gets complex tensors and numbers as ``ComplexValue``. All other operations
on complex tensors are computed by the rules of real ones (``stand_ins.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, Scalar, read
from fusec.frontend.complex_numbers import Parts, argument, from_polar
from fusec.frontend.fallbacks import CONTRACTION
from fusec.frontend.forms import interleaved, negated, part
from fusec.frontend.ops.domain import Domain, reduction, region
from fusec.frontend.ops.pointwise import convert, copy
from fusec.frontend.ops.products import multiplied
from fusec.frontend.ops.reductions import define_spread, spread_of
from fusec.frontend.ops.registry import Lowering, aten, lowers, prims
from fusec.frontend.ops.views import IntoSize, as_strided
from fusec.frontend.shapes import TensorType
from fusec.frontend.stand_ins import constant
from fusec.frontend.value import ComplexValue, TensorValue, Value, broadcast
from fusec.ir.dtype import BOOL, F64
from fusec.ir.expr import Const, Expr, op
from fusec.ir.index import index
from fusec.ir.monoid import SUM
from fusec.torch_interior import pytree

_RULES: dict[Any, Lowering] = {}

of_complex = partial(lowers, table=_RULES)
"""Register the decorated function as the rule of operations with complex operands or results.

Where it returns NotImplemented, the rule of real tensors is taken.
"""


def complex_lowering(
    target: Any, real: Lowering | None, results: Sequence[TensorType]
) -> Lowering | None:
    """Return the lowering of an operation with complex operands or results, if there is one.

    Args:
        real: its lowering for real tensors, if there is one.
        results: the traced types of its results.
    """
    own = _RULES.get(target)
    if own is None and real is None:
        return None

    def rule(call: AtenCall, *args: Any, **kwargs: Any) -> Any:
        made: Any = NotImplemented
        if own is not None:
            pairs = pytree.tree_map_only(complex, partial(constant, kind=F64), (args, kwargs))
            made = own.rule(call, *pairs[0], **pairs[1])
        if made is NotImplemented and real is not None:
            standing = pytree.tree_map(partial(_standing, call), (args, kwargs))
            made = real.rule(call, *standing[0], **standing[1])
        if made is NotImplemented:
            raise Unsupported("no rule for complex operands")
        if isinstance(made, tuple):
            return tuple(map(partial(_as_traced, call), made, results))
        return _as_traced(call, made, results[0])

    return Lowering(rule)


def _as_traced(call: AtenCall, made: TensorValue, kind: TensorType) -> TensorValue:
    """Return a result that may be in terms of stand-ins: complex or real, as its type says.

    Raises:
        Unsupported: for a complex tensor where the trace has a real one.
    """
    if isinstance(made, Value):
        made = call.lines.stand_ins.resolved(made)
    if isinstance(made, Value) and kind.is_complex:
        zero = Value(made.shape, made.dtype, made.axes, Const(0.0, made.dtype))
        return ComplexValue(made, zero)
    if isinstance(made, ComplexValue) and not kind.is_complex:
        raise Unsupported("a complex result where the trace has a real one")
    return made


def _standing(call: AtenCall, arg: Any) -> Any:
    match arg:
        case ComplexValue():
            return call.lines.stand_ins.of(arg)
        case complex():
            return call.lines.stand_ins.number(arg)
        case _:
            return arg


# -- parts ----------------------------------------------------------------------------------------


of_complex(aten.view_as_real.default, aten.view_as_real_copy.default)(
    lambda call, z: interleaved(z.re, z.im)
)
of_complex(aten.view_as_complex.default, aten.view_as_complex_copy.default)(
    lambda call, x: ComplexValue(part(x, 0), part(x, 1))
)
of_complex(aten.real.default)(lambda call, z: z.re)
of_complex(aten.imag.default)(lambda call, z: z.im)
of_complex(aten.resolve_conj.default, aten.resolve_neg.default)(lambda call, z: z)
lowers(aten._neg_view.default)(lambda call, x: negated(x))


@of_complex(aten.complex.default)
def complex_of(call: AtenCall, re: Value, im: Value) -> ComplexValue:
    def spread(x: Value) -> Value:
        return call.view(x, lambda at: broadcast(at, x.shape))

    return ComplexValue(spread(re), spread(im))


@of_complex(aten.polar.default)
def polar(call: AtenCall, length: Value, angle: Value) -> ComplexValue:
    def parts(at: Indices) -> Parts:
        return from_polar(*(read(x, at, call.out.dtype) for x in (length, angle)))

    re, im = (replace(call, name=f"{call.name}_{name}") for name in ("re", "im"))
    return ComplexValue(
        re.define(lambda at: parts(at).both[0]), im.define(lambda at: parts(at).both[1])
    )


@of_complex(
    aten.conj.default,
    aten._conj.default,
    aten._conj_copy.default,
    aten._conj_physical.default,
    aten.conj_physical.default,
)
def conjugate(call: AtenCall, z: ComplexValue) -> ComplexValue:
    return ComplexValue(z.re, negated(z.im))


@of_complex(aten.as_strided.default)
def strided_window(
    call: AtenCall,
    z: ComplexValue,
    size: Sequence[IntoSize],
    stride: Sequence[IntoSize],
    storage_offset: IntoSize | None = None,
) -> ComplexValue:
    """Return the window of both parts in the memory that interleaves them."""
    two, kind = index(2), call.out
    wide = replace(kind, shape=(*kind.shape, two), strides=(*kind.strides, index(1)))
    steps = (*(index(step) * 2 for step in stride), index(1))
    offset = index(storage_offset or 0) * 2
    whole = interleaved(z.re, z.im)
    made = as_strided(replace(call, results=(wide,)), whole, (*size, two), steps, offset)
    return ComplexValue(part(made, 0), part(made, 1))


# -- real numbers of complex ones -----------------------------------------------------------------


@of_complex(aten.angle.default)
def angle(call: AtenCall, z: ComplexValue) -> Value:
    return call.define(lambda at: argument(Parts(z.re.at(at), z.im.at(at))).re)


@of_complex(aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default)
def converted(call: AtenCall, z: TensorValue, dtype: Any = None, *_: Any, **named: Any) -> Any:
    """Return the real part as another type; a truth value is that of the complex number."""
    dtype = named.get("dtype", dtype)
    kept = not isinstance(dtype, torch.dtype) or dtype.is_complex or dtype is torch.bool
    return NotImplemented if kept or isinstance(z, Value) else convert(call, z.re)


@of_complex(aten.copy.default)
def copied(call: AtenCall, x: TensorValue, source: TensorValue, *_: Any) -> Any:
    truth = call.out.dtype is BOOL
    if isinstance(x, ComplexValue) or isinstance(source, Value) or truth:
        return NotImplemented
    return copy(call, x, source.re)


@of_complex(aten.linalg_vector_norm.default)
def vector_norm(
    call: AtenCall,
    z: ComplexValue,
    ord: Scalar = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    **_: Any,
) -> Any:
    """Emit the root of the sum of the squares of all parts; other norms are of absolute values."""
    if ord != 2:
        return NotImplemented
    kind = call.out.dtype

    def square(points: Domain) -> Expr:
        re, im = points.read(z.re, kind), points.read(z.im, kind)
        return re * re + im * im

    squares = reduction(region(z.re, dims, keepdim).at, SUM, square)
    return call.define(lambda at: op("sqrt", squares(at)))


def spread(
    root: bool,
    call: AtenCall,
    z: ComplexValue,
    dims: Any = None,
    *,
    keepdim: bool = False,
    correction: Scalar | None = None,
) -> Any:
    """Emit the variance, which is the sum of those of the parts, or its root; then the mean."""
    over = region(z.re, dims, keepdim)
    parts = (spread_of(call, x, over, correction) for x in (z.re, z.im))
    variance, *means = define_spread(root, call, *parts)
    return (variance, ComplexValue(*means)) if means else variance


for _name, _root in (("var", False), ("std", True)):
    of_complex(getattr(aten, _name).correction, getattr(aten, f"{_name}_mean").correction)(
        partial(spread, _root)
    )


# -- products -------------------------------------------------------------------------------------


@of_complex(aten.mm.default, aten.bmm.default)
def product(call: AtenCall, a: ComplexValue, b: ComplexValue) -> Value:
    """Emit the product of two matrices, or of each pair in a batch, as a sum.

    It has at most ``small_product`` terms, which cost less than reading the operands, or few steps
    in all; others are the library's.
    """
    terms, kind, (_, few) = a.shape[-1], call.out.dtype, call.lines.fusion.small_product
    if not call.lines.alone and not (terms.is_constant and terms.const <= few):
        call.check_steps((terms,), CONTRACTION)
    left, right = map(call.lines.stand_ins.of, (a, b))
    return multiplied(call, left, right, lambda x, at: read(x, at, kind))
