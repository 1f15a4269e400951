"""Restrict lines of a graph to a chunk of rows: definitions and matrix products, row by row.

``RowBody`` takes the lines of a region one after the other and rewrites each for a chunk of rows.
A line is legal if row i of its operands contributes to row i of its result only, or to a sum over
all rows. Rows are recognised by offsets: an element of row ``i`` lies at ``i * stride + rest``,
however many axes the tensor has. So ``[batch, time, c]`` has the rows of ``[batch * time, c]``.

Worked example, 512 of 4096 rows: ``lse[b, t] = log(sum(v: exp(mm[b*1024 + t, v])))`` becomes
``lse[i, 0] = log(sum(v: exp(mm[i, v])))`` with ``i`` below 512.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusec.ir.dtype import F32, HALF
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, Load, Reduce, cast, loads, op, postorder
from fusec.ir.extern import AddProduct, Product
from fusec.ir.graph import Argument, Carried, Def, Extern, Graph, Line, RowLoop, View, whole_view
from fusec.ir.index import Axis, Index, Size, index, is_in_range, is_nonnegative, most, product
from fusec.ir.rewrite import rewrite

_ADDED = "adds to the sum over all chunks of rows"


class NotByRows(Exception):
    """A line cannot run on a chunk of rows; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    """A view of all rows of an outer buffer, and the body's buffer for a chunk of them."""

    view: View
    inner: Buffer


