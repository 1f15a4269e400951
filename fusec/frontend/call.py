"""The FX node that is being lowered: its traced types, and the methods that emit definitions.

Types. Arithmetic is done in the compute type of the result (f32 for 16-bit floats, i32 for small
integers); operands are cast when they are loaded and the result when it is stored. A later pass
removes such a pair of casts between two definitions of one kernel. So a discontinuous operation
loads 16-bit floats *exactly*, through ``round_bf16`` or ``round_f16``, which that pass keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from fusec.errors import InternalError, Unsupported
from fusec.frontend.shapes import SizeMap, TensorType, from_torch_dtype, to_torch_dtype
from fusec.frontend.stand_ins import StandIns
from fusec.frontend.value import ComplexValue, Number, Value, broadcast, make_axes, positions, whole
from fusec.ir.dtype import BOOL, F32, I32, I64, DType, Kind, NumberForm, compute_type
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, cast, op
from fusec.ir.graph import Def, Line, Origin
from fusec.ir.index import Index, index, product
from fusec.ir.machine import FusionTuning
from fusec.ir.names import Names
from fusec.ir.scalar import ROUND
from fusec.ir.strides import contiguous_strides

Indices: TypeAlias = tuple[Index, ...]
Body: TypeAlias = Callable[[Indices], Expr]
Scalar: TypeAlias = "Value | Number | Index | int | float | bool"


@dataclass(slots=True)
class GraphBuilder:
    """The graph that is being captured: its definitions and externs, and the names in use.

    Attributes:
        alone: no library may be called.
        device: the type of device that the code is for.
        fusion: the thresholds of its machine.
        slow: types of which the library multiplies matrices element by element.
        eager_choices: what torch leaves open is as eager's kernels have it.
    """

    alone: bool = False
    device: str = "cpu"
    fusion: FusionTuning = field(default_factory=FusionTuning)
    slow: frozenset[DType] = frozenset()
    eager_choices: bool = False
    sizes: SizeMap = field(default_factory=SizeMap)
    nodes: list[Line] = field(default_factory=list)
    names: Names = field(default_factory=lambda: Names(separator="_v"))
    stand_ins: StandIns = field(default_factory=StandIns)

    def buffer(self, name: str, kind: TensorType, form: NumberForm = NumberForm.PLAIN) -> Buffer:
        """Return a new buffer of type ``kind``; its name is ``name`` made safe and unique."""
        return Buffer(self.names.new(name), kind.shape, kind.strides, kind.dtype, form)

    def define(self, buffer: Buffer, body: Body, origin: Origin) -> Value:
        """Append ``buffer[axes] = body(axes)`` and return the buffer as a value.

        If the value is complex, a buffer for each part is defined instead.
        """
        axes = make_axes(buffer.shape)
        parts = self.stand_ins.split(cast(body(positions(axes)), buffer.dtype))
        if parts.im is None:
            self.nodes.append(Def(buffer, axes, parts.re, origin))
            return whole(buffer)
        self.names.release(buffer.name)
        made = []
        for suffix, expr in (("re", parts.re), ("im", parts.im)):
            name = self.names.new(f"{buffer.name}_{suffix}")
            part = Buffer(name, buffer.shape, buffer.strides, buffer.dtype)
            own = make_axes(part.shape)
            there = expr.substitute(dict(zip(axes, map(index, own), strict=True)))
            self.nodes.append(Def(part, own, there, origin))
            made.append(whole(part))
        return self.stand_ins.of(ComplexValue(*made))


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One call of an ATen operation.

    Attributes:
        name: the prefix of its buffers' names.
        results: the type of each tensor it returns.
        outputs: the buffers to define, if the lowering is the decomposition of an ``Extern``.
    """

    lines: GraphBuilder
    name: str
    results: tuple[TensorType, ...]
    origin: Origin
    outputs: tuple[Buffer | None, ...] = ()

    @property
    def out(self) -> TensorType:
        return self.results[0]

    @property
    def is_cpu(self) -> bool:
        """True if the code runs on a CPU; False if code for a GPU is made from CPU tensors."""
        return self.lines.device == self.out.device.type == "cpu"

    def check_steps(self, terms: Indices, reason: str) -> None:
        """Check that a direct form, which reduces some extents for each element, has few steps.

        Raises:
            Unsupported: with the reason, if they are many or of symbolic number.
        """
        if not self.takes_few_steps(terms):
            raise Unsupported(reason)

    def takes_few_steps(self, terms: Indices) -> bool:
        """Return whether a direct form over ``terms`` has few steps, of known number."""
        steps = product((*self.out.shape, *terms))
        return steps.is_constant and steps.const <= self.lines.fusion.direct_steps

    def takes_few_terms(self, terms: Indices) -> bool:
        """Return whether a direct form over ``terms`` has few for each element, of known number."""
        count = product(terms)
        return count.is_constant and count.const <= self.lines.fusion.direct_terms

    def define(self, body: Body, result: int = 0) -> Value:
        """Emit the definition of one result: ``result[axes] = body(axes)``, cast to its type.

        A tensor whose traced strides overlap gets row-major memory.
        """
        if self.outputs:
            given = self.outputs[result]
            if given is None:
                raise Unsupported("a result that is no tensor")
            return self.lines.define(given, body, self.origin)
        name = self.name if len(self.results) == 1 else f"{self.name}_{result}"
        kind = self.results[result]
        if kind.overlaps:
            kind = replace(kind, strides=contiguous_strides(kind.shape))
        buffer = self.lines.buffer(name, kind)
        return self.lines.define(buffer, body, self.origin)

    def scratch(self, suffix: str, shape: Indices, dtype: DType, body: Body) -> Value:
        """Emit the definition of a row-major intermediate that is not a result."""
        kind = TensorType(shape, contiguous_strides(shape), dtype, self.out.device)
        buffer = self.lines.buffer(f"{self.name}_{suffix}", kind)
        return self.lines.define(buffer, body, self.origin)

    def lazy(self, body: Body) -> Value:
        """Return ``body`` as a value without emitting anything: for constants."""
        axes, kind = make_axes(self.out.shape), self.out.dtype
        return Value(self.out.shape, kind, axes, cast(body(positions(axes)), kind))

    def view(self, x: Value, where: Callable[[Indices], Indices], result: int = 0) -> Value:
        """Return ``x`` loaded at ``where(indices)``; nothing is emitted."""
        axes = make_axes(self.results[result].shape)
        expr = x.at(where(positions(axes)))
        return Value(self.results[result].shape, x.dtype, axes, expr)

    def pointwise(
        self, compute: Callable[..., Expr], *args: Scalar, kind: DType | None = None
    ) -> Value:
        """Emit ``compute`` of the operands, broadcast and cast to ``kind``.

        Args:
            kind: the common type of the operands; by default that of the result.
        """
        kind = kind or common_type(self.out.dtype)
        return self.define(lambda at: compute(*[read(a, at, kind) for a in args]))

    def narrowed(self, *args: Scalar, kind: DType | None = None) -> list[Scalar]:
        """Return operands as eager loads them: on CPUs, scalars are rounded to a 16-bit ``kind``.

        Scalars are numbers, and 0-dimensional tensors of another type. Not for factors and
        divisors, which eager loads in f32; on GPUs all operands are in f32.

        Args:
            kind: by default the result's type.
        """
        kind = kind or self.out.dtype
        return (
            [_narrowed(arg, kind) for arg in args] if self.is_cpu and kind in ROUND else list(args)
        )

    def pointwise_exact(
        self, compute: Callable[..., Expr], *args: Scalar, kind: DType | None = None
    ) -> Value:
        """Emit a discontinuous operation: as ``pointwise``, 16-bit floats loaded exactly."""
        kind = kind or common_type(self.out.dtype)
        return self.define(lambda at: compute(*[read_exact(a, at, kind) for a in args]))


