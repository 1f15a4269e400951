"""One accumulator for a sum of matrix products: ``a @ b + c @ d`` adds both into the same tile.

The gradient of what several layers read is such a sum. With an accumulator for each product, a
128x128 tile of three in 8 warps has 192 registers a thread for them alone; with one it has 64.

Worked example: ``for k: s := dot(a, b, s); t := dot(c, d, t)`` and then ``y = s + t`` becomes
``for k: s := dot(a, b, s); s := dot(c, d, s)``, and y is s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusec.codegen.elementwise import readers
from fusec.ir.expr import Dot, Expr, Op, Var, children, rebuild
from fusec.ir.program import Carry, For, Let, Program, Put, Statement, Update


def one_sum(program: Program) -> Program:
    """Return the program with one carry for each sum of products that one loop adds up."""
    while (found := _find(program)) is not None:
        kept, dropped, total = found
        program = replace(program, body=tuple(_merged(program.body, kept, dropped, total)))
    return program


def _find(program: Program) -> tuple[Var, Var, Var] | None:
    """Return two carries whose only reader adds them, and the name of the sum."""
    uses = readers(program)
    home: dict[Expr, tuple[int, int]] = {}
    for position, statement in enumerate(program.body):
        if isinstance(statement, Carry) and statement.initial.value == 0:
            found = list(_loops(program.body, statement.var))
            updates = [u for _, u in found]
            if found and all(_adds_product(u) for u in updates):
                loops = {at for at, _ in found}
                if (
                    len(loops) == 1
                    and -1 not in loops
                    and uses.get(statement.var, 0) == len(updates) + 1
                ):
                    home[statement.var] = (loops.pop(), position)
    for statement in program.body:
        match statement:
            case Let(var=total, value=Op(name="add", args=(Var() as a, Var() as b))):
                if a is not b and a in home and b in home and a.axes == b.axes:
                    kept, dropped = sorted((a, b), key=lambda v: home[v][1])
                    if home[a][0] == home[b][0] and kept.dtype is total.dtype:
                        return kept, dropped, total
    return None


def _loops(body: tuple[Statement, ...], carry: Var) -> Iterator[tuple[int, Update]]:
    """Yield the updates of a carry with the position of the loop that they stand in; else -1."""
    for position, statement in enumerate(body):
        match statement:
            case Update() if statement.var is carry:
                yield -1, statement
            case For():
                for inner in statement.body:
                    if isinstance(inner, Update) and inner.var is carry:
                        yield position, inner
                    elif isinstance(inner, For):
                        yield from ((-1, u) for _, u in _loops((inner,), carry))


def _adds_product(update: Update) -> bool:
    return isinstance(update.value, Dot) and update.value.into is update.var


def _merged(
    body: tuple[Statement, ...], kept: Var, dropped: Var, total: Var
) -> Iterator[Statement]:
    new: dict[Expr, Expr] = {dropped: kept, total: kept}
    for statement in body:
        match statement:
            case Carry() if statement.var is dropped:
                continue
            case Let() if statement.var is total:
                continue
            case Update():
                var = kept if statement.var is dropped else statement.var
                yield Update(var, _renamed(statement.value, new))
            case Let():
                yield Let(statement.var, _renamed(statement.value, new))
            case Put() if statement.value is total:
                yield replace(statement, value=kept)
            case For():
                yield replace(statement, body=tuple(_merged(statement.body, kept, dropped, total)))
            case _:
                yield statement


def _renamed(value: Expr, new: dict[Expr, Expr]) -> Expr:
    if value in new:
        return new[value]
    parts = children(value)
    if not any(part in new for part in parts):
        return value
    return rebuild(value, {part: new.get(part, part) for part in parts}, None)
