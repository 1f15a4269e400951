"""Random graphs in index notation, for the comparison of a pipeline with the interpreter.

All values are integers small enough that every operation, in whatever order, is exact in f32, and
that 16-bit types hold them, unless an explicit rounding says otherwise: results must be equal to
the last bit, and no tolerance hides a fault.

``graph(seed)`` is the same graph for the same seed. It draws a few extents (constants, sometimes
sizes), a few inputs, then definitions. Each reads earlier buffers through random index maps:
permutations, reshapes that merge or split axes, slices, flips, rolls, strides, guarded pads,
repetitions, broadcasts, gathers, concatenations. Some definitions reduce, once, twice or nested.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fusec.ir.dtype import BF16, BOOL, F16, F32, F64, I32, I64, DType
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    both,
    in_range,
)
from fusec.ir.graph import Def, Extern, Graph, View
from fusec.ir.index import Axis, Index, Runtime, Size, index, product
from fusec.ir.monoid import ALL, ANY, ARGMAX, ARGMIN, MAX, MIN, SUM, Monoid
from fusec.ir.strides import contiguous_strides

EXTENTS = (1, 2, 3, 5, 7, 8, 16, 17, 32, 33)
MOST_POINTS = 200
MOST = 1 << 12
"""Greatest magnitude of a stored value; sums stay below 2**24."""
HALF_MOST = 256
"""Greatest integer up to which all are exact in bf16."""


@dataclass(frozen=True)
class Value:
    """A buffer that may be read, and the greatest magnitude of its elements."""

    buffer: Buffer
    bound: int


@dataclass(frozen=True)
class Example:
    """A graph and values for its inputs."""

    graph: Graph
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class _Term:
    expr: Expr
    bound: int


class _Generator:
    def __init__(self, seed: int, *, symbols: bool, count: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.values: list[Value] = []
        self.inputs: list[Buffer | Size | None] = []
        self.arrays: list[Any] = []
        self.nodes: list[Def | Extern] = []
        self.sizes: dict[Size, int] = {}
        chosen = self.random.sample(EXTENTS, 3)
        self.extents: list[Index] = [index(n) for n in chosen]
        if symbols:
            for k in range(self.random.randint(1, 2)):
                size = Size(f"s{k}", self.random.choice(EXTENTS[1:]))
                actual = size.hint if self.random.random() < 0.4 else self.random.choice(EXTENTS)
                self.sizes[size] = actual
                self.extents[k] = index(size)
                self.inputs.append(size)
                self.arrays.append(actual)
        self.count = count

    # -- shapes ------------------------------------------------------------------------------------

    def actual(self, extent: Index) -> int:
        total = extent.const
        for monomial, coefficient in extent.terms:
            for atom in monomial:
                assert isinstance(atom, Size)
                coefficient *= self.sizes[atom]
            total += coefficient
        return total

    def points(self, shape: tuple[Index, ...]) -> int:
        return max(self.actual(product(shape)), product(shape).hint())

    def fresh_shape(self) -> tuple[Index, ...]:
        while True:
            rank = self.random.choice((1, 2, 2, 2, 3, 3))
            shape = tuple(self.random.choice(self.extents) for _ in range(rank))
            if self.points(shape) <= MOST_POINTS:
                return shape

    def some_shape(self) -> tuple[Index, ...]:
        """Return a shape near that of a known value, so that axes can unify."""
        if not self.values or self.random.random() < 0.1:
            return self.fresh_shape()
        shape = list(self.pick().buffer.shape)
        draw = self.random.random()
        if draw < 0.2:
            self.random.shuffle(shape)
        elif draw < 0.35 and len(shape) > 1:  # merge
            k = self.random.randrange(len(shape) - 1)
            shape[k : k + 2] = [shape[k] * shape[k + 1]]
        elif draw < 0.45 and shape:  # split
            k = self.random.randrange(len(shape))
            if shape[k].is_constant:
                n = shape[k].const
                divisors = [d for d in range(2, n) if n % d == 0]
                if divisors:
                    d = self.random.choice(divisors)
                    shape[k : k + 1] = [index(n // d), index(d)]
        elif draw < 0.5:
            shape.insert(self.random.randrange(len(shape) + 1), index(1))
        elif draw < 0.55 and shape:  # slice or pad
            k = self.random.randrange(len(shape))
            if shape[k].is_constant:
                shape[k] = index(max(1, shape[k].const + self.random.choice((-2, -1, 1, 3))))
        return tuple(shape) if self.points(tuple(shape)) <= MOST_POINTS else self.fresh_shape()

    def pick(self) -> Value:
        # Recent values more often: chains are what fuses.
        k = min(int(self.random.expovariate(0.4)), len(self.values) - 1)
        return self.values[-1 - k]

    # -- inputs ------------------------------------------------------------------------------------

    def add_input(self, shape: tuple[Index, ...], dtype: DType, low: int, high: int) -> Value:
        strides = list(contiguous_strides(shape))
        lengths = [self.actual(n) for n in shape]
        draw = self.random.random()
        if draw < 0.15 and len(shape) > 1:  # transposed
            strides = list(contiguous_strides(shape[::-1]))[::-1]
        elif draw < 0.25 and len(shape) > 1:  # padded rows
            strides = [s * 1 for s in contiguous_strides((*shape[:-1], shape[-1] + 3))]
        elif draw < 0.3 and shape:  # expanded
            strides[0] = index(0)
            lengths[0] = 1
        data = self.numbers.integers(low, high + 1, lengths)
        data = np.broadcast_to(data, [self.actual(n) for n in shape])
        buffer = Buffer(f"in{len(self.inputs)}", shape, tuple(strides), dtype)
        self.inputs.append(buffer)
        self.arrays.append(data.astype(np.float64) if dtype.is_float else data)
        return Value(buffer, max(abs(low), abs(high)))

    # -- reading -----------------------------------------------------------------------------------

    def read(self, value: Value, axes: tuple[Axis, ...]) -> _Term:
        """Return an element of ``value`` for each point of ``axes``, through a random index map."""
        buffer, shape = value.buffer, value.buffer.shape
        extents = tuple(a.extent for a in axes)
        indices, guard = None, None
        draw = self.random.random()
        if product(extents) is product(shape) and draw < 0.9:
            if extents == shape and draw < 0.6:
                indices = tuple(index(a) for a in axes)
            else:
                indices = self.reshaped(axes, shape, shuffle=draw > 0.8)
        if indices is None:
            indices, guard = self.aligned(axes, shape)
        return _Term(_widened(Load(buffer, indices, guard)), value.bound)

    def reshaped(
        self, axes: tuple[Axis, ...], shape: tuple[Index, ...], *, shuffle: bool
    ) -> tuple[Index, ...]:
        order = list(axes)
        if shuffle:
            self.random.shuffle(order)
        flat = index(0)
        for axis in order:
            flat = flat * axis.extent + index(axis)
        found: list[Index] = []
        steps = contiguous_strides(shape)
        for step, extent in zip(steps, shape, strict=True):
            found.append(flat // step % extent if extent is not index(1) else index(0))
        return tuple(found)

    def aligned(
        self, axes: tuple[Axis, ...], shape: tuple[Index, ...]
    ) -> tuple[tuple[Index, ...], Expr | None]:
        left = list(axes)
        guard: Expr | None = None
        found: list[Index] = []
        for extent in reversed(shape):
            equal = [a for a in left if a.extent is extent]
            pool = equal if equal and self.random.random() < 0.85 else left
            if extent is index(1):
                found.append(index(0))
            elif not pool or self.random.random() < 0.05:
                found.append(self.constant_or_gather(axes, extent))
            else:
                axis = pool[-1] if self.random.random() < 0.7 else self.random.choice(pool)
                left.remove(axis)
                position, inner = self.along(axis, extent)
                found.append(position)
                guard = both(guard, inner)
        return tuple(found[::-1]), guard

    def constant_or_gather(self, axes: tuple[Axis, ...], extent: Index) -> Index:
        if self.random.random() < 0.5 or not axes:
            least = extent.const if extent.is_constant else 1
            return index(self.random.randrange(least))
        axis = self.random.choice(axes)
        if extent.is_constant and self.random.random() < 0.5:
            term = self.read(self.pick(), (axis,)).expr
            term = Op("minimum", (Op("maximum", (_f32(term), _const(0))), _const(extent.const - 1)))
            return index(Runtime(Cast(term, I64), extent))
        high = min(self.actual(extent), extent.hint()) - 1
        ids = self.add_input((axis.extent,), I64, 0, high)
        return index(Runtime(Load(ids.buffer, (index(axis),)), extent))

    def along(self, axis: Axis, extent: Index) -> tuple[Index, Expr | None]:
        """Return a position below ``extent`` for each point of ``axis``, and a guard or None."""
        here, draw = index(axis), self.random.random()
        if axis.extent is extent:
            if draw < 0.8:
                return here, None
            if draw < 0.9:
                return extent - 1 - here, None
            return (here + self.random.randint(1, 3)) % extent, None
        if axis.extent.is_constant and extent.is_constant:
            have, want = extent.const, axis.extent.const
            if have >= want:
                if have >= 2 * want and draw < 0.4:
                    return here * 2 + self.random.randint(0, have - 2 * want), None
                return here + self.random.randint(0, have - want), None
            if draw < 0.2:
                return here % extent, None
            if draw < 0.4 and want % have == 0:
                return here // index(want // have), None
            offset = self.random.randint(0, want - have)
            return here - offset, in_range(here - offset, 0, extent)
        return here, in_range(here, 0, extent)

    # -- expressions -------------------------------------------------------------------------------

    def term(self, axes: tuple[Axis, ...], depth: int = 2) -> _Term:
        """Return a random pointwise expression over ``axes``."""
        draw = self.random.random()
        if depth == 0 or draw < 0.2:
            if draw < 0.02 and axes:
                axis = self.random.choice(axes)
                return _Term(
                    Cast(IndexValue(index(axis)), F32),
                    max(self.actual(axis.extent), axis.extent.hint()),
                )
            if draw < 0.04:
                number = self.random.randint(-4, 4)
                return _Term(_const(number), abs(number))
            return self.read(self.pick(), axes)
        a = self.term(axes, depth - 1)
        if draw < 0.4:
            return self.unary(a)
        return self.binary(a, self.term(axes, depth - 1))

    def unary(self, a: _Term) -> _Term:
        a = _Term(_f32(a.expr), a.bound)
        match self.random.choice(("neg", "abs", "relu", "round", "cast", "twice")):
            case "neg":
                return _Term(Op("neg", (a.expr,)), a.bound)
            case "abs":
                return _Term(Op("abs", (a.expr,)), a.bound)
            case "relu":
                return _Term(Op("maximum", (a.expr, _const(0))), a.bound)
            case "round":
                return _Term(Op("round_bf16", (a.expr,)), a.bound + a.bound // 64)
            case "cast":
                return _Term(_f32(Cast(a.expr, self.random.choice((I64, I32, F64)))), a.bound)
            case _:
                return _Term(Op("mul", (a.expr, _const(2))), 2 * a.bound)

    def binary(self, a: _Term, b: _Term) -> _Term:
        dtype = self.random.choice((F32, F32, F32, F32, F64, I64))
        x, y = _as(a.expr, dtype), _as(b.expr, dtype)
        name = self.random.choice(("add", "sub", "mul", "minimum", "maximum", "select", "compare"))
        if name == "mul" and a.bound * b.bound > MOST:
            name = "add"
        match name:
            case "add" | "sub":
                return _Term(Op(name, (x, y)), a.bound + b.bound)
            case "mul":
                return _Term(Op(name, (x, y)), a.bound * b.bound)
            case "minimum" | "maximum":
                return _Term(Op(name, (x, y)), max(a.bound, b.bound))
            case "select":
                return _Term(
                    Select(Op(self.random.choice(("lt", "eq")), (x, y)), y, x),
                    max(a.bound, b.bound),
                )
            case _:
                return _Term(Cast(Op(self.random.choice(("le", "ne")), (x, y)), F32), 1)

    def reduced(self, axes: tuple[Axis, ...], over: tuple[Axis, ...], depth: int) -> _Term:
        """Return a random reduction over ``over`` of an expression over both."""
        body = self.limited(self.term((*axes, *over), depth), MOST)
        if self.random.random() < 0.15 and over:  # nested: normalised by a reduction of its own
            twins = tuple(Axis(f"{a.name}q", a.extent) for a in over)
            other = self.reduced(axes, twins, 1)
            body = self.binary(body, self.limited(other, MOST))
        return self.reduce_body(over, self.limited(body, MOST))

    def reduce_body(self, over: tuple[Axis, ...], body: _Term) -> _Term:
        many = self.points(tuple(a.extent for a in over))
        monoid: Monoid = self.random.choice((SUM, SUM, SUM, MAX, MIN, ANY, ALL))
        if monoid in (ANY, ALL):
            test = Op("lt", (_f32(body.expr), _const(1)))
            return _Term(Cast(Reduce(monoid, over, test), F32), 1)
        if body.bound * many >= 1 << 22 and monoid is SUM:
            monoid = MAX
        bound = body.bound * many if monoid is SUM else body.bound
        if monoid in (MAX, MIN) and self.random.random() < 0.3:
            return self.place(ARGMAX if monoid is MAX else ARGMIN, over, body, many)
        return _Term(Reduce(monoid, over, _f32(body.expr)), bound)

    def place(self, monoid: Monoid, over: tuple[Axis, ...], body: _Term, many: int) -> _Term:
        """Return where an extreme is, by numbers of points in random order."""
        key, axes = index(0), self.random.sample(over, len(over))
        for axis in axes:
            key = key * axis.extent + index(axis)
        where = IndexValue(key, self.random.choice((I32, I64)))
        return _Term(Reduce(monoid, over, _f32(body.expr), where), many)

    def limited(self, a: _Term, most: int) -> _Term:
        if a.bound <= most:
            return a
        expr = _f32(a.expr)
        low = Op("maximum", (expr, _const(-most)))
        return _Term(Op("minimum", (low, _const(most))), most)

    # -- definitions -------------------------------------------------------------------------------

    def axes(self, shape: tuple[Index, ...]) -> tuple[Axis, ...]:
        names = "abcdefgh"
        return tuple(Axis(names[k % 8], extent) for k, extent in enumerate(shape))

    def define(self) -> None:
        draw = self.random.random()
        if draw < 0.45:
            axes = self.axes(self.some_shape())
            self.store(axes, self.term(axes, self.random.choice((1, 2, 2, 3))))
        elif draw < 0.85:
            self.define_reduction()
        elif draw < 0.95:
            self.define_cat()
        else:
            self.define_extern()

    def define_reduction(self) -> None:
        axes = self.axes(self.some_shape())
        if not axes:
            return self.store(axes, self.term(axes, 1))
        chosen = set(self.random.sample(range(len(axes)), self.random.randint(1, len(axes))))
        if self.random.random() < 0.6:
            chosen = {len(axes) - 1} if self.random.random() < 0.6 else {0}
        over = tuple(a for k, a in enumerate(axes) if k in chosen)
        kept = tuple(a for k, a in enumerate(axes) if k not in chosen)
        if self.random.random() < 0.25:  # normalised: the result has the reduced extents again
            twins = {a: Axis(f"{a.name}r", a.extent) for a in over}
            total = self.limited(self.reduced(kept, tuple(twins.values()), 1), MOST)
            return self.store(axes, self.binary(self.term(axes, 1), total))
        total = self.reduced(kept, over, self.random.choice((0, 1, 2)))
        if self.random.random() < 0.5:  # keepdim
            kept = tuple(Axis(a.name, index(1)) if k in chosen else a for k, a in enumerate(axes))
        if self.random.random() < 0.3:
            total = self.binary(self.limited(total, MOST), self.term(kept, 1))
        return self.store(kept, total)

    def define_cat(self) -> None:
        a, b = self.pick(), self.pick()
        shape = list(a.buffer.shape)
        if not shape:
            return
        k = self.random.randrange(len(shape))
        first, second = shape[k], self.random.choice(self.extents)
        shape[k] = first + second
        if self.points(tuple(shape)) > MOST_POINTS:
            return
        axes = self.axes(tuple(shape))
        below = Op("lt", (IndexValue(index(axes[k])), IndexValue(first)))
        own = tuple(index(x) for x in axes)
        left = _widened(Load(a.buffer, own, below))
        rest = tuple(index(x) for x in axes)
        right: Expr = _const(3)
        if len(b.buffer.shape) == len(shape) and b.buffer.shape[k] is second:
            same = [x is y for x, y in zip(shape, b.buffer.shape, strict=True)]
            if all(s for j, s in enumerate(same) if j != k):
                rest = tuple(index(x) - first if j == k else index(x) for j, x in enumerate(axes))
                right = _f32(_widened(Load(b.buffer, rest, Op("not", (below,)))))
        self.store(axes, _Term(Select(below, _f32(left), right), max(a.bound, b.bound, 3)))

    def define_extern(self) -> None:
        source = self.pick().buffer
        order = list(range(len(source.shape)))
        self.random.shuffle(order)
        shape = tuple(source.shape[k] for k in order)
        view = View(source, shape, tuple(source.strides[k] for k in order), index(0))
        name = f"e{len(self.nodes)}"
        out = Buffer(name, shape, contiguous_strides(shape), source.dtype)
        self.nodes.append(Extern(name, "copy", (view,), (), (out,), "a copy"))
        bound = next(v.bound for v in self.values if v.buffer is source)
        self.values.append(Value(out, bound))

    def store(self, axes: tuple[Axis, ...], value: _Term) -> None:
        dtype = self.random.choice((F32, F32, F32, BF16, BF16, F16, F64, I64, I32, BOOL))
        expr, bound = value.expr, value.bound
        if dtype in (BF16, F16):
            value = self.limited(value, HALF_MOST)
            expr, bound = Cast(_f32(value.expr), dtype), value.bound
        elif dtype is BOOL:
            expr, bound = Op("gt", (_f32(expr), _const(0))), 1
        else:
            value = self.limited(value, MOST)
            expr, bound = _as(value.expr, dtype), value.bound
        shape = tuple(a.extent for a in axes)
        buffer = Buffer(f"t{len(self.nodes)}", shape, contiguous_strides(shape), dtype)
        self.nodes.append(Def(buffer, axes, expr))
        self.values.append(Value(buffer, bound))

    # -- the whole ---------------------------------------------------------------------------------

    def example(self) -> Example:
        for _ in range(self.random.randint(1, 3)):
            dtype = self.random.choice((F32, F32, F32, BF16, F16, I64, BOOL))
            high = 1 if dtype is BOOL else self.random.choice((3, 9))
            low = 0 if dtype is BOOL else -high
            self.values.append(self.add_input(self.fresh_shape(), dtype, low, high))
        while len(self.nodes) < self.count:
            self.define()
        made = [b for n in self.nodes for b in _outputs(n)]
        kept = [b for b in made if b is made[-1] or self.random.random() < 0.35]
        outputs = tuple(View(b, b.shape, b.strides, index(0)) for b in kept)
        graph = Graph("fuzz", tuple(self.inputs), tuple(self.nodes), outputs)
        return Example(graph, tuple(self.arrays))


def _outputs(node: Def | Extern) -> list[Buffer]:
    if isinstance(node, Def):
        return [node.buffer]
    return [b for b in node.outputs if b is not None]


def _widened(load: Load) -> Expr:
    return Cast(load, F32) if load.dtype in (BF16, F16) else load


def _const(value: int) -> Const:
    return Const(float(value), F32)


def _as(expr: Expr, dtype: DType) -> Expr:
    return expr if expr.dtype is dtype else Cast(expr, dtype)


def _f32(expr: Expr) -> Expr:
    return _as(expr, F32)


def example(seed: int, *, symbols: bool = False, count: int = 4) -> Example:
    """Return the graph of a seed, of about ``count`` definitions, and values for its inputs."""
    return _Generator(seed, symbols=symbols, count=count).example()


def copy_extern(node: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Run the only extern that these graphs have."""
    return [args[0].copy()]


def without_outputs(graph: Graph, kept: int) -> Graph:
    """Return the graph with one of its outputs alone."""
    return replace(graph, outputs=(graph.outputs[kept],))
