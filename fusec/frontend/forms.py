"""Tensors as memory has them: real numbers, and the form in which torch takes these.

Buffers and expressions have real numbers. A complex tensor of shape [*s] is a real one of shape
[*s, 2], whose last axis is that of the two parts; a tensor with torch's conjugate or negative bit
is the one under the bit, and its values are computed from there. So only the wrapper, which calls
eager kernels and returns tensors, has complex numbers and bits (``NumberForm``).

Worked example: z of c64[8] in memory is a buffer f32[8, 2], and its value is the pair of windows
``z[i0, 0]`` and ``z[i0, 1]``. ``z.conj()`` is ``z[i0, 0]`` and ``-z[i0, 1]``: as an argument of an
eager kernel it is the buffer itself, in the conjugate form.
"""

from __future__ import annotations

import torch

from fusec.errors import Unsupported
from fusec.frontend.value import ComplexValue, TensorValue, Value, make_axes, positions
from fusec.ir.dtype import NumberForm
from fusec.ir.expr import Expr, IndexValue, Load, Op, Select, op
from fusec.ir.index import Index, index

COMPLEX_DTYPES = (torch.complex64, torch.complex128)
_ONE, _PARTS = index(1), index(2)


def form_of(traced: torch.Tensor) -> NumberForm:
    """Return the form of a traced tensor.

    Raises:
        Unsupported: for a complex tensor with the negative bit. Eager makes none; AOTAutograd does
            of a write to the imaginary part of a conjugate, and expects it of what is returned.
    """
    if traced.dtype in COMPLEX_DTYPES:
        if traced.is_neg():
            raise Unsupported("a complex tensor with the negative bit")
        return NumberForm.CONJUGATE if traced.is_conj() else NumberForm.COMPLEX
    return NumberForm.NEGATIVE if traced.is_neg() else NumberForm.PLAIN


def without_bit(form: NumberForm) -> NumberForm:
    """Return the form of the same values without torch's negative or conjugate bit."""
    return NumberForm.COMPLEX if form.is_complex else NumberForm.PLAIN


def value_of_memory(memory: Value, form: NumberForm) -> TensorValue:
    """Return the value of a tensor, given what is in its memory."""
    match form:
        case NumberForm.PLAIN:
            return memory
        case NumberForm.NEGATIVE:
            return negated(memory)
        case NumberForm.COMPLEX:
            return ComplexValue(part(memory, 0), part(memory, 1))
        case NumberForm.CONJUGATE:
            return ComplexValue(part(memory, 0), negated(part(memory, 1)))


def memory_of_value(value: TensorValue, form: NumberForm) -> Value:
    """Return the numbers in memory of a value's tensor: the inverse of ``value_of_memory``."""
    if isinstance(value, Value):
        return negated(value) if form is NumberForm.NEGATIVE else value
    return interleaved(value.re, negated(value.im) if form is NumberForm.CONJUGATE else value.im)


def negated(x: Value) -> Value:
    """Return a tensor times -1."""
    match x.expr:
        case Op(name="neg", args=(inner,)):
            expr: Expr = inner
        case expr:
            expr = -expr
    return Value(x.shape, x.dtype, x.axes, expr)


def part(memory: Value, which: int) -> Value:
    """Return one of the two parts that the last axis of a tensor enumerates."""
    axes = make_axes(memory.shape[:-1])
    expr = memory.at((*positions(axes), index(which)))
    return Value(memory.shape[:-1], memory.dtype, axes, expr)


def interleaved(re: Value, im: Value) -> Value:
    """Return two parts as one tensor with an axis of the parts.

    If they are neighbours in one buffer, it is a window of that, without a copy.
    """
    axes = make_axes((*re.shape, _PARTS))
    *at, which = positions(axes)
    first, second = re.at(tuple(at)), im.at(tuple(at))
    expr: Expr | None = _window(first, second, which)
    if expr is None:
        expr = Select(op("lt", IndexValue(which), IndexValue(_ONE)), first, second)
    return Value((*re.shape, _PARTS), re.dtype, axes, expr)


def _window(first: Expr, second: Expr, which: Index) -> Load | None:
    """Return the load at ``which`` of two loads that differ by one in one index, or None."""
    match first, second:
        case Load(buffer=buffer, guard=guard), Load() if (
            second.buffer is buffer and second.guard is guard
        ):
            pairs = list(zip(first.indices, second.indices, strict=True))
            apart = [k for k, (a, b) in enumerate(pairs) if a is not b]
            if len(apart) == 1 and pairs[apart[0]][1] is pairs[apart[0]][0] + 1:
                (k,) = apart
                at = first.indices
                return Load(buffer, (*at[:k], at[k] + which, *at[k + 1 :]), guard)
    return None
