"""Warp specialization: split a program into a producer warp and consumer warp groups.

The two share a ring of slots in shared memory. The producer warp runs the loop with its tile copies
only, and fills slots as they become free, even for the next output tile while consumers are in
their epilogue. A consumer takes a slot, starts its products, waits for the products of the previous
iteration, and frees the slot that these have read.

All other computation comes after the loop, so that the accumulators have the registers until then.

A program is split if its only loop does nothing but accumulate products of tiles that descriptors
copy unchanged. Its epilogue may be anything. A product of 8 bits whose sum f32 takes with each tile
(``Plan.promotes``) is awaited at once, while loads run ahead.

Two products of one left operand are one product: their right operands lie side by side in a slot,
and the halves of the sum's columns are named after the loop. One instruction of 256 columns reads
the left operand once; two of 128 wait for shared memory (1.25 times the clocks of the products).

Worked example::

    carry acc = 0.0              load                        multiply
    for ko in 0 .. 64:           for ko in 0 .. 64:          carry acc = 0.0
      a = x[...]                   fill operands: a, b       for ko in 0 .. 64:
      b = w[...]                                               take operands: a, b
      acc := dot(a, b, acc)                                    acc := dot(a, b, acc)
    y[...] = bf16(gelu(acc))                                   await acc but 1
                                                               free operands 1 before
                                                             await acc
                                                             free operands
                                                             y[...] = bf16(gelu(acc))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusec.codegen.lowering.orient import COLUMNS
from fusec.codegen.triton.descriptors import Copies, DescriptorCopy
from fusec.ir.expr import Dot, Expr, Op, Var
from fusec.ir.index import Axis, index, is_nonnegative, product
from fusec.ir.program import (
    Await,
    Carry,
    Fill,
    For,
    Free,
    Halve,
    Let,
    Program,
    Ring,
    Statement,
    Take,
    Update,
    print_block,
    statements,
)

TENSOR_BYTES = 2
"""Element size for which tensor cores read row- and column-major tiles from shared memory; of
smaller elements, the terms have to be contiguous."""
MOST_COLUMNS = 256
"""Most columns of a wgmma."""


@dataclass(frozen=True, slots=True)
class RoleStatements:
    """The statements of producer and consumer warps, for each iteration of the grid.

    Attributes:
        load: statements of the producer warp.
        multiply: statements of the consumer warps.
        copies: copies by descriptor of values that the split has added to the program.
        sides: tile that consumers take -> the tiles side by side that the producer fills.
        dimension: lane axes that the split has added -> their dimension, as of ``Form``.
    """

    load: tuple[Statement, ...]
    multiply: tuple[Statement, ...]
    copies: Copies = field(default_factory=dict)
    sides: Mapping[Var, tuple[Var, ...]] = field(default_factory=dict)
    dimension: Mapping[Axis, int] = field(default_factory=dict)

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The first ``Fill`` of each ring."""
        found = {s.ring: s for s in reversed((*statements(self.load),)) if isinstance(s, Fill)}
        return tuple(reversed(found.values()))


def split(program: Program, copied: Copies) -> RoleStatements | None:
    """Split a program into roles, or return None if its loop does more than multiply tiles.

    Args:
        copied: its loads and stores of whole tiles by descriptor.
    """
    loops = [s for s in program.body if isinstance(s, For)]
    if len(loops) != 1 or not _runs(loops[0]):
        return None
    (loop,) = loops
    loads = tuple(s for s in loop.body if isinstance(s, Let) and s.var in copied)
    products = tuple(
        s for s in loop.body if isinstance(s, Let | Update) and isinstance(s.value, Dot)
    )
    added = tuple(s for s in loop.body if isinstance(s, Update) and _adds_a_part(s, products))
    dots = [s.value for s in products if isinstance(s.value, Dot)]
    if len(loads) + len(products) + len(added) < len(loop.body):
        return None
    if any(isinstance(s, Let) for s in products) and len(added) < len(products):
        return None
    if not all(_is_read(side, copied) for d in dots for side in ((d.left, False), (d.right, True))):
        return None
    joints = [] if added else [_Joint.of(pair, copied) for pair in joint_products(products)]
    return _split(program, loop, loads, products, added, [j for j in joints if j is not None])


def _adds_a_part(update: Update, products: tuple[Let | Update, ...]) -> bool:
    """Return True for ``sum := sum + part`` of a product's own sum."""
    parts = {s.var for s in products if isinstance(s, Let)}
    match update.value:
        case Op(name="add", args=(total, part)):
            return total is update.var and part in parts
    return False


def _is_read(side: tuple[Expr, bool], copied: Copies) -> bool:
    """Return True for an operand, the right one or not, that tensor cores read where it is."""
    value, right = side
    copy = copied.get(value) if isinstance(value, Var) else None
    if copy is None or value.dtype.itemsize > TENSOR_BYTES:
        return False
    return value.dtype.itemsize == TENSOR_BYTES or copy.transposed is right


def _runs(loop: For) -> bool:
    """Return True for a loop from 0 that runs at least once."""
    return loop.start is index(0) and all(
        not stop.axes and is_nonnegative(stop - 1) for stop in loop.stops
    )