def arithmetic_type(dtype: DType) -> DType:
    """Return the type in which a result of type ``dtype`` is computed; i32 for bool."""
    return I32 if dtype is BOOL else compute_type(dtype)


def common_type(dtype: DType) -> DType:
    """Return the type that operands are cast to: small integers wrap before they widen."""
    return dtype if dtype.is_integer else arithmetic_type(dtype)


def result_type(x: Any, y: Any) -> DType:
    """Return the type in which an operation on two arguments is done, as torch promotes them.

    Tensors with axes outrank those without, which outrank Python numbers: a lower rank changes it
    only if its category (bool < integer < float) is higher. So ``i64[3] * 0.5`` is f32.
    """
    return from_torch_dtype(torch.result_type(_promoting(x), _promoting(y)))


def _promoting(arg: Any) -> torch.Tensor | float:
    """Return a tensor, or a number, that promotes as an argument does."""
    match arg:
        case Value():
            return torch.empty([1] if arg.shape else [], dtype=to_torch_dtype(arg.dtype))
        case bool():
            return arg
        case int() | Index():
            return 1
        case float() | Number():
            return 1.0
        case _:
            raise Unsupported("an argument that is not a number")


def read(arg: Scalar, at: Indices, kind: DType) -> Expr:
    """Return the element of a broadcast operand at ``at``, as the compute type of ``kind``.

    Where ``kind`` is a small integer, wider operands wrap to it, as an i64 number does with a u8
    tensor.
    """
    wide = compute_type(kind)
    if kind is not wide and isinstance(arg, int):
        return Const(_wrapped(int(arg), kind), wide)
    if kind is not wide:
        value = arg.at(broadcast(at, arg.shape)) if isinstance(arg, Value) else read(arg, at, I64)
        return cast(cast(value, kind), wide)
    match arg:
        case Value():
            return cast(arg.at(broadcast(at, arg.shape)), kind)
        case Index():
            return cast(IndexValue(arg), kind)
        case Number():
            return cast(arg.expr, kind)
        case bool() | int() | float():
            return number(arg, kind)
        case _:
            raise InternalError(arg, stage="frontend")


