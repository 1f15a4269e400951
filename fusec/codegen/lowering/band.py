"""Loop bounds from masks: skip tiles that are masked out, and drop the mask in tiles inside it.

A reduction over n whose terms are its identity unless ``n <= m`` (causal attention) runs over the
tiles up to the diagonal only; a band ``m - n < w`` starts late as well. Conditions are comparisons
of indices below selections; one bounds the loop if every reduction in it is the identity where it
is false.

A skipped term is taken to be the identity although another factor may be infinite or NaN there, as
in every attention kernel.

Worked example: with tiles of 64 keys and 128 queries, ``n*64 + ni <= m*128 + mi`` holds somewhere
only for ``n <= (m*128 + 127) // 64``: the loop stops after that. It holds in a whole tile for
``n <= (m*128 - 63) // 64``: one loop runs to there without the comparison, a second one with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from fusec.ir.combine import identities
from fusec.ir.edges import all_edges_when, edges_of_terms
from fusec.ir.expr import Expr, IndexValue, Load, Reduce, Select, op, postorder
from fusec.ir.groups import RowGroups, groups_of
from fusec.ir.index import Axis, FloorDiv, Index, Mod, floordiv, index
from fusec.ir.serial import needed_conditions


def loop_bounds(
    loop: Axis, reductions: Iterable[Reduce], lanes: frozenset[Axis]
) -> tuple[Index, Index | None]:
    """Return a loop's first iteration that is not masked out, and its stop or None.

    The first may be negative, as for a window in the first rows.
    """
    start, stop = index(0), None
    for edge in edges_of_terms(reductions):
        step = edge.coefficient(loop)
        if step is None or not step.is_constant or step.const == 0 or _divides(edge, lanes):
            continue
        least = _least_over(edge - step * index(loop), lanes)
        if least is None or loop in least.axes:
            continue
        if step.const > 0 and stop is None:  # step*loop <= -least
            stop = floordiv(-least, step) + 1
        elif step.const < 0 and start is index(0):  # loop >= least / -step
            start = floordiv(least - step.const - 1, -step)
    return start, stop


@dataclass(frozen=True, slots=True)
class Settled:
    """The iterations of a loop in which conditions are constant.

    Attributes:
        truth: condition -> its value there.
        first: first such iteration, which may be negative; None: the loop's start.
        stop: iteration after the last, which may be negative; None: the loop's end.
    """

    truth: Mapping[Expr, bool]
    first: Index | None
    stop: Index | None


def mask_free_part(
    loop: Axis,
    reductions: Iterable[Reduce],
    lanes: frozenset[Axis],
    inside: Set[Axis] = frozenset(),
) -> Settled | None:
    """Return the iterations in which a loop's conditions are constant, or None.

    Args:
        inside: loops within this one; conditions that depend on them are left to these loops.

    All conditions must be constant over the same part, at the start or at the end, and be a single
    edge: ``n <= m and real[n]`` must be evaluated everywhere. A band has two edges, so None: three
    copies of a loop are too many. The branch taken there must vary along the loop: a value without
    the loop's axis would be no operand of a product.
    """
    found: dict[tuple[Index | None, Index | None], dict[Expr, bool]] = {}
    for node in postorder(b for n in reductions for b in n.bodies):
        if isinstance(node, Select) and loop in node.condition.axes:
            truth = loop in node.then.axes
            edges = all_edges_when(node.condition, truth) or ()
            part = _inside(loop, edges[0], lanes) if len(edges) == 1 else None
            if part is None or not (truth or loop in node.other.axes):
                return None
            found.setdefault(part, {})[node.condition] = truth
    if len(found) != 1:
        return None
    (((first, stop), truths),) = found.items()
    bounds = (bound for bound in (first, stop) if bound is not None)
    return Settled(truths, first, stop) if all(b.axes.isdisjoint(inside) for b in bounds) else None


def _inside(
    loop: Axis, edge: Index, lanes: frozenset[Axis]
) -> tuple[Index | None, Index | None] | None:
    """Return the first iteration, or the stop, of the part where all lanes are within an edge."""
    step = edge.coefficient(loop)
    if step is None or not step.is_constant or step.const == 0 or _divides(edge, lanes):
        return None
    least = _least_over(step * index(loop) - edge, lanes)
    if least is None or loop in least.axes:
        return None
    if step.const > 0:  # step*loop <= least
        return None, floordiv(least, step) + 1
    return floordiv(-least - step.const - 1, index(-step.const)), None  # -step*loop >= -least


def _divides(value: Index, lanes: frozenset[Axis]) -> bool:
    """Return True if an index has a quotient or remainder, or a gather that varies along lanes."""
    return any(
        not isinstance(atom, Axis) and not lanes.isdisjoint(atom.axes)
        for monomial, _ in value.terms
        for atom in monomial
    ) or any(isinstance(a, FloorDiv | Mod) for m, _ in value.terms for a in m)


def _least_over(value: Index, lanes: frozenset[Axis]) -> Index | None:
    """Return the least value over all lanes, where it is linear in each of them."""
    for lane in value.axes & lanes:
        step = value.coefficient(lane)
        if step is None or not step.is_constant:
            return None
        at = index(0) if step.const >= 0 else lane.extent - 1
        value = value - step * index(lane) + step * at
    return value


@dataclass(frozen=True, slots=True)
class TileGroups:
    """The groups that a tile's rows belong to, from ``first`` to ``last``: rows of the tile."""

    groups: RowGroups
    first: Index
    last: Index

    @property
    def rows(self) -> Expr:
        """How many rows of the tile are in the group; there are none if it is not positive."""
        begin, end = self.groups.begin, self.groups.end
        first = op("maximum", begin, IndexValue(self.first, begin.dtype))
        return op("minimum", end, IndexValue(self.last + 1, end.dtype)) - first


def tile_groups(
    loop: Axis, reductions: Iterable[Reduce], lanes: frozenset[Axis]
) -> TileGroups | None:
    """Return the groups that a tile's rows belong to if a loop runs over them, else None."""
    found = {groups_of(node) for node in reductions}
    groups = found.pop() if len(found) == 1 else None
    if groups is None or groups.axis is not loop:
        return None
    first, last = _least_over(groups.row, lanes), _least_over(-groups.row, lanes)
    return None if first is None or last is None else TileGroups(groups, first, -last)


def needed_before(reductions: Iterable[Reduce], varying: frozenset[Axis]) -> tuple[Expr, ...]:
    """Return conditions, read from memory, without which a loop's reductions change nothing.

    None of them depends on ``varying``: the loop, and what is inside. Unlike for an attention's
    mask, each term is exactly the identity: a factor that is infinite or NaN counts.
    """
    shared: dict[Expr, None] | None = None
    for node in reductions:
        for body, neutral in zip(node.bodies, identities(node), strict=True):
            own = dict.fromkeys(needed_conditions(body, neutral))
            shared = own if shared is None else {c: None for c in shared if c in own}
    outer = (c for c in shared or () if c.axes.isdisjoint(varying))
    return tuple(c for c in outer if any(isinstance(n, Load) for n in postorder((c,))))