class RowBody:
    """Builder of a loop's body: lines over ``rows`` rows, rewritten for ``count`` rows.

    Attributes:
        made: outer buffer that is computed row by row -> the body's buffer.
        zeros: what the sums are before the loop.
        after: position of a line -> its remainder after the loop, which loads the complete sums.
        widened: product over all rows whose sum is in a wider type -> operands among ``made``.
    """

    def __init__(self, rows: Index, count: Index) -> None:
        self.rows = rows
        self.count = count
        self.made: dict[Buffer, Buffer] = {}
        self.after: dict[int, Def] = {}
        self._nodes: list[Line] = []
        self._slices: dict[object, _Slice] = {}
        self._whole: dict[Buffer, None] = {}
        self.zeros: list[Def] = []
        self._sums: dict[Carried, tuple[Buffer, Buffer]] = {}
        self._added: dict[Buffer, None] = {}
        self._gone: set[Buffer] = set()
        self.widened: dict[Buffer, tuple[Buffer, ...]] = {}

    @property
    def sources(self) -> tuple[Buffer, ...]:
        """Outer buffers of which the body reads one chunk of rows at a time."""
        return tuple(dict.fromkeys(s.view.buffer for s in self._slices.values()))

    def loop(
        self, name: str, height: int, results: tuple[Buffer, ...], sizes: tuple[Size, ...]
    ) -> RowLoop:
        """Return the loop whose body returns the rows of ``results``, then the sums so far.

        Args:
            height: the rows of a chunk.
            sizes: the symbolic sizes of the outer graph.
        """
        own = [a for m, _ in self.count.terms for a in m if isinstance(a, Size)]
        slices = self._slices.values()
        inner, sliced = tuple(s.inner for s in slices), tuple(s.view for s in slices)
        read, following = zip(*self._sums.values(), strict=True) if self._sums else ((), ())
        made = (*(self.made[buffer] for buffer in results), *following)
        given = (*inner, *self._whole, *read, *self._added)
        inputs: tuple[Buffer | Size, ...] = (*own, *sizes, *given)
        body = Graph("rows", inputs, tuple(self._nodes), tuple(map(whole_view, made)))
        whole = tuple(map(whole_view, self._whole))
        how = (tuple(self._added), (), tuple(self._sums))
        return RowLoop(name, self.rows, height, self.count, body, sliced, whole, results, *how)

    def add(self, position: int, node: Line) -> None:
        """Add a line, whose position in the outer graph is ``position``.

        Raises:
            NotByRows: if a row of its result depends on other rows.
        """
        match node:
            case Def():
                self._define(position, node)
            case Extern() if node.product is not None:
                self._multiply(position, node, node.product)
            case RowLoop():
                raise NotByRows(f"the loop {node.name} reads it")
            case _:
                raise NotByRows(f"{node.target} reads it")

    # -- definitions -------------------------------------------------------------------------------

    def _define(self, position: int, line: Def) -> None:
        self._refuse(load.buffer for load in loads((line.expr,)))
        problem: NotByRows | None = None
        for length in range(1, len(line.axes) + 1):
            if product(a.extent for a in line.axes[:length]) is not self.rows:
                continue
            before = dict(self._slices), dict(self._whole)
            try:
                self._define_rows(line, length)
                return
            except NotByRows as found:
                problem = problem or found
                self._slices, self._whole = before
        try:
            self._define_sums(position, line)
        except NotByRows as found:
            raise (problem or found) from None

    def _define_rows(self, line: Def, length: int) -> None:
        """Add a definition whose first ``length`` axes are the rows."""
        whole, row = self._row_axis(line.axes[:length])
        expr = self._at_rows(line.expr, line.axes[:length], whole, row)
        rest = line.axes[length:]
        width = product(a.extent for a in rest)
        column = rest[0] if len(rest) == 1 else Axis("column", width)
        if rest != (column,):
            expr = expr.substitute(_unravel(column, rest))
        buffer = self._make(line.buffer, width)
        self._nodes.append(Def(buffer, (row, column), expr, line.origin))

    def _make(self, buffer: Buffer, width: Index) -> Buffer:
        if not buffer.is_row_major:
            raise NotByRows(f"{buffer} is not row-major")
        shape = (self.count, width)
        inner = Buffer.row_major(buffer.name, shape, buffer.dtype)
        self.made[buffer] = inner
        return inner

    def _define_sums(self, position: int, line: Def) -> None:
        """Add the sums over rows in a definition; its remainder goes after the loop."""
        sums: dict[Expr, Expr] = {}
        inside: set[Expr] = set()
        for node in reversed(postorder((line.expr,))):  # the outermost sum first
            if (
                isinstance(node, Reduce)
                and node not in inside
                and any(map(self._reads_rows, node.bodies))
            ):
                sums[node] = self._sum(line, node, len(sums))
                inside.update(postorder((node,)))
        if line.expr in sums:  # the sum is the whole definition: its own buffer is carried
            return
        (left,) = rewrite((line.expr,), lambda node: sums.get(node, node))
        if not sums or self._reads_rows(left):
            raise NotByRows(f"{line.buffer} reads rows outside a sum over them")
        self._gone.add(line.buffer)
        self.after[position] = Def(line.buffer, line.axes, left, line.origin)

    def _sum(self, line: Def, node: Reduce, number: int) -> Expr:
        """Add one sum over rows to the body; return the load of its total."""
        if node.monoid.name != "sum" or node.axes - frozenset(line.axes):
            raise NotByRows(f"{line.buffer} has a {node.monoid} over rows")
        axes = line.axes if node is line.expr else tuple(a for a in line.axes if a in node.axes)
        for first in range(len(node.over)):
            for last in range(first + 1, len(node.over) + 1):
                over = node.over[first:last]
                if product(a.extent for a in over) is not self.rows:
                    continue
                whole, row = self._row_axis(over)
                body = self._at_rows(node.body, over, whole, row)
                others = (*node.over[:first], row, *node.over[last:])
                shape = tuple(a.extent for a in axes)
                outer = line.buffer
                if node is not line.expr:
                    name = f"{line.buffer.name}_sum{number or ''}"
                    outer = Buffer.row_major(name, shape, node.dtype)
                zero, other, before, after = (
                    Buffer(f"{outer.name}{end}", outer.shape, outer.strides, outer.dtype)
                    for end in ("_zero", "_other", "", "_next")
                )
                at = tuple(map(index, axes))
                value = op("add", Load(before, at), Reduce(node.monoid, others, body))
                self._nodes.append(Def(after, axes, value, line.origin))
                self.zeros.append(Def(zero, axes, Const(0, node.dtype), line.origin))
                self._sums[Carried(whole_view(zero), outer, other)] = (before, after)
                self._gone.add(outer)
                return Load(outer, at)
        raise NotByRows(f"{line.buffer} sums over other axes than the rows")

    def _row_axis(self, axes: tuple[Axis, ...]) -> tuple[Axis, Axis]:
        """Return an axis over all rows, used only for analysis, and the body's axis."""
        if any(a.limit is not None for a in axes):
            raise NotByRows(f"axis {axes[0].name} of the rows ends early")
        whole = axes[0] if len(axes) == 1 else Axis("i", self.rows)
        return whole, Axis(axes[0].name, self.count)

    def _reads_rows(self, expr: Expr) -> bool:
        return any(load.buffer in self.made for load in loads((expr,)))

    # -- expressions -------------------------------------------------------------------------------

    def _at_rows(self, expr: Expr, axes: tuple[Axis, ...], whole: Axis, row: Axis) -> Expr:
        """Return an expression rewritten from the axes of all rows to the rows of a chunk."""
        if axes != (whole,):
            expr = expr.substitute(_unravel(whole, axes))

        def at_row(node: Expr) -> Expr:
            if isinstance(node, IndexValue) and _varies(node.index, whole):
                raise NotByRows("a line asks for the number of its row")
            return self._load(node, whole) if isinstance(node, Load) else node

        (found,) = rewrite((expr,), at_row)
        return found.substitute({whole: index(row)})

    def _load(self, load: Load, whole: Axis) -> Expr:
        offset = load.buffer.offset(load.indices)
        if not any(_varies(i, whole) for i in load.indices):
            if load.buffer in self.made:
                raise NotByRows(f"{load} reads other rows")
            self._whole[load.buffer] = None
            return load
        split = _split(offset, whole)
        if split is None:
            raise NotByRows(f"{load} is not one row")
        stride, rest = split
        inner = self.made.get(load.buffer)
        if inner is not None:
            if stride is not inner.shape[1] or not is_in_range(rest, stride):
                raise NotByRows(f"{load} reads other rows")
        elif is_nonnegative(stride):
            inner = self._slice(load.buffer, stride, rest)
        else:
            raise NotByRows(f"{load} reads rows in reverse")
        return Load(inner, (index(whole), rest), load.guard)

    def _slice(self, buffer: Buffer, stride: Index, rest: Index) -> Buffer:
        """Return the body's buffer for rows, ``stride`` elements apart, of an outer buffer."""
        width = stride
        if not is_in_range(rest, stride):
            high = most(rest)
            if high is None or not is_in_range(rest, index(high + 1)):
                raise NotByRows(f"the rows of {buffer} have no bounds")
            width = index(high + 1)
        view = View(buffer, (self.rows, width), (stride, index(1)), index(0))
        return self._take(view)

    def _take(self, view: View) -> Buffer:
        key = (view.buffer, view.shape, view.strides, view.offset)
        known = self._slices.get(key)
        if known is None:
            shape = (self.count, *view.shape[1:])
            inner = Buffer(view.buffer.name, shape, view.strides, view.buffer.dtype)
            known = self._slices[key] = _Slice(view, inner)
        return known.inner

    def _refuse(self, buffers: Iterator[Buffer]) -> None:
        for buffer in buffers:
            if buffer in self._gone:
                raise NotByRows(f"{buffer} needs all rows before the next step of one")

    # -- products ----------------------------------------------------------------------------------

    def _multiply(self, position: int, node: Extern, known: Product) -> None:
        """Add a matrix product that has these rows, or that contracts over them."""
        (made,) = node.writes
        left, right = node.views
        self._refuse(iter(node.reads))
        match self._place(left), self._place(right):
            case (0, None):
                self._multiply_rows(node, made, left, right)
            case (None, None) if left.shape[0] is self.rows:
                self._multiply_rows(node, made, left, right)
            case ((1 | None), 0) | (1, None):
                self._multiply_over_rows(position, node, known, left, right)
            case _:
                raise NotByRows(f"{made}: a product along other rows")

    def _place(self, view: View) -> int | None:
        """Return the dimension of an argument that maps to the rows, or None if it has none."""
        inner = self.made.get(view.buffer)
        if inner is None:
            return None
        stride = inner.shape[1]
        for place, other in ((0, 1), (1, 0)):
            end = view.offset + (view.shape[other] - 1) * view.strides[other]
            row = view.shape[place] is self.rows and view.strides[place] is stride
            if row and is_in_range(end, stride):
                return place
        raise NotByRows(f"{view.buffer} is read in another order")

    def _multiply_rows(self, node: Extern, made: Buffer, left: View, right: View) -> None:
        argument = self._argument(left, 0)
        self._whole[right.buffer] = None
        inner = self._make(made, made.shape[1])
        self._nodes.append(_product(node, (argument, right), (inner,)))

    def _multiply_over_rows(
        self, position: int, node: Extern, known: Product, left: View, right: View
    ) -> None:
        (made,) = node.writes
        if left.shape[1] is not self.rows or right.shape[0] is not self.rows:
            raise NotByRows(f"{made}: a product along other rows")
        arguments = (self._argument(left, 1), self._argument(right, 0))
        self._gone.add(made)
        total = made
        if made.dtype in HALF:
            self.widened[made] = tuple(b for b in node.reads if b in self.made)
            total = Buffer.row_major(f"{made.name}_sum", made.shape, F32)
            self._gone.add(total)
            axes = tuple(Axis(f"i{n}", extent) for n, extent in enumerate(made.shape))
            value = cast(Load(total, tuple(map(index, axes))), made.dtype)
            self.after[position] = Def(made, axes, value, node.origin)
        self._added[total] = None
        self._nodes.append(_adding(node, known, total, arguments))

    def _argument(self, view: View, place: int) -> View:
        """Return an argument's view for a chunk of rows; its dimension ``place`` is the rows."""
        other = 1 - place
        inner = self.made.get(view.buffer)
        if inner is None:
            shape = (view.shape[place], view.shape[other])
            strides = (view.strides[place], view.strides[other])
            inner = self._take(View(view.buffer, shape, strides, view.offset))
            offset = index(0)
        else:
            offset = view.offset
        swapped = [self.count, view.shape[other]]
        return View(inner, tuple(swapped if place == 0 else swapped[::-1]), view.strides, offset)


