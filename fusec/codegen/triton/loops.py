"""Properties of a program's loops that decide how the GPU printers print them."""

from __future__ import annotations

from fusec.ir.dtype import F32
from fusec.ir.expr import Dot, Expr, Load, Var
from fusec.ir.index import Axis, product
from fusec.ir.program import For, Let, Program, Statement, Update, is_product, reads, statements


def longer_towards_the_end(program: Program) -> set[Axis]:
    """Return the grid axes along which trip counts grow, as with a causal attention's queries."""
    found = set()
    for loop in program.body:
        if isinstance(loop, For):
            for axis in program.grid:
                steps = [s.coefficient(axis) for s in loop.stops if axis in s.axes]
                growing = [s for s in steps if s is not None and s.is_constant and s.const > 0]
                if growing and axis not in loop.start.axes:
                    found.add(axis)
    return found


def shares_operands(loop: For) -> bool:
    """Return True for a loop in which a product and another statement use the same load.

    When it pipelines the loop, Triton 3.7 allocates one buffer too few for such a tile: the copy of
    the iteration after next starts before the product has read its operand (see ``emulator/``).
    """
    lets = [s for s in loop.body if isinstance(s, Let)]
    loaded = {s.var for s in lets if isinstance(s.value, Load)}
    turned: dict[Expr, Expr] = {s.var: s.value for s in lets if isinstance(s.value, Var)}
    read = [(s, {turned.get(v, v) for v in reads(s)}) for s in loop.body if not _turns(s)]
    products = {v for s, named in read if is_product(s) for v in named}
    others = {v for s, named in read if not is_product(s) for v in named}
    return not loaded.isdisjoint(products & others)


def unread_sums(loop: For, least_rows: int) -> set[Var]:
    """Return the sums of products that a loop only adds to, of left operands computed from loads.

    Triton keeps such operands in registers, which wgmma reads while the loop goes on. 3.6 and 3.7
    let the next iteration write them before a wait covers that (triton-lang/triton#9433): wrong on
    an H200 (2026-11-27). If anything in the loop uses the sum, each iteration waits for it. An
    operand that is computed from a wgmma, as an attention's weights are, waits for that one, and
    so for all before it; products of fewer rows than a wgmma's are there at once.

    Args:
        least_rows: of a wgmma.
    """
    waited, computed = set[Expr](), set[Expr]()
    for let in (s for s in loop.body if isinstance(s, Let)):
        if _is_wgmma(let.value, least_rows) or not waited.isdisjoint(reads(let)):
            waited.add(let.var)
        elif not isinstance(let.value, Load | Var):
            computed.add(let.var)
    found = set()
    for one in loop.body:
        if isinstance(one, Update) and isinstance(one.value, Dot) and one.value.left in computed:
            others = (s for s in statements(loop.body) if s is not one)
            if one.var.dtype is F32 and not any(one.var in reads(other) for other in others):
                found.add(one.var)
    return found


def _is_wgmma(value: Expr, least_rows: int) -> bool:
    """Return True for a product that is a wgmma if any product of its kernel is."""
    if not isinstance(value, Dot) or (value.left.dtype is F32 and not value.tf32):
        return False
    rows = product(axis.extent for axis in value.left.axes - set(value.over))
    return rows.is_constant and rows.const >= least_rows


def _turns(statement: Statement) -> bool:
    """Return True for a value under another name: a tile that is transposed."""
    return isinstance(statement, Let) and isinstance(statement.value, Var)
