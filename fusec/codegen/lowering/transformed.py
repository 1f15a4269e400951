"""Lower transformed products (``ir/transformed.py``) to programs over vectors, for CPUs.

Each grid point has a block of tiles and some groups of columns::

    for t: for c:      a_operand[term, t, c] = ...        transforms of elements in memory
    for term:          a_products[term] = a_operand[term] @ weights[term]
    for t: for groups: y[...] = ...                        transforms of products, and the epilogue

Transforms are sums with constant factors over few elements: they are written out, without the terms
of 0, and what several of them share is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fusec.errors import InternalError
from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Const, Expr, Load, Var, children, reach, rebuild, substitute
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, Index, index, product
from fusec.ir.machine import CodeTuning
from fusec.ir.names import Names
from fusec.ir.program import For, Let, Matrix, Multiply, Program, Put, Scratch, Statement
from fusec.ir.rewrite import guarded_loads, replace_nodes
from fusec.ir.transformed import TransformedProduct, match_transformed
from fusec.passes.kernel.unroll import points
from fusec.passes.kernel.unroll_terms import SumWriter
from fusec.passes.schedule.plan import Plan


def lower_transformed(kernel: FlatKernel, plan: Plan, code: CodeTuning) -> Program:
    """Lower a kernel with a transformed product to a program under a plan."""
    found = match_transformed(kernel)
    if found is None:
        raise InternalError(f"{kernel.name} has no transformed product", stage="codegen.lower")
    lowering = _TileLowering(found, plan)
    lowering.write()
    return Program(
        kernel.name,
        kernel.reads,
        kernel.writes,
        kernel.sizes,
        tuple(lowering.grid),
        (found.lane,),
        tuple(lowering.scopes[0].body),
        (),
        kernel.origin.source,
        work=product(a.extent for a in kernel.axes),
        code=code,
    )


@dataclass(slots=True, eq=False)
class _LoopScope:
    """An open loop, or the program's top level: its statements, and the names of values in it."""

    bound: frozenset[Axis]
    body: list[Statement] = field(default_factory=list)
    names: dict[Expr, Var | Const] = field(default_factory=dict)


