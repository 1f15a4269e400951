"""Warp specialization: split a program into a producer warp and consumer warp groups.

The two share a ring of slots in shared memory. The producer warp runs the loop with its tile copies
only, and fills slots as they become free, even for the next output tile while consumers are in
their epilogue. A consumer takes a slot, starts its products, waits for the products of the previous
iteration, and frees the slot that these have read.

All other computation comes after the loop, so that the accumulators have the registers until then.

A program is split if its only loop does nothing but accumulate products of tiles that descriptors
copy unchanged. Its epilogue may be anything. A product of 8 bits whose sum f32 takes with each tile
(``Plan.promotes``) is awaited at once, while loads run ahead.

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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusec.codegen.triton.descriptors import DescriptorCopy
from fusec.ir.expr import Dot, Expr, Op, Var
from fusec.ir.index import index, is_nonnegative
from fusec.ir.program import (
    Await,
    Carry,
    Fill,
    For,
    Free,
    Let,
    Program,
    Put,
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


@dataclass(frozen=True, slots=True)
class RoleStatements:
    """The statements of producer and consumer warps, for each iteration of the grid.

    Attributes:
        load: statements of the producer warp.
        multiply: statements of the consumer warps.
        copies: copies by descriptor of values that the split has added to the program.
    """

    load: tuple[Statement, ...]
    multiply: tuple[Statement, ...]
    copies: Mapping[Var | Put, DescriptorCopy] = field(default_factory=dict)

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The first ``Fill`` of each ring."""
        found = {s.ring: s for s in reversed((*statements(self.load),)) if isinstance(s, Fill)}
        return tuple(reversed(found.values()))


def split(program: Program, copied: Mapping[Var | Put, DescriptorCopy]) -> RoleStatements | None:
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
    return _split(program, loop, loads, products, added)


def _adds_a_part(update: Update, products: tuple[Let | Update, ...]) -> bool:
    """Return True for ``sum := sum + part`` of a product's own sum."""
    parts = {s.var for s in products if isinstance(s, Let)}
    match update.value:
        case Op(name="add", args=(total, part)):
            return total is update.var and part in parts
    return False


def _is_read(side: tuple[Expr, bool], copied: Mapping[Var | Put, DescriptorCopy]) -> bool:
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


def _split(
    program: Program,
    loop: For,
    loads: tuple[Let, ...],
    products: tuple[Let | Update, ...],
    added: tuple[Update, ...],
) -> RoleStatements:
    ring = Ring("operands", program.stages)
    sums = tuple(dict.fromkeys(s.var for s in products))
    last: tuple[Statement, ...] = (Await(sums, 0), Free(ring, 0, None))
    made: tuple[Statement, ...] = (*products, Await(sums, len(products)), Free(ring, 1, loop.axis))
    if added:
        steps = zip(products, added, strict=True)
        made = tuple(s for one, add in steps for s in (one, Await((one.var,), 0), add))
        made = (*made, Free(ring, 0, None))
    taken = (Take(ring, tuple(load.var for load in loads)), *made)
    totals = {s.var for s in (*products, *added)}
    carries = tuple(s for s in program.body if isinstance(s, Carry) and s.var in totals)
    multiply: tuple[Statement, ...] = (
        *carries,
        replace(loop, body=taken),
        *(() if added else last),
        *(s for s in program.body if s is not loop and s not in carries),
    )
    return RoleStatements((replace(loop, body=(Fill(ring, loads),)),), multiply)


def print_split(roles: RoleStatements) -> str:
    """Return the statements of each role as text."""
    lines: list[str] = []
    for name, body in (("load", roles.load), ("multiply", roles.multiply)):
        lines.append(f"role {name}:")
        print_block(body, 1, lines)
    return "\n".join(lines)