def read_exact(arg: Scalar, at: Indices, kind: DType) -> Expr:
    """Return the element as ``read`` does, rounded to the operand's type if a 16-bit float."""
    if isinstance(arg, Value) and arg.dtype in ROUND:
        return cast(op(ROUND[arg.dtype], read(arg, at, F32)), kind)
    return read(arg, at, kind)


def number(value: float | int | bool, kind: DType) -> Expr:
    """Return a Python number as a constant of ``kind``; integers wrap to its range, as in eager.

    Raises:
        Unsupported: for infinity or NaN as an integer.
    """
    if isinstance(value, float) and kind.is_integer and not math.isfinite(value):
        raise Unsupported("a number that is not finite, as an integer")
    return Const(_wrapped(int(value), kind) if kind.is_integer else value, kind)


def _wrapped(value: int, kind: DType) -> int:
    bits = 8 * kind.itemsize
    low = 0 if kind.kind is Kind.UNSIGNED else -(1 << (bits - 1))
    return (value - low) % (1 << bits) + low


def _narrowed(arg: Scalar, dtype: DType) -> Scalar:
    match arg:
        case Value(shape=(), dtype=kind) if kind not in (dtype, BOOL):
            rounded = op(ROUND[dtype], cast(arg.expr, F32))
            return replace(arg, dtype=dtype, expr=cast(rounded, dtype))
        case Number():
            return Number(op(ROUND[dtype], cast(arg.expr, F32)))
        case int() | float() if not isinstance(arg, bool):
            return round_number(float(arg), dtype)
        case _:
            return arg


def round_number(value: float, dtype: DType) -> float:
    """Return ``value`` rounded to ``dtype``, for floats of up to 32 bits."""
    if dtype is not F32 and dtype not in ROUND:
        return value
    return torch.tensor(value, dtype=to_torch_dtype(dtype)).item()
