"""Roles of warps for products that multiply other products' values: an attention's forward.

Each iteration makes scores, weighs them, and multiplies the weights by other tiles. In this order
tensor cores would wait for the weights, and these for them. So an iteration here starts its scores,
then the product of the weights that the iteration *before* made: tensor cores are at that one while
the new weights are computed. The first iteration multiplies weights of 0 by a tile of zeros, which
is a copy from beyond the end of the tensor and reads no memory; a last product stands behind the
loops. Where a mask's loop follows one without it, the weights go from one to the other.

Worked example: what the warps that multiply do ("weights" is a tile in registers)::

    carry acc = 0.0;  carry weights = 0;  carry factor = 1.0
    take queries: q
    for no in 0 .. n:
      acc := acc * factor
      take keys: k;    scores = dot(q, k)
      take values: v;  acc := dot(weights, v, acc)
      await scores but 1;  free keys
      ... p = exp(scores - m), a = exp(m_old - m)
      await acc;  free values
      weights := bf16(p);  factor := a
    acc := acc * factor
    take values: v;  acc := dot(weights, v, acc)
    await acc;  free values;  free queries

What was added up so far is multiplied by its factor in the next iteration, too: an iteration ends
with what tensor cores have made, so that no compiler copies their registers while they work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusec.codegen.descriptors import Copy
from fusec.codegen.roles import Split
from fusec.ir.expr import Const, Dot, Expr, Load, Op, Var
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
    reads,
    statements,
)


@dataclass(frozen=True, slots=True)
class _Rings:
    queries: Ring
    keys: Ring
    values: Ring


@dataclass(frozen=True, slots=True)
class _Carried:
    """What an iteration leaves to the next."""

    weights: Var
    factor: Var


@dataclass(frozen=True, slots=True)
class _Iteration:
    """A loop's body, taken apart.

    Attributes:
        keys, values: copies of the tiles that its two products read.
        scores: the first product.
        product: the second one, which is added up.
        scaled: multiplies what was added up so far, by a factor.
        others: what stands between, from scores to weights.
        rounded: the last part of it, which makes the operand of the second product: it is in the
            same registers as the one before, which tensor cores may still read.
    """

    keys: Let
    values: Let
    scores: Let
    product: Update
    scaled: Update
    factor: Var
    others: tuple[Statement, ...]
    rounded: tuple[Statement, ...]

    @property
    def queries(self) -> Expr:
        return _dot(self.scores).left

    @property
    def weights(self) -> Var:
        found = _dot(self.product).left
        assert isinstance(found, Var)
        return found


def _dot(statement: Let | Update) -> Dot:
    assert isinstance(statement.value, Dot)
    return statement.value


def split_nested(program: Program, copied: Mapping[Var | Put, Copy]) -> Split | None:
    """Return a program by roles, or None unless its loops all have two such products."""
    loops = [s for s in program.body if isinstance(s, For)]
    found = [_iteration(loop, copied) for loop in loops]
    iterations = [one for one in found if one is not None]
    if not loops or len(iterations) < len(loops):
        return None
    first = iterations[0]
    load = next((s for s in program.body if isinstance(s, Let) and s.var is first.queries), None)
    alike = {
        (one.queries, one.product.var, *(copied[v].descriptor for v in _tiles(one)))
        for one in iterations
    }
    bounds = _bounds(program, loops)
    if len(alike) > 1 or load is None or load.var not in copied or bounds is None:
        return None
    return _split(program, loops, iterations, load, bounds, copied)


def _bounds(program: Program, loops: list[For]) -> tuple[Let, ...] | None:
    """Return what computes where loops start and stop, or None where memory has a part in it."""
    wanted: set[Expr] = {value for loop in loops for value in reads(loop)}
    found: list[Let] = []
    for statement in reversed(program.body):
        if isinstance(statement, Let) and statement.var in wanted:
            found.append(statement)
            wanted.update(reads(statement))
    known = {s.var for s in found if not isinstance(s.value, Load)}
    computed = all(value in known for value in wanted if isinstance(value, Var))
    return tuple(reversed(found)) if computed else None


def _tiles(one: _Iteration) -> tuple[Var, Var]:
    return one.keys.var, one.values.var


def _iteration(loop: For, copied: Mapping[Var | Put, Copy]) -> _Iteration | None:
    """Return what a loop's body consists of, or None where that is something else."""
    copies = {s.var: s for s in loop.body if isinstance(s, Let) and s.var in copied}
    scores = [s for s in loop.body if isinstance(s, Let) and isinstance(s.value, Dot)]
    products = [s for s in loop.body if isinstance(s, Update) and isinstance(s.value, Dot)]
    if (len(copies), len(scores), len(products)) != (2, 1, 1):
        return None
    (first,), (second,) = scores, products
    keys, values = (_found(copies, _dot(s).right) for s in (first, second))
    weights = _dot(second).left
    if keys is None or values is None or not isinstance(weights, Var) or weights in copied:
        return None
    scaled = next(
        (s for s in loop.body if isinstance(s, Update) and s.var is second.var and s is not second),
        None,
    )
    factor = None if scaled is None else _factor(scaled)
    if scaled is None or factor is None or loop.body.index(scaled) > loop.body.index(second):
        return None
    others = tuple(s for s in loop.body if s not in (keys, values, first, second, scaled))
    plain = not any(isinstance(s, For) or second.var in reads(s) for s in others)
    halves = all(tile.dtype.itemsize == 2 for tile in (keys.var, values.var, weights))
    if not (plain and halves):
        return None
    rounded = _only_for(weights, others)
    others = tuple(s for s in others if s not in rounded)
    return _Iteration(keys, values, first, second, scaled, factor, others, rounded)