def joint_products(
    products: Iterable[Let | Update],
) -> list[tuple[tuple[Update, Dot], tuple[Update, Dot]]]:
    """Return pairs of products of one left operand whose columns one instruction has room for."""
    left = [(s, s.value) for s in products if isinstance(s, Update) and isinstance(s.value, Dot)]
    found = []
    while left:
        (one, dot), *left = left
        pair = next((other for other in left if _share_left(dot, other[1])), None)
        if pair is not None:
            found.append(((one, dot), pair))
            left.remove(pair)
    return found


def _share_left(one: Dot, other: Dot) -> bool:
    """Return True for products of one left operand and right ones of one shape, which fit."""
    apart = one.right is not other.right and one.right.axes == other.right.axes
    columns = product(a.extent for a in one.right.axes - set(one.over)).const
    same = one.left is other.left and one.over == other.over and one.dtype is other.dtype
    return apart and same and 2 * columns <= MOST_COLUMNS


@dataclass(frozen=True, slots=True)
class _Joint:
    """Two products of one left operand as one.

    Attributes:
        sums, rights: those of the two; ``sum`` and ``right`` have the columns of both.
        columns: the axis of these columns.
    """

    sums: tuple[Var, Var]
    rights: tuple[Var, Var]
    sum: Var
    right: Var
    columns: Axis
    copy: DescriptorCopy
    product: Update

    @classmethod
    def of(
        cls, pair: tuple[tuple[Update, Dot], tuple[Update, Dot]], copied: Copies
    ) -> _Joint | None:
        """Return two products as one, if their right tiles lie in shared memory alike."""
        (one, dot), (other, second) = pair
        assert isinstance(dot.right, Var) and isinstance(second.right, Var)
        copy, beside = copied[dot.right], copied[second.right]
        box = copy.descriptor
        if copy.transposed is not beside.transposed or box.tile != beside.descriptor.tile:
            return None
        (old,) = dot.right.axes - set(dot.over)
        columns = Axis(old.name, old.extent * 2)
        *outer, rows, last = box.tile
        wide = (*outer, 2 * rows, last) if copy.transposed else (*outer, rows, 2 * last)
        left, terms = one.var.axes - {old}, dot.right.axes & set(dot.over)
        total = Var(f"{one.var.name}_both", one.var.dtype, left | {columns})
        right = Var(f"{dot.right.name}_both", dot.right.dtype, terms | {columns})
        return cls(
            (one.var, other.var),
            (dot.right, second.right),
            total,
            right,
            columns,
            replace(copy, descriptor=replace(box, tile=wide)),
            Update(total, Dot(dot.left, right, dot.over, total, dot.tf32)),
        )


def _split(
    program: Program,
    loop: For,
    loads: tuple[Let, ...],
    products: tuple[Let | Update, ...],
    added: tuple[Update, ...],
    joints: Sequence[_Joint],
) -> RoleStatements:
    ring = Ring("operands", program.stages)
    joint = {var: one for one in joints for var in (*one.sums, *one.rights)}
    merged = dict.fromkeys(joint[s.var].product if s.var in joint else s for s in products)
    sums = tuple(dict.fromkeys(s.var for s in merged))
    last: tuple[Statement, ...] = (Await(sums, 0), Free(ring, 0, None))
    last += tuple(Halve(one.sums, one.sum) for one in joints)
    made: tuple[Statement, ...] = (*merged, Await(sums, len(merged)), Free(ring, 1, loop.axis))
    if added:
        steps = zip(products, added, strict=True)
        made = tuple(s for one, add in steps for s in (one, Await((one.var,), 0), add))
        made = (*made, Free(ring, 0, None))
    joint_of = {one.right: one.rights for one in joints}
    names = dict.fromkeys(joint[s.var].right if s.var in joint else s.var for s in loads)
    taken = (Take(ring, tuple(names)), *made)
    totals = {s.var for s in (*products, *added)}
    carries = tuple(s for s in program.body if isinstance(s, Carry) and s.var in totals)
    first = {one.sums[0]: one.sum for one in joints}
    started = (
        Carry(first.get(s.var, s.var), s.initial)
        for s in carries
        if s.var not in joint or s.var in first
    )
    multiply: tuple[Statement, ...] = (
        *started,
        replace(loop, body=taken),
        *(() if added else last),
        *(s for s in program.body if s is not loop and s not in carries),
    )
    by_name = {s.var: s for s in loads}
    order = tuple(by_name[v] for name in names for v in joint_of.get(name, (name,)))
    return RoleStatements(
        (replace(loop, body=(Fill(ring, order),)),),
        multiply,
        {one.right: one.copy for one in joints},
        joint_of,
        {one.columns: COLUMNS for one in joints},
    )


def print_split(roles: RoleStatements) -> str:
    """Return the statements of each role as text."""
    lines: list[str] = []
    for name, body in (("load", roles.load), ("multiply", roles.multiply)):
        lines.append(f"role {name}:")
        print_block(body, 1, lines)
    return "\n".join(lines)
