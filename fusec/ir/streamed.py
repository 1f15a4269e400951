"""Streamed products: each weight is read once, and multiplied with all rows at once.

A product of few rows is limited by the reading of its weights, whose number does not depend on the
rows: it is *skinny*. One of more rows is streamed, too, where its weights lie in panels. Both are
recognised by their sums here; the frontend's spelling, the order of the factors and the type of the
operands do not matter.

Weights are *narrow* if they take fewer bytes in memory than what they are multiplied as: integers,
or floats of 16 or 8 bits beside rows in f32. A library would read them widened, by a kernel that
writes twice their bytes or more; a kernel of fusec's own converts them as it reads them.

Weights are contiguous along the sum, or in panels: the columns of one term in a panel are
neighbours, and the terms of these columns follow each other (``frontend/fx_passes/packing.py``).
A matrix that some rows choose from a table is one panel if its columns are neighbours.

Worked example: ``sum(k: x[m, k] * w[n, k])`` with m of 4 streams w along k. Its rows are ``(m,)``
and its column is n; with m of extent 1, which no expression has as an axis, it has no rows. With
``w[n//32, k, n%32]`` instead of ``w[n, k]`` its panels have 32 columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.contraction import narrow_operand, sides
from fusec.ir.dtype import BF16, HALF
from fusec.ir.expr import (
    Buffer,
    Expr,
    Load,
    Op,
    Reduce,
    axes_in,
    children,
    is_op,
    loads,
    postorder,
    reductions,
)
from fusec.ir.expr import substitute as substitute_index
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis, Index, Runtime, floordiv, index, mod, product
from fusec.ir.linear import multiples
from fusec.ir.machine import Machine
from fusec.ir.ranges import holds
from fusec.ir.rewrite import Normalizer, inline_loads
from fusec.ir.scalar import ROUND

WIDEST_PANEL = 128
"""Columns of the widest panel: a wider one is a row-major matrix with terms on other pages."""


@dataclass(frozen=True, slots=True)
class StreamedProduct:
    """A product whose weights are read once.

    Attributes:
        rows: the axes of the rows, constant if they are few; none where there is one row.
        batch: axes that choose the weights, by a number that is read: the group of some rows.
        parts: axes on which conditions of the weights depend, but not their places: parts of rows
            that share weights.
        columns: the axis of the columns; of panels, perhaps more: panels and columns in a panel,
            of two in a byte panels, halves and columns in one.
        few: the operand that has the rows, in f32.
        terms: the number of terms of each sum.
        itemsize: bytes of a weight.
        narrow: weights are narrow; the rows of a block share a conversion (of integers in panels).
        packed: several of them are in a byte: the sum has an axis for the place in it.
        halves: bf16 holds them, or what their groups' scales multiply.
        panel: columns of a panel, 0 without panels. The second of ``columns`` may be shorter: a
            part of each panel.
    """

    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    few: Expr
    terms: Index
    itemsize: int
    panel: int = 0
    batch: tuple[Axis, ...] = ()
    narrow: bool = False
    packed: bool = False
    parts: tuple[Axis, ...] = ()
    halves: bool = False

    @property
    def widened(self) -> bool:
        """Whether its rows are widened by a kernel of their own."""
        return bool(self.panel or (self.narrow and self.rows and not self.packed))


def match_streamed(node: Expr, machine: Machine) -> StreamedProduct | None:
    """Return a sum as a skinny product that a machine streams; None for anything else."""
    product = match_skinny(node, machine.skinny_rows)
    return product if product is not None and worthwhile(product, machine) else None


def worthwhile(made: StreamedProduct, machine: Machine) -> bool:
    """Return True if a product has few enough rows for the layout and type of its weights."""
    rows, tuning = product(a.extent for a in made.rows).const, machine.loops
    if _is_tiled(made, machine):
        return False
    if made.batch and made.panel % (tuning.columns[1] * machine.vector):
        return False
    if rows <= tuning.always:
        return True
    if made.panel:
        return rows <= tuning.panel_sums * machine.vector
    if made.narrow:
        return len(made.rows) == 1 and bool(divisors(rows, *tuning.narrow_block))
    fits = rows <= tuning.sums * machine.vector
    near = rows * made.terms.hint() * 4 <= tuning.near_bytes
    return fits and near and made.itemsize == 4


def _is_tiled(made: StreamedProduct, machine: Machine) -> bool:
    """Return True for a product of a whole vector of rows in bf16, where a machine multiplies it:
    its narrow weights are converted once, to a tile (16 rows by 4096 x 4096 of int8: 4.6 ms instead
    of 6.8, 14 rows 6.4 instead of 6.0, of int4 4.5 instead of 5.6; AVX-512, one thread,
    2026-11-30). Not in packed panels, of which a tile has half the columns (5.4 instead of 4.9)."""
    rows = product(a.extent for a in made.rows).const
    whole = rows >= machine.vector and machine.bf16 != "widened"
    return whole and made.narrow and made.halves and not (made.packed and made.panel)


def divisors(count: int, least: int, most: int) -> list[int]:
    """Return the numbers between two bounds that divide ``count`` evenly, the greatest first."""
    return [n for n in range(most, least - 1, -1) if count % n == 0]


def stored_rows(
    node: Expr, machine: Machine, *, computed: bool, copied: bool = False, cast: bool = False
) -> Expr | None:
    """Return the rows of a CPU's product that are stored before it reads them, or None.

    Each of a few columns, each panel or tile would compute, or widen, them again. Views and casts
    are free where rows are streamed as they are.

    Args:
        computed: whether that is more than a cast of 16 bits.
        copied: whether it is no cast either: panels read such rows where they are.
        cast: whether it is that cast: where bf16 is multiplied, tiles read such rows as they are.
    """
    made = match_skinny(node, machine.skinny_rows)
    if made is not None and _is_tiled(made, machine):
        made = None
    if made is not None and (computed or made.widened):
        return made.few
    if made is not None and worthwhile(made, machine):
        return None
    panels = None if copied else match_panels(node, machine.loops.panel)
    if panels is not None:
        return panels.few
    beside = _rows_beside_chosen(node)
    if beside is not None:
        return beside
    if cast and machine.bf16 != "widened" and _holds_an_operand(node):
        return None
    packed = 0 if computed else machine.skinny_rows + 1
    return rows_beside_narrow(node, machine, packed=packed)


def _holds_an_operand(node: Expr) -> bool:
    """Return True if bf16 holds an operand of a product, or what groups of it multiply: beside rows
    that are only widened to f32, it is one of bf16."""
    found = sides(node)
    return found is not None and (_is_of_bf16(found.left) or _is_of_bf16(found.right))


def _is_of_bf16(weights: Expr) -> bool:
    return holds(BF16, weights) or (
        reads_narrow(weights) and _is_scaled(weights, _largest(weights))
    )


def _is_scaled(value: Expr, integers: list[Load]) -> bool:
    """Return True for a number that bf16 holds, or such numbers times scales, plus zeros."""
    if holds(BF16, value):
        return True
    if isinstance(value, Op) and value.name in ("mul", "add", "sub"):
        return all(_is_scaled(arg, integers) for arg in value.args)
    return not any(n in integers for n in loads((value,)))


def unrounded_operands(node: Expr) -> Expr:
    """Return a product without the roundings of its operands; anything else unchanged."""
    match node:
        case Reduce(body=Op(name=name, args=args)) if sides(node) is not None:
            plain = (a.args[0] if is_op(a, *ROUND.values()) else a for a in args)
            return Reduce(node.monoid, node.over, Op(name, tuple(plain)))
    return node


def takes_exact_weights(node: Expr, machine: Machine) -> bool:
    """Return True for a CPU's product that gains nothing by weights rounded to 16 bits.

    It is computed in f32, or its weights are integers that bf16 holds, and scales of groups.
    """
    if machine.bf16 == "widened" or match_streamed(node, machine) is not None:
        return True
    return any(
        not shared and reads_narrow(w) and _is_scaled(w, _largest(w)) and _has_groups(w, over)
        for _, w, _, _, shared, over in _orders(node)
    )


def _has_groups(weights: Expr, over: tuple[Axis, ...]) -> bool:
    """Return True if scales vary along a sum, but are the same for several terms in a row."""
    largest = _largest(weights)
    scales = [n for n in loads((weights,)) if n not in largest]
    steps = [i.coefficient(a) for n in scales for i in n.indices for a in over if a in i.axes]
    return bool(steps) and all(step is None for step in steps)


@dataclass(frozen=True, slots=True)
class SumsOfGroups:
    """A product with integer weights as a sum over groups of multiples of the groups' sums.

    Attributes:
        groups: the axes along which scales of the weights vary.
        inner: the others of the sum.
        rows: the operand beside the weights.
        parts: factor -> terms that it multiplies, summed along ``inner``.
    """

    groups: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    rows: Expr
    parts: dict[Expr, Expr]


def sums_of_groups(node: Expr) -> SumsOfGroups | None:
    """Return a product's sums of groups whose terms bf16 holds; None for anything else."""
    for few, many, _, _, shared, over in _orders(node):
        if shared or not reads_narrow(many):
            continue
        largest = _largest(many)
        scaled = axes_in(n for n in loads((many,)) if n not in largest)
        groups = tuple(axis for axis in over if axis in scaled)
        inner = tuple(axis for axis in over if axis not in scaled)
        if not groups or not inner:
            continue
        parts = multiples(Op("mul", (few, many)), inner)
        given = {f: t for f, t in parts.items() if f is not None}
        held = (
            t is few or all(a is few or holds(BF16, a) for a in children(t)) for t in given.values()
        )
        if len(given) == len(parts) and all(held):
            return SumsOfGroups(groups, inner, few, given)
    return None


