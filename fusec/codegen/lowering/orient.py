"""Assign lane axes to tile dimensions: tiles of a kernel with matrix products have rank 2.

Without a ``Dot`` lane axis n is dimension n of every tile. A ``Dot`` needs ``[m, k]`` times
``[k, n]``, so that an axis may be the rows of one tile and the columns of another. Here every axis
is replaced by up to two twins, one for each dimension. A value that is needed in two orders is
defined in both: a value with one lane axis is computed twice, a tile is transposed (a ``Let`` whose
value is the other tile's name).

Orders are propagated backwards from the uses: a store has its fastest axis in the columns, and the
operands of a ``Dot`` follow its result, so that a computed left operand (the weights of an
attention) may stay in registers.

Worked example: ``acc<m, n> := dot(k: a<m, k>, b<n, k>, acc)`` with ``out[m*N + n] = acc`` has m in
the rows of a and acc, k in the columns of a and the rows of b, n in the columns of b and acc.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusec.errors import InternalError
from fusec.ir.expr import Const, Dot, Expr, Reduce, Select, Var, children, rebuild, substitute
from fusec.ir.index import Axis, Index, index
from fusec.ir.names import Names
from fusec.ir.program import Carry, For, Let, Program, Put, Statement, Update, reads, statements

ROWS, COLUMNS = 0, 1
TileDims = dict[Axis, int]
"""Lane axis -> its dimension in one tile."""


_Needs = dict[Var, list[TileDims]]
"""Value -> the orders that it is needed in; it is computed in the first."""


def orient(program: Program) -> tuple[Program, dict[Axis, int]]:
    """Return the program over twins of its lane axes, and the dimension of each twin.

    Raises:
        InternalError: if a value has more than two lane axes.
    """
    draft = _Orienter(program, None)
    draft.block(program.body)
    orienter = _Orienter(program, draft.needs)
    body = orienter.block(program.body)
    lanes = tuple(orienter.twins.values())
    return replace(program, body=body, lanes=lanes), orienter.dimension


class _Orienter:
    """One backward walk. The first, a draft, finds the orders that products and stores require.

    Attributes:
        draft: the orders that the first walk found, maybe none; None in the first walk.
        operands: values that are rather computed in the order of a carried product, which reads
            them or what a mask leaves of them.
    """

    def __init__(self, program: Program, draft: _Needs | None) -> None:
        self.draft = draft
        self.definitions = {
            s.var: s.value for s in statements(program.body) if isinstance(s, Let | Update)
        }
        self.lanes = frozenset(program.lanes)
        self.twins: dict[tuple[Axis, int], Axis] = {}
        self.dimension: dict[Axis, int] = {}
        self.needs: _Needs = dict(draft or {})
        self.made: dict[tuple[Var, tuple[tuple[Axis, int], ...]], Var] = {}
        named = (s.var.name for s in statements(program.body) if isinstance(s, Let | Carry))
        self.others = Names(named)
        self.kept: set[Var] = set()
        self.operands: set[Var] = set()

    # -- names -------------------------------------------------------------------------------------

    def twin(self, axis: Axis, dimension: int) -> Axis:
        """Return the axis that replaces ``axis`` in one dimension."""
        known = self.twins.get((axis, dimension))
        if known is None:
            known = self.twins[axis, dimension] = Axis(axis.name, axis.extent)
            self.dimension[known] = dimension
        return known

    def mapping(self, order: TileDims) -> dict[Axis, Index]:
        return {axis: index(self.twin(axis, d)) for axis, d in order.items()}

    def named(self, var: Var, order: TileDims) -> Var:
        """Return the variable that holds a value in an order."""
        key = (var, tuple(sorted(order.items(), key=lambda item: item[0].serial)))
        known = self.made.get(key)
        if known is None:
            axes = frozenset(self.twin(a, d) for a, d in order.items())
            known = self.made[key] = Var(self.name(var), var.dtype, axes)
        return known

    def name(self, var: Var) -> str:
        """Return a name for a value in one more order: its own, or with a number appended."""
        if var in self.kept:
            return self.others.new(var.name)
        self.kept.add(var)
        return var.name

    # -- orders ------------------------------------------------------------------------------------

    def need(self, value: Expr, order: TileDims, first: bool = False) -> None:
        """Record that a value is needed in an order, restricted to the axes that it has.

        Args:
            first: it is rather computed in this order than in those that others need.
        """
        if isinstance(value, Var):
            own = {a: order[a] for a in value.axes if a in order}
            known = self.needs.setdefault(value, [])
            if first:
                self.operands.add(value)
            if own not in known:
                known.insert(0 if first else len(known), own)

    def used(self, value: Expr, order: TileDims) -> Expr:
        """Return the name of a value in an order."""
        if not isinstance(value, Var):
            return value
        return self.named(value, {a: order[a] for a in value.axes if a in order})

    def free_order(self, axes: Iterable[Axis], offset: Index | None = None) -> TileDims:
        """Return the default order, if no use prescribes one: the fastest axis in the columns."""
        lanes = sorted((a for a in axes if a in self.lanes), key=lambda a: a.serial)
        if len(lanes) > 2:
            raise InternalError(f"a tile with lanes {lanes}", stage="codegen.orient")
        if offset is not None:
            lanes.sort(key=lambda a: -_step(offset, a))
        if len(lanes) == 1:
            return {lanes[0]: COLUMNS}
        return {axis: dimension for dimension, axis in enumerate(lanes)}

    # -- the walk, backwards -----------------------------------------------------------------------

    def block(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        done: list[Statement] = []
        for statement in reversed(body):
            done.extend(reversed(self.statement(statement)))
        return tuple(reversed(done))

    def statement(self, statement: Statement) -> list[Statement]:
        match statement:
            case Let():
                return self.let(statement)
            case Carry(var=var) | Update(var=var) if self.is_open(var):
                return []
            case Carry():
                names = self.names(statement.var)
                return [Carry(name, statement.initial) for name in names]
            case Update(var=var):
                order = self.orders(var)[0]
                value = self.value(statement.value, order)
                first, *others = self.names(var)
                return [Update(first, value), *(Update(name, first) for name in others)]
            case Put():
                return [self.put(statement)]
            case For():
                for value in reads(statement):
                    self.need(value, {})
                start, *stops = (
                    self.value_index(bound, {}) for bound in (statement.start, *statement.stops)
                )
                body = self.block(statement.body)
                return [replace(statement, start=start, stops=tuple(stops), body=body)]
            case _:
                raise InternalError(statement, stage="codegen.orient")

    def orders(self, var: Var) -> list[TileDims]:
        """Return the orders that a value is needed in; it is computed in the first."""
        if var not in self.needs:
            self.needs[var] = [self.free_order(var.axes)]
        return self.needs[var]

    def is_open(self, var: Var) -> bool:
        """Return True in the draft for a value that so far only a store of one axis uses.

        Earlier statements of a loop may need it; the second walk takes its operands' order.
        """
        return self.draft is None and var not in self.needs and len(var.axes) == 1

    def names(self, var: Var) -> list[Var]:
        return [self.named(var, order) for order in self.orders(var)]

    def let(self, let: Let) -> list[Statement]:
        if self.draft is None and let.var not in self.needs:
            return []  # only a store of one axis uses it
        orders = self.orders(let.var)
        computed = isinstance(let.value, Dot | Reduce) or len(orders[0]) == 2
        made: list[Statement] = []
        for order in orders:
            var = self.named(let.var, order)
            if computed and order is not orders[0]:
                made.append(Let(var, self.named(let.var, orders[0])))
            else:
                masked = isinstance(let.value, Select) and let.var in self.operands
                made.append(Let(var, self.value(let.value, order, masked)))
        return made

    def put(self, put: Put) -> Put:
        order = self.free_order(put.offset.axes | put.value.axes, put.offset)
        if len(order) == 1:
            if self.draft is None:
                return put
            order = self.followed(put.value, order)
        for value in reads(put):
            self.need(value, order)
        offset = self.value_index(put.offset, order)
        guard = None if put.guard is None else self.used(put.guard, order)
        stored = self.used(put.value, order)
        assert isinstance(stored, Var | Const) and not isinstance(guard, Const)
        return Put(put.buffer, offset, stored, guard, put.adds)  # type: ignore[arg-type]

    def followed(self, value: Expr, order: TileDims) -> TileDims:
        """Return the one-axis order that a value or one of its operands has, else ``order``."""
        (axis,) = order
        stack = [value]
        seen: set[Expr] = set()
        while stack:
            node = stack.pop()
            if node in seen or axis not in node.axes or not isinstance(node, Var):
                continue
            seen.add(node)
            if node in self.needs:
                return {axis: self.needs[node][0][axis]}
            if node in self.definitions:
                stack.extend(children(self.definitions[node]))
        return order

    def value(self, value: Expr, order: TileDims, first: bool = False) -> Expr:
        """Return an operation over operands in the orders that the result's order requires.

        Args:
            first: of ``need``.
        """
        if isinstance(value, Dot):
            return self.dot(value, order)
        if isinstance(value, Reduce):
            return self.reduce(value, order)
        for child in children(value):
            self.need(child, order, first)
        if isinstance(value, Var):
            self.need(value, order)
            return self.used(value, order)
        new = {child: self.used(child, order) for child in children(value)}
        return rebuild(value, new, self.mapping(order))

    def value_index(self, value: Index, order: TileDims) -> Index:
        return substitute(value, self.mapping(order), lambda e: self.used(e, order))

    def dot(self, dot: Dot, order: TileDims) -> Dot:
        rows = next((a for a, d in order.items() if d == ROWS), None)
        left, right, scales = dot.left, dot.right, dot.scales
        if rows not in left.axes:
            left, right, scales = right, left, scales[::-1]
        (of_left,), (of_right,) = (side.axes & set(dot.over) for side in (left, right))
        (m,) = left.axes - {of_left}
        (n,) = right.axes - {of_right}
        left_order, right_order = {m: ROWS, of_left: COLUMNS}, {of_right: ROWS, n: COLUMNS}
        carried = dot.into is not None  # another product's tile is there for an iteration alone
        self.need(left, left_order, carried)
        self.need(right, right_order, carried)
        of_scales = [{a: ROWS, **dict.fromkeys(dot.blocks, COLUMNS)} for a in (m, n)]
        for scale, columns in zip(scales, of_scales, strict=False):
            self.need(scale, columns)
        into = None
        if dot.into is not None:
            self.need(dot.into, order)
            into = self.used(dot.into, order)
        both = (self.twin(of_left, COLUMNS), self.twin(of_right, ROWS))
        operands = self.used(left, left_order), self.used(right, right_order)
        scaled = tuple(self.used(*pair) for pair in zip(scales, of_scales, strict=False))
        return Dot(*operands, both, into, dot.tf32, scaled)

    def reduce(self, value: Reduce, order: TileDims) -> Reduce:
        body = dict(order)
        taken = set(order.values())
        for axis in value.over:
            free = next((d for d in (COLUMNS, ROWS) if d not in taken), None)
            if free is None:
                raise InternalError(f"{value!r} needs three dimensions", stage="codegen.orient")
            body[axis] = free
            taken.add(free)
        self.need(value.body, body)
        over = tuple(self.twin(a, body[a]) for a in value.over)
        return Reduce(value.monoid, over, self.used(value.body, body))


def _step(offset: Index, axis: Axis) -> int:
    coefficient = offset.coefficient(axis)
    return 0 if coefficient is None else coefficient.hint()
