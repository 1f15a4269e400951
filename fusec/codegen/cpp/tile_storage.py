"""Choose the values of a program of tiles that are stored in arrays; others are computed at uses.

Stored are results of products and loop carries; a product's computed operand; a reduction; a value
of ``CodeTuning.store_cost`` operations that is used twice or in an inner loop; and a value whose
carry or buffer changes after it. A load that vectors or a product cannot read in place is copied to
panels.

Worked example: of ``t = s * 0.125; u = t - m; e = exp(u)``, where a sum and a product read e, only
e is in an array; the loop that stores e computes t and u inline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fusec.codegen.cpp.lane_order import LaneOrder
from fusec.codegen.cpp.tile_uses import TileUses
from fusec.ir.dtype import BF16
from fusec.ir.expr import Cast, Dot, Expr, Load, Op, Reduce, Select, Var, children, reach
from fusec.ir.index import Axis
from fusec.ir.program import PACKED
from fusec.ir.scalar import SCALAR_OPS


@dataclass(slots=True, eq=False)
class Storage:
    """The values of a program that are stored in memory.

    Attributes:
        stored: values in row-major arrays; reductions included.
        panels: copies in panels: value -> pairs of a row and a column axis.
        paired: those of ``stored`` whose rows, terms of products of bf16, lie in pairs.
    """

    uses: TileUses
    order: LaneOrder
    stored: set[Var] = field(default_factory=set)
    panels: dict[Var, list[tuple[Axis, Axis]]] = field(default_factory=dict)
    paired: set[Var] = field(default_factory=set)

    @staticmethod
    def of(uses: TileUses, order: LaneOrder) -> Storage:
        """Decide for each value of a program whether it is stored, and copied to panels."""
        storage = Storage(uses, order)
        for var in uses.defined:
            value = uses.values.get(var)
            if value is None:  # a carry
                continue
            if uses.lanes & (var.axes | value.axes) or isinstance(value, Reduce):
                storage._decide(var, value)
        return storage

    def leaves(self, names: tuple[Expr, ...]) -> set[Var]:
        """Return the stored or scalar values that ``names`` are computed from inline."""
        made = self._made_of(names)
        return {node for node in made if isinstance(node, Var) and not self.is_inline(node)}

    def in_pairs(self, names: tuple[Expr, ...], lane: Axis) -> bool:
        """Return True if neighbours along a lane axis share an element that names are made of."""
        inline = (n for n in self._made_of(names) if isinstance(n, Var) and self.is_inline(n))
        found = (self.uses.values[var] for var in inline)
        return any(isinstance(v, Load) and self.uses.in_pairs(v.indices[0], lane) for v in found)

    def _made_of(self, names: Iterable[Expr]) -> list[Expr]:
        """Return values and their operands, transitively through values computed inline."""

        def inside(node: Expr) -> tuple[Expr, ...]:
            if isinstance(node, Var) and self.is_inline(node):
                return below(self.uses.values[node])
            return ()

        return reach(names, inside)

    def is_inline(self, var: Var) -> bool:
        """Return True for a value that is computed at each use instead of being stored."""
        known = var in self.uses.values and var.axes & self.uses.lanes
        return bool(known) and var not in self.stored and not self.is_turned(var)

    def is_turned(self, var: Var) -> bool:
        """Return True for a load that vectors read from its copy in panels."""
        return len(var.axes) == 2 and self.order.sorted(var.axes) in self.panels.get(var, ())

    def _decide(self, var: Var, value: Expr) -> None:
        self._copy_operand(var)
        load = self.uses.load(var)
        if isinstance(value, Dot | Reduce):
            self.stored.add(var)
        elif self._reads_turned(var, load):
            self._copy(var, self.order.sorted(var.axes))
        if var in self.stored or not var.axes & self.uses.lanes:
            return
        if (
            (isinstance(value, Load) and load is None)
            or self._changes_later(var)
            or (self._cost(var) >= self.uses.code.store_cost and self._is_shared(var))
        ):
            self.stored.add(var)

    def _reads_turned(self, var: Var, load: Load | None) -> bool:
        """Return True for an elementwise-used load that is contiguous along its rows."""
        if load is None or len(var.axes) != 2 or not self.uses.elementwise(var):
            return False
        return self.uses.is_turned(load, *self.order.sorted(var.axes))

    def _copy(self, var: Var, axes: tuple[Axis, ...]) -> None:
        row, column = axes
        held = self.panels.setdefault(var, [])
        if (row, column) not in held:
            held.append((row, column))

    def _copy_operand(self, var: Var) -> None:
        """Decide whether an operand of products is stored or copied to panels."""
        for _, dot in self.uses.dots(var):
            left, right = self.order.sides(dot)
            (terms,) = dot.over
            row, column = self.order.sorted(dot.axes)
            if var is right and self.uses.direct(var, terms, column, right=True) is None:
                if right.dtype in PACKED:
                    self.stored.add(var)
                    if self._lies_in_pairs(var, terms, column):
                        self.paired.add(var)
                elif self.uses.load(var) is not None:
                    self._copy(var, (terms, column))
                else:
                    self.stored.add(var)
                    if self.order.sorted((terms, column)) != (terms, column):
                        self._copy(var, (terms, column))
            if var is left and self.uses.direct(var, row, terms, right=False) is None:
                self.stored.add(var)

    def _lies_in_pairs(self, var: Var, terms: Axis, column: Axis) -> bool:
        """Return True for an operand that only products read, each along all of its rows."""
        products = [dot for _, dot in self.uses.dots(var)]
        alike = all(self.order.sides(dot)[1] is var and dot.over == (terms,) for dot in products)
        are_rows = self.order.sorted((terms, column)) == (terms, column)
        whole = terms not in self.uses.ends and terms.extent.const % 2 == 0
        return var.dtype is BF16 and alike and are_rows and whole and not self.uses.elementwise(var)

    def _changes_later(self, var: Var) -> bool:
        """Return True if a carry that a value depends on is updated after it in its block."""
        place = self.uses.defined[var]
        carries = self.leaves(below(self.uses.values[var])) & self.uses.updates.keys()
        return any(
            after > place and after[: len(place) - 1] == place[:-1]
            for carry in carries
            for after in self.uses.updates[carry]
        )

    def _is_shared(self, var: Var) -> bool:
        """Return True if a value is used twice, in an inner loop, or along lanes it lacks."""
        readers = self.uses.readers.get(var, [])
        depth = len(self.uses.defined[var])
        return len(readers) > 1 or any(
            len(place) > depth or self.uses.domain(statement) - var.axes
            for statement, place in readers
        )

    def _cost(self, var: Var) -> int:
        """Return the operations that compute a value from stored values."""
        own = self.uses.values[var]
        inside = [n for n in self._made_of(below(own)) if isinstance(n, Var) and self.is_inline(n)]
        total = 0
        for value in (own, *(self.uses.values[node] for node in inside)):
            match value:
                case Op():
                    total += SCALAR_OPS[value.name].cost
                case Load() | Cast() | Select():
                    total += 1
        return total


def below(value: Expr) -> tuple[Expr, ...]:
    """Return the operands of a statement's right-hand side."""
    return (value,) if isinstance(value, Var) else children(value)