class _TileLowering:
    """The lowering of one kernel."""

    def __init__(self, found: TransformedProduct, plan: Plan) -> None:
        self.found = found
        chunks = {b.axis: b.chunk for b in plan.bindings if b.chunk}
        self.columns = chunks.pop(found.groups, 1) if found.groups is not None else 1
        (self.tiles,) = set(chunks.values())  # of all rows together
        groups = found.groups.extent.const if found.groups is not None else 1
        count = product(a.extent for a in found.rows)
        self.width = found.lane.extent.const
        self.block = Axis("block", (count + self.tiles - 1) // self.tiles)
        self.part = Axis("part", index(-(-groups // self.columns)))
        self.tile, self.group = Axis("t", index(self.tiles)), Axis("g", index(self.columns))
        self.grid = [a for a in (self.part, self.block) if a.extent is not index(1)]
        self.tile_stops = (self.tile.extent, count - self._at(self.block) * self.tiles)
        self.group_stops = (self.group.extent, index(groups) - self._at(self.part) * self.columns)
        self.written_out = SumWriter(zeros=False)
        self.names = Names()
        self.scopes = [_LoopScope(frozenset(self.grid))]
        self.operand = self._array("operand", found.channels.extent.const)
        self.products = self._array("products", self.columns * self.width)
        self.where = self._rows() | self._groups()

    def _array(self, name: str, columns: int) -> Buffer:
        """Declare an array [terms..., tiles, columns]."""
        shape = (*(a.extent for a in self.found.terms), index(self.tiles), index(columns))
        made = Buffer.row_major(f"a_{name}", shape, F32)
        self.scopes[0].body.append(Scratch(made, product(shape)))
        return made

    def _rows(self) -> dict[Axis, Index]:
        """Return the coordinates of a tile."""
        rest = self._at(self.block) * self.tiles + index(self.tile)
        where: dict[Axis, Index] = {}
        for axis in reversed(self.found.rows):
            where[axis] = rest % axis.extent  # of the slowest, too: the last block is not full
            rest = rest // axis.extent
        return where

    def _groups(self) -> dict[Axis, Index]:
        if self.found.groups is None:
            return {}
        return {self.found.groups: self._at(self.part) * self.columns + index(self.group)}

    def _at(self, axis: Axis) -> Index:
        """Return the position along a grid axis, which may have a single point."""
        return index(axis) if axis in self.grid else index(0)

    # -- the three steps ---------------------------------------------------------------------------

    def write(self) -> None:
        self._transform_operand()
        self._multiply()
        self._transform_products()

    def _transform_operand(self) -> None:
        found = self.found
        vectors = Axis("c", index(found.channels.extent.const // self.width))
        channel = index(vectors) * self.width + index(found.lane)
        with self._loop(self.tile, *self.tile_stops), self._loop(vectors, vectors.extent):
            where = {**self.where, found.channels: channel}
            for terms in points(found.terms):
                value = self.written_out(found.operand, {**where, **terms})
                slot = self.operand.offset((*terms.values(), index(self.tile), channel))
                put = Put(self.operand.flat(), slot, self.value(value), None)
                self.scopes[-1].body.append(put)

    def _multiply(self) -> None:
        found = self.found
        offset = found.weights.buffer.offset(found.weights.indices)
        row = offset.coefficient(found.channels)
        step = index(0) if found.groups is None else offset.coefficient(found.groups)
        assert row is not None and step is not None
        first = dict.fromkeys((found.channels, found.lane), index(0))
        if found.groups is not None:
            first[found.groups] = self._at(self.part) * self.columns
        terms = tuple(index(a) for a in found.terms)
        body: Statement = Multiply(
            self._matrix(self.products, terms),
            self._matrix(self.operand, terms),
            Matrix(found.weights.buffer.base, substitute(offset, first), row, index(1), step),
            self.tile_stops,
            self.group_stops,
            (found.channels.extent,),
            self.width,
            adds=index(0),
        )
        for axis in reversed(found.terms):
            body = For(axis, index(0), (axis.extent,), (body,))
        self.scopes[0].body.append(body)

    def _matrix(self, array: Buffer, terms: tuple[Index, ...]) -> Matrix:
        start = array.offset((*terms, index(0), index(0)))
        return Matrix(array, start, array.strides[-2], index(1), index(self.width))

    def _transform_products(self) -> None:
        found = self.found
        column = index(self.group) * self.width + index(found.lane)
        slot = (*(index(a) for a in found.terms), index(self.tile), column)
        loaded = Load(self.products.flat(), (self.products.offset(slot),))
        exprs = tuple(store.expr for store in found.stores)
        if found.guard is not None:  # what stands around the product is loaded where results are
            same: dict[Expr, Expr] = {found.product: found.product}
            exprs = tuple(guarded_loads(expr, found.guard, same) for expr in exprs)
        exprs = replace_nodes(exprs, {found.product: loaded})
        with self._loop(self.tile, *self.tile_stops), self._loop(self.group, *self.group_stops):
            for places in points(found.places):
                where = {**self.where, **places}
                guard = None
                if found.guard is not None:
                    there = self.value(self.written_out(found.guard, where))
                    guard = there if isinstance(there, Var) else None
                for store, expr in zip(found.stores, exprs, strict=True):
                    value = self.value(self.written_out(expr, where))
                    (offset,) = store.indices
                    at = substitute(offset, where, self.value)
                    self.scopes[-1].body.append(Put(store.buffer, at, value, guard))

    # -- values ------------------------------------------------------------------------------------

    @contextmanager
    def _loop(self, axis: Axis, *stops: Index) -> Iterator[None]:
        """Open a loop, and append it to the scope around it."""
        self.scopes.append(_LoopScope(self.scopes[-1].bound | {axis}))
        yield
        scope = self.scopes.pop()
        self.scopes[-1].body.append(For(axis, index(0), stops, tuple(scope.body)))

    def value(self, root: Expr) -> Var | Const:
        """Return the name of a value; defines it and its operands, each where its loops are."""
        for node in reach((root,), lambda n: () if self._known(n) is not None else children(n)):
            if self._known(node) is None:
                new = {child: self._named(child) for child in children(node)}
                scope = next(s for s in self.scopes if node.axes - {self.found.lane} <= s.bound)
                lanes = node.axes & {self.found.lane}
                scope.names[node] = var = Var(self.names.new("v"), node.dtype, lanes)
                scope.body.append(Let(var, rebuild(node, new, None)))
        return self._named(root)

    def _known(self, node: Expr) -> Var | Const | None:
        if isinstance(node, Const | Var):
            return node
        return next((s.names[node] for s in self.scopes if node in s.names), None)

    def _named(self, node: Expr) -> Var | Const:
        known = self._known(node)
        assert known is not None
        return known