def _rows_beside_chosen(node: Expr) -> Expr | None:
    """Return the rows of a product whose matrix they choose by a number that is read, or None.

    Tiles read such rows where they are, and stop at the last; those at places that are read, too,
    they would copy for each tile of columns.
    """
    for few, many, own, others, shared, over in _orders(node):
        rows, columns = (product(a.extent for a in axes).hint() for axes in (own, others))
        if rows <= columns and shared and _is_chosen(many, over, shared):
            return few if _is_contiguous(few, over) else None
    return None


def match_skinny(node: Expr, most: int) -> StreamedProduct | None:
    """Return a sum as a skinny product of at most ``most`` rows; None for anything else.

    Both operands are contiguous along the summed axis, or the weights are in panels. A sum over
    several axes, as of weights packed in groups and bytes, is one if its weights are narrow.
    """
    for few, many, own, others, shared, over in _orders(node):
        rows = product(a.extent for a in own)
        if not rows.is_constant or rows.const > most or not others:
            continue
        if shared and not _is_chosen(many, over, shared):
            continue
        extent = product(a.extent for a in others)
        if extent.is_constant and extent.const <= rows.const:
            continue
        beside = shared.difference(*(i.axes for n in loads((many,)) for i in n.indices))
        ordered, columns = _by_serial(own), _by_serial(others)
        batch, parts = _by_serial(shared - beside), _by_serial(beside)
        terms, narrow = product(a.extent for a in over), _is_narrow(many, few)
        if not _is_contiguous(few, over) or (len(over) > 1 and not narrow):
            continue
        if len(columns) == 1 and _is_contiguous(many, over):
            size, packed = _itemsize(many), len(over) > 1
            how = (batch, narrow, packed, parts, narrow and _is_of_bf16(many))
            return StreamedProduct(ordered, columns, few, terms, size, 0, *how)
        panel = (_matrix if shared else _panel)(many, over, columns)
        if panel and (len(columns) > 1 or mod(columns[0].extent, index(panel)) is index(0)):
            size, integers = _itemsize(many), reads_narrow(many)
            how = (batch, integers, False, parts, integers and _is_of_bf16(many))
            return StreamedProduct(ordered, columns, few, terms, size, panel, *how)
    return None