def _factor(scaled: Update) -> Var | None:
    """Return what a sum is multiplied by, if that is what an update does."""
    match scaled.value:
        case Op(name="mul", args=(Var() as a, Var() as b)) if scaled.var in (a, b):
            return b if a is scaled.var else a
        case _:
            return None


def _only_for(value: Var, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Return the statements of 16 bits that nothing but a value is made of."""
    found: list[Statement] = []
    wanted: set[Expr] = {value}
    for at, statement in reversed(list(enumerate(body))):
        if isinstance(statement, Let) and statement.var in wanted:
            others = (s for s in body[at + 1 :] if s not in found)
            if statement.var.dtype.itemsize == 2 and not any(
                statement.var in reads(s) for s in others
            ):
                found.append(statement)
                wanted.update(reads(statement))
    return tuple(reversed(found))


def _found(copies: Mapping[Var, Let], value: Expr) -> Let | None:
    return copies.get(value) if isinstance(value, Var) else None


def _split(
    program: Program,
    loops: list[For],
    iterations: list[_Iteration],
    queries: Let,
    bounds: tuple[Let, ...],
    copied: Mapping[Var | Put, Copy],
) -> Split:
    rings = _Rings(Ring("queries", 1), *(Ring(n, program.stages) for n in ("keys", "values")))
    last = iterations[-1]
    serial = min(s.var.serial for s in statements(program.body) if isinstance(s, Let | Carry))
    weights = Var("weights", last.weights.dtype, last.weights.axes, serial - 1)
    factor = Var("factor", last.factor.dtype, last.factor.axes, serial - 3)
    carried = _Carried(weights, factor)
    nothing = Let(Var("nothing", last.values.var.dtype, last.values.var.axes, serial - 2),
                  last.values.value)  # fmt: skip
    multiply: list[Statement] = []
    load: list[Statement] = [*bounds, Fill(rings.queries, (queries,))]
    load.append(Fill(rings.values, (nothing,)))
    made = dict(zip(loops, iterations, strict=True))
    for statement in program.body:
        if statement is queries:
            multiply += [Take(rings.queries, (queries.var,)), *_nothing(carried)]
        elif isinstance(statement, For):
            one = made[statement]
            multiply.append(replace(statement, body=_rotated(one, rings, carried)))
            fills = Fill(rings.keys, (one.keys,)), Fill(rings.values, (one.values,))
            load.append(replace(statement, body=fills))
        else:
            multiply.append(statement)
        if statement is loops[-1]:
            multiply += [_scaled(last, carried), *_product(last, rings, carried)]
            multiply.append(Await((last.product.var,), 0))
            multiply += [Free(rings.values, 0, None), Free(rings.queries, 0, None)]
    beyond: dict[Var | Put, Copy] = {nothing.var: _beyond(copied[last.values.var])}
    return Split(tuple(load), tuple(multiply), beyond, weights)


def _nothing(carried: _Carried) -> tuple[Carry, Carry]:
    """Return what the first iteration finds of the one before."""
    weights, factor = carried.weights, carried.factor
    return Carry(weights, Const(0.0, weights.dtype)), Carry(factor, Const(1.0, factor.dtype))


def _beyond(copy: Copy) -> Copy:
    """Return a copy of a tile that lies behind a tensor's last row: of zeros."""
    *outer, _, columns = copy.start
    return replace(copy, start=(*outer, copy.descriptor.shape[-2], columns))


def _scaled(one: _Iteration, carried: _Carried) -> Update:
    return Update(one.scaled.var, Op("mul", (one.scaled.var, carried.factor)))


def _product(one: _Iteration, rings: _Rings, carried: _Carried) -> tuple[Statement, ...]:
    """Return what multiplies the weights that were made last."""
    dot = _dot(one.product)
    product = Dot(carried.weights, dot.right, dot.over, dot.into, dot.tf32)
    return Take(rings.values, (one.values.var,)), Update(one.product.var, product)


def _rotated(one: _Iteration, rings: _Rings, carried: _Carried) -> tuple[Statement, ...]:
    return (
        _scaled(one, carried),
        Take(rings.keys, (one.keys.var,)),
        one.scores,
        *_product(one, rings, carried),
        Await((one.scores.var,), 1),
        Free(rings.keys, 0, None),
        *one.others,
        Await((one.product.var,), 0),
        Free(rings.values, 0, None),
        *one.rounded,
        Update(carried.weights, one.weights),
        Update(carried.factor, one.factor),
    )
