"""Compute operands of products together where they read the same elements.

One loop over the elements computes both operands if both are defined before the first product: two
products read each byte whose halves are weights of two columns.

Worked example::

    w<n, k> = load                            w<n, k> = load
    a<n, k> = w & 15                          a<n, k> = w & 15
    s<m, n> = dot(k: x, a)          ->        b<n, k> = w >> 4
    b<n, k> = w >> 4                          s<m, n> = dot(k: x, a)
    t<m, n> = dot(k: x, b)                    t<m, n> = dot(k: x, b)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.ir.expr import Dot, Expr, Load, reach
from fusec.ir.program import Carry, For, Let, Program, Put, Statement, Update, reads, statements


def join_operands(program: Program) -> Program:
    """Return the program with operands that share loads defined before a block's first product."""
    return replace(program, body=_joined(program.body))


def _joined(body: Sequence[Statement]) -> tuple[Statement, ...]:
    body = tuple(replace(s, body=_joined(s.body)) if isinstance(s, For) else s for s in body)
    definitions = [s for s in body if isinstance(s, Let | Update)]
    products = {s.value: s for s in definitions if isinstance(s.value, Dot)}
    inside = list(statements(body))
    if len(products) < 2 or any(isinstance(s, Put) for s in inside):
        return body
    made: dict[Expr, Let] = {s.var: s for s in body if isinstance(s, Let)}
    changed = {s.var for s in inside if isinstance(s, Update | Carry)}
    loaded: set[Expr] = set()  # by computed operands so far
    early: set[Expr] = set()  # what the operands that move are made of
    for side in (side for dot in products for side in (dot.left, dot.right)):
        nodes = reach((side,), lambda node: reads(made[node]) if node in made else ())
        values = {node: made[node].value for node in nodes if node in made}
        loads = {node for node, value in values.items() if isinstance(value, Load)}
        if side not in values or side in loads:
            continue
        follows = any(isinstance(value, Dot) for value in values.values())
        if not loads.isdisjoint(loaded) and not follows and changed.isdisjoint(nodes):
            early.update(values)
        loaded |= loads
    first = body.index(next(iter(products.values())))
    moved = [s for s in body[first:] if isinstance(s, Let) and s.var in early]
    return (*body[:first], *moved, *(s for s in body[first:] if s not in moved))