def rows_beside_narrow(node: Expr, machine: Machine, *, packed: int = 0) -> Expr | None:
    """Return the rows of a product that converts narrow weights itself; None for anything else.

    The weights may lie in any order. Symbolic extents count by their hints.

    Args:
        packed: least number of rows beside weights several of which are in a byte.
    """
    for few, many, own, others, shared, over in _orders(node):
        rows, columns = (product(a.extent for a in axes).hint() for axes in (own, others))
        most = 1 if shared else machine.cached.narrow_rows  # libraries are as fast in a batch
        if rows > most or not _is_narrow(many, few):
            continue
        terms = product(a.extent for a in over).hint()
        if rows < packed and max(_elements(n.buffer) for n in _largest(many)) < terms * columns:
            continue
        if others and _is_contiguous(few, over):
            return few if rows < columns else None
    return None


def match_panels(node: Expr, width: int) -> StreamedProduct | None:
    """Return a product of any number of rows whose weights lie in panels of ``width`` columns.

    None for anything else. A single axis of columns need not end with a panel.
    """
    for few, many, own, others, shared, over in _orders(node):
        columns = _by_serial(others)
        one = columns and not shared and len(over) == 1
        if one and _panel(many, over, columns) == width:
            rows, size = _by_serial(own), _itemsize(many)
            return StreamedProduct(rows, columns, few, over[0].extent, size, width)
    return None


