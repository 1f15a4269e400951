"""Evaluate long pointwise chains on the tiles of matrix products one element at a time.

Triton evaluates an operation for all of a thread's elements before the next operation. With 64
elements a thread, and an accumulator that holds 64 registers already, a chain such as the gradient
of a GELU keeps four more tiles and spills. ``tl.map_elementwise`` evaluates the whole chain for one
element after the other: a 128x128 tile in 8 warps with that gradient takes 142 registers instead of
255 and 944 spilled bytes, and two layout conversions instead of five (sm_90, Triton 3.7.1,
2026-11).

Worked example: ``t = acc + b; u = t * t; v = t * u; y = bf16(v)`` with tiles acc and b becomes the
function ``tile(acc, b)`` that returns y; other statements between them, such as loads, come before
its call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fusec.ir.expr import Cast, Dot, Expr, Op, Reduce, Select, Var, children
from fusec.ir.index import Axis
from fusec.ir.program import Let, Program, Statement, reads, statements
from fusec.ir.rewrite import is_checked


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Pointwise operations on tiles of one shape, in order: ``outputs = function(inputs)``."""

    inputs: tuple[Var, ...]
    lets: tuple[Let, ...]
    outputs: tuple[Var, ...]


Readers = Mapping[Expr, int]
"""Value -> number of statements that use it."""


def readers(program: Program) -> Readers:
    """Return the number of statements of a program that use each value."""
    lines = statements(program.body)
    return Counter(value for line in lines for value in dict.fromkeys(reads(line)))


def find_chains(
    body: Iterable[Statement], uses: Readers, least: int
) -> Iterator[Statement | Chain]:
    """Yield the statements of a block, with each chain on tiles as one ``Chain`` if it is long."""
    waiting: list[Let] = []
    for statement in body:
        if isinstance(statement, Let) and not isinstance(statement.value, Dot | Reduce | Var):
            waiting.append(statement)
            continue
        yield from _gathered(waiting, uses, least)
        waiting = []
        yield statement
    yield from _gathered(waiting, uses, least)


def _gathered(lets: list[Let], uses: Readers, least: int) -> Iterator[Statement | Chain]:
    """Yield the other statements, then the chains; all unchanged if others depend on chains."""
    chains: dict[frozenset[Axis], list[Let]] = {}
    inside: set[Expr] = set()
    outside: list[Let] = []
    for let in lets:
        if _is_pointwise(let):
            chains.setdefault(let.var.axes, []).append(let)
            inside.add(let.var)
        elif inside.isdisjoint(reads(let)):
            outside.append(let)
        else:
            yield from lets
            return
    yield from outside
    for chain in chains.values():
        if sum(isinstance(let.value, Op) for let in chain) < least:
            yield from chain
        else:
            yield _chain(chain, uses)


def _chain(lets: list[Let], uses: Readers) -> Chain:
    made = {let.var for let in lets}
    read = [v for let in lets for v in dict.fromkeys(children(let.value)) if isinstance(v, Var)]
    inputs = tuple(dict.fromkeys(v for v in read if v not in made))
    outputs = tuple(let.var for let in lets if uses.get(let.var, 0) > read.count(let.var))
    return Chain(inputs, tuple(lets), outputs)


def _is_pointwise(let: Let) -> bool:
    """Return True for an operation on whole tiles without a change of shape."""
    value = let.value
    if not isinstance(value, Op | Cast | Select) or len(let.var.axes) < 2:
        return False
    return value.axes == let.var.axes and not is_checked(value)
