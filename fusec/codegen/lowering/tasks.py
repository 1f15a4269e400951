"""Tasks of lowering (stores, reduction updates, kept values), and the sweeps they must run in."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from fusec.ir.expr import (
    Buffer,
    Cast,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Var,
    children,
    postorder,
    reach,
)
from fusec.ir.graph import Store
from fusec.ir.index import Axis, Index
from fusec.ir.linear import multiples
from fusec.ir.monoid import SUM
from fusec.ir.scalar import SCALAR_OPS
from fusec.ir.streamed import reads_narrow


@dataclass(frozen=True, slots=True, eq=False)
class Accumulate:
    """Combine the bodies of a reduction into its carries or, with a slot, into private arrays."""

    reduction: Reduce
    carries: tuple[Var, ...]
    arrays: tuple[Buffer, ...] = ()
    slot: Index | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """Write a value to a private array for a later sweep."""

    value: Expr
    array: Buffer
    slot: Index


Task = Store | Accumulate | Keep


class Depth:
    """Count the sweeps before a value: the nesting depth of the region's reductions (``homes``).

    Args:
        row_maxima: sum -> maximum whose sweep it shares (see ``ir/online.py``).
    """

    def __init__(self, homes: list[Reduce], row_maxima: Mapping[Reduce, Reduce]) -> None:
        self.homes = set(homes)
        self.row_maxima = row_maxima
        self.memo: dict[Expr, int] = {}

    def of(self, roots: Iterable[Expr]) -> int:
        roots = list(roots)
        for node in postorder(roots):
            if node not in self.memo:
                below = max((self.memo[c] for c in children(node)), default=0)
                if isinstance(node, Reduce) and node in self.homes:
                    below = (self.below(node) if node in self.row_maxima else below) + 1
                self.memo[node] = below
        return max((self.memo[r] for r in roots), default=0)

    def below(self, reduction: Reduce) -> int:
        row_max = self.row_maxima.get(reduction)
        if row_max is None:
            return self.of(reduction.bodies)
        return Depth([h for h in self.homes if h is not row_max], {}).of((reduction.body,))


def roots(task: Task | Reduce) -> tuple[Expr, ...]:
    match task:
        case Store():
            return (task.expr, IndexValue(task.indices[0]))
        case Accumulate():
            return task.reduction.bodies
        case Keep():
            return (task.value,)
        case Reduce():
            return task.bodies


def summed(tasks: Iterable[Task]) -> list[Reduce]:
    """Return the sums that iterations add to, maybe in their result; [] beside other tasks."""
    found: list[Reduce] = []
    for task in tasks:
        match task:
            case Accumulate(reduction=reduction) | Store(expr=Reduce() as reduction, adds=True):
                found.append(reduction)
            case _:
                return []
    return found


def by_factor(
    inner: Mapping[Reduce, Collection[Axis]], *, whole: Container[Reduce]
) -> dict[Reduce, dict[Expr | None, Reduce]]:
    """Return partial sums of sums by the factors that multiply them; by None: by nothing.

    Factors are scales and zeros of groups of integer weights; terms of other sums might overflow
    without theirs. What zeros multiply is added up where more columns share it than there are rows:
    each row takes an addition for it, each column's weights a multiply-add less.

    Args:
        inner: sum -> the axes of a partial sum.
        whole: sums that stay as they are.
    """
    found: dict[Reduce, dict[Expr | None, Reduce]] = {}
    for node, axes in inner.items():
        taken = reads_narrow(node.body) and node not in whole
        parts = multiples(node.body, axes) if taken else {None: node.body}
        found[node] = {factor: Reduce(SUM, node.over, term) for factor, term in parts.items()}
    several = [node for node, parts in found.items() if len(parts) > 1]
    rows = {part for node in several for part in [*found[node].values()][1:]}
    if len(rows) ** 2 < len(several):
        return found
    return found | {node: {None: node} for node in several}


def evaluated(tasks: Iterable[Task | Reduce], arrays: Container[Expr]) -> list[Expr]:
    """Return the expressions that a sweep over ``tasks`` evaluates, in post-order.

    Operands of a reduction are excluded: they belong to the sweep that has it as a task. So are
    those of the values that arrays hold.
    """
    return reach(
        (root for task in tasks for root in roots(task)),
        lambda node: () if isinstance(node, Reduce) or node in arrays else children(node),
    )


def cost_along(root: Expr, loop: Axis, arrays: Container[Expr]) -> int:
    """Return the cost, in operations, of the part of a value that varies along a loop."""

    def varies(node: Expr) -> bool:
        return loop in node.axes and node not in arrays

    total = 0
    for node in reach((root,), lambda node: filter(varies, children(node))):
        match node if varies(node) else None:
            case Op(name=name):
                total += SCALAR_OPS[name].cost
            case Load() | Cast():
                total += 1
    return total