def columns_in_panels(node: Expr) -> Axis | None:
    """Return the axis of the columns in a panel for a product, of any number of rows, of integer
    weights that lie in panels; None for anything else."""
    for _, many, _, others, _, over in _orders(node):
        columns = _by_serial(others)
        if len(columns) > 1 and reads_narrow(many):
            return columns[-1] if _panel(many, over, columns) else None
    return None


def copies_from_tables(graph: Graph) -> dict[Buffer, Def]:
    """Return the definitions that only copy elements, at places that they read.

    Their readers may load from the table: the weights of a product, one matrix for each row.
    """
    return {line.buffer: line for line in graph.defs if _picks(line.expr)}


def conversions(graph: Graph, simplify: Normalizer) -> dict[Buffer, Def]:
    """Return the definitions that compute each element from narrower ones, which may be a weight's.

    They are whole: their producers that are such, too, are inlined.
    """
    found: dict[Buffer, Def] = {}
    for line in graph.defs:
        whole = inline_loads(line, found, simplify)
        if not reductions(whole.expr) and reads_narrow(whole.expr, whole.expr.dtype.itemsize):
            found[line.buffer] = whole
    return found


def reading_weights(line: Def, known: Mapping[Buffer, Def], simplify: Normalizer) -> Def:
    """Return a product with its weights, the largest tensor that it reads, inlined if known."""
    read = dict.fromkeys(n.buffer for n in loads((line.expr,)))
    weights = max(read, key=_elements, default=None)
    made = known.get(weights) if weights is not None else None
    return line if made is None else inline_loads(line, {made.buffer: made}, simplify)


def reads_narrow(value: Expr, size: int = 0) -> bool:
    """Return True if a value's largest tensors are integers, or of fewer bytes an element.

    Args:
        size: bytes; by default only integers count.
    """
    found = _largest(value)
    return bool(found) and all(n.dtype.is_integer or n.dtype.itemsize < size for n in found)


def _is_narrow(weights: Expr, rows: Expr) -> bool:
    """Return True if weights are narrower in memory than as operands of a product with rows."""
    return reads_narrow(weights, narrow_operand(rows, HALF).dtype.itemsize)


def _largest(value: Expr) -> list[Load]:
    """Return the loads of tensors of more than an eighth of the largest one's elements.

    Those of smaller ones are scales, of columns or of groups of terms.
    """
    sizes = {n: _elements(n.buffer) for n in loads((value,))}
    most = max(sizes.values(), default=0)
    return [n for n, size in sizes.items() if size * 8 > most]


def _elements(buffer: Buffer) -> int:
    return product(buffer.shape).hint()


def _picks(value: Expr) -> bool:
    atoms = (a for i in value.indices for a in i.atoms()) if isinstance(value, Load) else ()
    return any(isinstance(a, Runtime) for a in atoms)


_Axes: TypeAlias = frozenset[Axis]