def _product(node: Extern, args: tuple[Argument, ...], outputs: tuple[Buffer, ...]) -> Extern:
    return replace(node, args=args, outputs=outputs, decomposition=())


def _adding(node: Extern, known: Product, total: Buffer, args: tuple[View, ...]) -> Extern:
    """Return the library call of ``total += a @ b``."""
    return replace(
        node,
        target=known.added,
        args=(whole_view(total), *args),
        outputs=(),
        reason=_ADDED,
        effect=AddProduct(),
        impure=True,
        decomposition=(),
    )


def _unravel(flat: Axis, axes: tuple[Axis, ...]) -> dict[Axis, Index]:
    """Return axis -> its index computed from ``flat``, the axis that ``axes`` merge into."""
    mapping: dict[Axis, Index] = {}
    left = index(flat)
    for axis in reversed(axes[1:]):
        mapping[axis] = left % axis.extent
        left = left // axis.extent
    if axes:
        mapping[axes[0]] = left
    return mapping


def _varies(value: Index, axis: Axis) -> bool:
    """Return True if an index mentions an axis outside of the values that it loads from memory."""
    return axis in value.atoms()


def _split(offset: Index, axis: Axis) -> tuple[Index, Index] | None:
    """Return (k, rest) of ``k*axis + rest``, both free of the axis; None if not affine in it."""
    stride, rest = index(0), index(offset.const)
    for monomial, coefficient in offset.terms:
        holding = [atom for atom in monomial if _varies(index(atom), axis)]
        term = index(coefficient)
        for atom in monomial:
            if atom is not axis:
                term = term * index(atom)
        if not holding:
            rest = rest + term
        elif holding == [axis]:
            stride = stride + term
        else:
            return None
    return stride, rest