def _orders(node: Expr) -> Iterator[tuple[Expr, Expr, _Axes, _Axes, _Axes, tuple[Axis, ...]]]:
    """Yield, for a product: either operand, the other, the axes of each, of both, and those of the
    sum."""
    found = sides(node)
    if found is None or not isinstance(node, Reduce):
        return
    left, right = (found.left, found.left_axes), (found.right, found.right_axes)
    for (few, own), (many, others) in ((left, right), (right, left)):
        yield few, many, own, others, found.shared, node.over


def _is_chosen(weights: Expr, over: Iterable[Axis], batch: frozenset[Axis]) -> bool:
    """Return True if weights depend on a batch only through numbers that are read."""
    found = [
        n for n in postorder((weights,)) if isinstance(n, Load) and not n.axes.isdisjoint(over)
    ]
    atoms = (a for n in found for i in n.indices for m, _ in i.terms for a in m)
    return all(isinstance(a, Runtime) or batch.isdisjoint(a.axes) for a in atoms)


def _by_serial(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return tuple(sorted(axes, key=lambda a: a.serial))


def _is_contiguous(operand: Expr, over: tuple[Axis, ...]) -> bool:
    """Return True if an operand's loads, without those of scales, have stride 1 along an axis."""
    found = [n for n in _largest(operand) if n.axes & {*over}]
    offsets = [load.buffer.offset(load.indices) for load in found]
    steps = [{offset.coefficient(axis) for axis in over} for offset in offsets]
    return bool(found) and all(index(1) in step for step in steps)


def _itemsize(operand: Expr) -> int:
    return max((n.dtype.itemsize for n in postorder((operand,)) if isinstance(n, Load)), default=4)


def _panel(many: Expr, over: tuple[Axis, ...], columns: tuple[Axis, ...]) -> int:
    """Return the number of columns of a panel, or 0 if the operand is not in panels.

    Those of integers have scales beside them; two in a byte are of both halves of a panel.
    """
    found = _largest(many)
    if len(found) != 1 or found[0].guard is not None:
        return 0
    offset = found[0].buffer.offset(found[0].indices)
    steps = [offset.coefficient(axis) for axis in over]
    step = min((s.const if s and s.is_constant else 0 for s in steps), default=0)
    if not 1 < step <= WIDEST_PANEL:
        return 0
    return next((step * p for p in (1, 2) if _is_of_panels(offset, columns, step, p)), 0)


def _matrix(many: Expr, over: tuple[Axis, ...], columns: tuple[Axis, ...]) -> int:
    """Return the number of columns of a matrix whose columns are neighbours, if it is wider than
    any other panel, or 0.

    It has one axis of columns, or two if some columns of each part were unrolled.
    """
    found = [load for load in loads((many,)) if load.axes & {*over}]
    offset = found[0].buffer.offset(found[0].indices) if len(found) == 1 == len(over) else index(0)
    first, *more = columns
    step, part = offset.coefficient(over[0]), offset.coefficient(first)
    if step is None or part is None or not offset.steps_by_one(columns[-1]):
        return 0
    whole = part * first.extent is step and all(part is not lane.extent for lane in more)
    wide = step.is_constant and step.const > WIDEST_PANEL
    return step.const if whole and wide and len(more) < 2 else 0


def _is_of_panels(offset: Index, columns: tuple[Axis, ...], step: int, parts: int) -> bool:
    """Return True for an offset of panels that have some parts of ``step`` columns, which share
    elements."""
    if len(columns) == 1:
        whole = step * parts
        panel = Axis("panel", floordiv(columns[0].extent + (whole - 1), index(whole)))
        between, place = Axis("part", index(parts)), Axis("place", index(step))
        column = index(panel) * whole + index(between) * step + index(place)
        offset = substitute_index(offset, {columns[0]: column})
    elif parts < len(columns) <= 3 and mod(index(step), columns[-1].extent) is index(0):
        panel, between, place = columns[0], columns[-2], columns[-1]
    else:
        return False
    several = panel.extent is not index(1) and offset.coefficient(panel) not in (None, index(0))
    apart = between in offset.axes  # parts of a panel, not of its elements
    return several and apart is (parts == 1) and offset.coefficient(place) is index(1)
