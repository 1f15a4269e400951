"""Warp specialization of products of products' results, as in attention.

An iteration computes scores, then weights from them, and multiplies the weights by other tiles. In
this order tensor cores would wait for the weights, and the weights for tensor cores. So the loop is
software-pipelined: an iteration starts its own products of tiles, then those of the previous
iteration's weights, which run while its weights are computed. The first iteration multiplies zero
weights by zero tiles, which are copied from beyond the ends of tensors and read no memory; the last
products follow the loops. If a masked loop follows an unmasked one, the weights are passed on.

Each tile of an iteration has a ring. A tile that only products of tiles read is taken before them;
a tile that only weights multiply is taken an iteration later; one that both read is taken at once,
and freed an iteration later; and one that no product reads, as a bias of the scores, is taken,
loaded into registers and freed where it is used. Of several products of tiles, the one with most
statements that depend on it alone is started first, and each is awaited before its first use.

Worked example: the statements of consumer warps ("weights" is a tile in registers)::

    carry acc = 0.0;  carry weights = 0;  carry factor = 1.0
    take tiles: q
    for no in 0 .. n:
      acc := acc * factor
      take k: k;  scores = dot(q, k)
      take v: v;  acc := dot(weights, v, acc)
      await scores but 1;  free k
      ... p = exp(scores - m), a = exp(m_old - m)
      await acc;  free v
      weights := bf16(p);  factor := a
    acc := acc * factor
    take v: v;  acc := dot(weights, v, acc)
    await acc;  free v;  free tiles

A gradient's loop, ``dk += ds q`` with ``ds`` computed from ``k q`` and ``v do``, reads q twice: an
iteration takes q, takes the previous q again by another name, and frees that one at its end.

An accumulator is multiplied by its factor in the next iteration, too: an iteration ends with the
tensor cores' results, so that the compiler does not copy their registers while they are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from fusec.codegen.triton.descriptors import Copies, DescriptorCopy
from fusec.codegen.triton.warp_specialization import TENSOR_BYTES, RoleStatements
from fusec.ir.expr import Const, Dot, Expr, Load, Op, Var
from fusec.ir.index import index
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
    needed_values,
    reads,
    statements,
)


@dataclass(frozen=True, slots=True)
class _Later:
    """A product of weights, started in the iteration after the one that computes them.

    Attributes:
        product: update of its accumulator.
        factor: value that the accumulator is multiplied by before; None if it is not.
        rounded: the last statements that compute the weights, executed after the previous product:
            they overwrite registers that tensor cores may still read.
    """

    product: Update
    factor: Var | None
    rounded: tuple[Statement, ...]

    @property
    def weights(self) -> Var:
        found = _dot(self.product).left
        assert isinstance(found, Var)
        return found


@dataclass(frozen=True, slots=True)
class _Tile:
    """A copied tile, its transposes, and if products of tiles (now) or weights (later) read it.

    If neither does, statements read it in registers.
    """

    load: Let
    views: tuple[Let, ...]
    now: bool
    later: bool


@dataclass(frozen=True, slots=True)
class _Iteration:
    """The parts of a loop's body.

    Attributes:
        tiles: tiles that it copies.
        shared: operands that all iterations share.
        products: products of tiles, in the order in which they are started.
        later: products of weights.
        ahead: loads of one value a row or column, issued before products to overlap with them.
        waves: for each product, the statements that run after it and all before it are awaited;
            loads of tiles among them take these from a slot.
    """

    tiles: tuple[_Tile, ...]
    shared: frozenset[Var]
    products: tuple[Let, ...]
    later: tuple[_Later, ...]
    ahead: tuple[Statement, ...]
    waves: tuple[tuple[Statement, ...], ...]

    def readers(self, tile: _Tile) -> list[int]:
        """Return the positions in ``products`` of those that read a tile or its transpose."""
        names = {tile.load.var, *(view.var for view in tile.views)}
        return [n for n, s in enumerate(self.products) if not names.isdisjoint(reads(s))]


def _dot(statement: Let | Update) -> Dot:
    assert isinstance(statement.value, Dot)
    return statement.value


def split_nested(program: Program, copied: Copies) -> RoleStatements | None:
    """Split a program into roles, or return None unless all loops multiply products' results."""
    loops = _innermost(program.body)
    named = (s for s in statements(program.body) if isinstance(s, Let))
    views: dict[Expr, Let] = {
        s.var: s for s in named if isinstance(s.value, Var) and s.value in copied
    }
    found = [_iteration(loop, copied, views) for loop in loops]
    iterations = [one for one in found if one is not None]
    if not loops or len(iterations) < len(loops):
        return None
    first = iterations[0]
    shared = tuple(s for s in program.body if isinstance(s, Let) and s.var in first.shared)
    alike = {
        (
            one.shared,
            tuple((s.product.var, s.factor is None) for s in one.later),
            tuple((copied[t.load.var].descriptor, t.now, t.later) for t in one.tiles),
        )
        for one in iterations
    }
    bounds = _bounds(program, loops)
    whole = shared and len(shared) == len(first.shared)
    sums = {later.product.var for later in first.later}
    if len(alike) > 1 or not whole or bounds is None or not _is_nest(program.body, copied, sums):
        return None
    splitter = _Splitter(program, copied, views, shared, iterations)
    return splitter.split(dict(zip(loops, iterations, strict=True)), bounds)


def _innermost(body: tuple[Statement, ...]) -> list[For]:
    loops = (s for s in statements(body) if isinstance(s, For))
    return [s for s in loops if not any(isinstance(inner, For) for inner in s.body)]


def _is_nest(body: tuple[Statement, ...], copied: Copies, sums: set[Var]) -> bool:
    """Return True if no statement between loops copies a tile or reads an accumulator."""
    at = [n for n, s in enumerate(body) if isinstance(s, For)]
    return all(
        _is_loops(s)
        if isinstance(s, For)
        else isinstance(s, Let) and s.var not in copied and sums.isdisjoint(reads(s))
        for s in body[at[0] : at[-1] + 1]
    )


def _is_loops(loop: For) -> bool:
    """Return True for an innermost loop, or a loop that contains nothing but loops."""
    inside = [s for s in loop.body if isinstance(s, For)]
    return not inside or (len(inside) == len(loop.body) and all(map(_is_loops, inside)))


def _bounds(program: Program, loops: list[For]) -> tuple[Let, ...] | None:
    """Return the statements that compute loop bounds, or None if bounds depend on loads."""
    made: dict[Expr, Let] = {s.var: s for s in program.body if isinstance(s, Let)}
    wanted = needed_values(loops, made)
    found = tuple(s for s in made.values() if s.var in wanted)
    known = {s.var for s in found if not isinstance(s.value, Load)}
    return found if all(value in known for value in wanted if isinstance(value, Var)) else None


# -- analysis of an iteration ----------------------------------------------------------------------


def _iteration(loop: For, copied: Copies, views: Mapping[Expr, Let]) -> _Iteration | None:
    """Return the parts of a loop's body, or None if it does not have this form."""

    def tile(value: Expr) -> Expr:
        return views[value].value if value in views else value

    body = loop.body
    loads = {s.var: s for s in body if isinstance(s, Let) and s.var in copied}
    firsts = [s for s in body if isinstance(s, Let) and isinstance(s.value, Dot)]
    seconds = [s for s in body if isinstance(s, Update) and isinstance(s.value, Dot)]
    now = {tile(side) for s in firsts for side in reads(s)}
    right = {tile(_dot(s).right) for s in seconds}
    weights = {_dot(s).left for s in seconds}
    sums = {s.var for s in seconds}
    if not (firsts and seconds and now <= copied.keys() and right <= loads.keys()):
        return None
    beside = loads.keys() - now - right
    if any(tile(value) in copied for value in weights) or any(
        view.value in beside for view in views.values()
    ):
        return None
    scaled = [s for s in body if isinstance(s, Update) and s.var in sums and s not in seconds]
    later = [_later(s, body, scaled) for s in seconds]
    multiplied = [let for var, let in loads.items() if var not in beside]
    taken = {*firsts, *seconds, *scaled, *multiplied, *(views[v] for v in views)}
    rounded = {s for one in later if one is not None for s in one.rounded}
    others = [s for s in body if s not in taken]
    tiles = {*sums, *(loads.keys() - beside), *views}
    halves = (v.dtype.itemsize == TENSOR_BYTES for v in (*now, *right, *weights))
    if len(sums) < len(seconds) or not all(halves) or not _is_plain(others, tiles):
        return None
    if any(one is None for one in later):
        return None
    others = [s for s in others if s not in rounded]
    ahead = _ahead(others, firsts)
    products, waves = _waves([s for s in others if s not in ahead], firsts)
    order = [tile(side) for s in products for side in reads(s)]
    order += [tile(_dot(s).right) for s in seconds]
    order += [var for var in loads if var in beside]
    return _Iteration(
        tuple(
            _Tile(loads[v], tuple(s for s in views.values() if s.value is v), v in now, v in right)
            for v in dict.fromkeys(order)
            if v in loads
        ),
        frozenset(v for v in now if isinstance(v, Var) and v not in loads),
        products,
        tuple(one for one in later if one is not None),
        ahead,
        waves,
    )


def _is_plain(body: list[Statement], tiles: set[Expr]) -> bool:
    """Return True if no statement is a loop, or reads a tile or an accumulator (``tiles``)."""
    return not any(isinstance(s, For) or not tiles.isdisjoint(reads(s)) for s in body)


def _later(product: Update, body: tuple[Statement, ...], scaled: list[Update]) -> _Later | None:
    """Return a product of weights with its factor, or None if it has any other form."""
    mine = [s for s in scaled if s.var is product.var]
    factors = [_factor(s) for s in mine]
    weights = _dot(product).left
    made = {s.var for s in body if isinstance(s, Let)}
    early = all(body.index(s) < body.index(product) for s in mine)
    if len(mine) > 1 or None in factors or not early or weights not in made:
        return None
    others = tuple(s for s in body if s is not product)
    rounded = _only_for(weights, others)
    return _Later(product, factors[0] if factors else None, rounded)


def _factor(scaled: Update) -> Var | None:
    """Return the factor f of an update ``s := s * f``, or None for any other update."""
    match scaled.value:
        case Op(name="mul", args=(Var() as a, Var() as b)) if scaled.var in (a, b):
            return b if a is scaled.var else a
        case _:
            return None


def _only_for(value: Expr, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Return the definitions of 16-bit values that are only used to compute ``value``."""
    found: list[Statement] = []
    wanted: set[Expr] = {value}
    for at, statement in reversed(list(enumerate(body))):
        if isinstance(statement, Let) and statement.var in wanted:
            others = (s for s in body[at + 1 :] if s not in found)
            if statement.var.dtype.itemsize == TENSOR_BYTES and not any(
                statement.var in reads(s) for s in others
            ):
                found.append(statement)
                wanted.update(reads(statement))
    return tuple(reversed(found))


def _ahead(body: list[Statement], products: list[Let]) -> tuple[Statement, ...]:
    """Return the loads of rows or columns and their operands, if independent of products."""
    made: dict[Expr, Let] = {s.var: s for s in body if isinstance(s, Let)}
    rows = [s for s in made.values() if isinstance(s.value, Load) and len(s.var.axes) < 2]
    wanted = needed_values(rows, made)
    changed = {s.var for s in products} | {s.var for s in body if isinstance(s, Update)}
    found = tuple(s for s in made.values() if s in rows or s.var in wanted)
    return found if wanted.isdisjoint(changed) else ()


def _waves(
    body: list[Statement], products: list[Let]
) -> tuple[tuple[Let, ...], tuple[tuple[Statement, ...], ...]]:
    """Return products in the order to start them, and the statements to run after each."""
    needs: dict[Expr, frozenset[Expr]] = {s.var: frozenset((s.var,)) for s in products}
    alone: list[frozenset[Expr]] = []
    for statement in body:
        found = frozenset(v for e in reads(statement) for v in needs.get(e, ()))
        alone.append(found)
        if isinstance(statement, Let):
            needs[statement.var] = found
    order = sorted(products, key=lambda s: -alone.count(frozenset((s.var,))))
    if not all(isinstance(s, Let) for s in body):  # reads of an updated carry must keep their order
        return tuple(order), (*((),) * (len(order) - 1), tuple(body))
    at = {s.var: n for n, s in enumerate(order)}
    last = [max((at[v] for v in found), default=0) for found in alone]  # type: ignore[index]
    waves = (tuple(s for s, n in zip(body, last, strict=True) if n == w) for w in range(len(order)))
    return tuple(order), tuple(waves)


# -- splitting -------------------------------------------------------------------------------------


class _Splitter:
    """Splits one program.

    Attributes:
        shared: loads of operands that all iterations share, under the names that products use.
        names: the program's name of such an operand -> the name that products use.
        weights, factors: accumulator -> what the next iteration multiplies for it, and by.
        copies: copies by descriptor of values that the split adds.
    """

    def __init__(
        self,
        program: Program,
        copied: Copies,
        views: Mapping[Expr, Let],
        shared: tuple[Let, ...],
        iterations: list[_Iteration],
    ) -> None:
        self.program, self.copied, self.views = program, copied, views
        self.last = iterations[-1]
        self.copies: dict[Var | Put, DescriptorCopy] = {}
        self.shared = tuple(map(self._shared, shared))
        self.names = {s.var: t.var for s, t in zip(shared, self.shared, strict=True)}
        self.whole = Ring("tiles", 1)
        self.rings = tuple(
            Ring(copied[t.load.var].descriptor.buffer.name, program.stages) for t in self.last.tiles
        )
        later = {one.product.var: one for one in self.last.later}
        self.weights = {total: _var_like("weights", one.weights) for total, one in later.items()}
        self.factors = {
            total: _var_like("factor", one.factor)
            for total, one in later.items()
            if one.factor is not None
        }

    def _shared(self, load: Let) -> Let:
        """Return the load of a tile, under a new name if the tile is also used in registers."""
        body = statements(self.program.body)
        values = (s for s in body if not (isinstance(s, Let) and s.var in self.views))
        others = (s for s in values if not isinstance(getattr(s, "value", None), Dot))
        if not any(load.var in reads(s) for s in others):
            return load
        return Let(self._alias("tile", load.var), load.value)

    def _alias(self, name: str, tile: Var) -> Var:
        """Return a new name for a copied tile."""
        var = _var_like(f"{tile.name}_{name}", tile)
        self.copies[var] = self.copied[tile]
        return var

    def split(self, made: Mapping[For, _Iteration], bounds: tuple[Let, ...]) -> RoleStatements:
        nothing = {ring: self._nothing(t) for ring, t in self._tiles(self.last) if t.later}
        load: list[Statement] = [*bounds, Fill(self.whole, self.shared)]
        load += [Fill(ring, (let,)) for ring, let in nothing.items()]
        multiply: list[Statement] = []
        loops = [s for s in self.program.body if isinstance(s, For)]
        for statement in self.program.body:
            if isinstance(statement, For):
                load.append(_with_bodies(statement, made, self._filled))
                multiply.append(_with_bodies(statement, made, self._rotated))
            elif not (isinstance(statement, Let) and statement.var in self.names):
                multiply.append(self._renamed(statement))
            elif statement.var is next(iter(self.names)):
                multiply += self._first(nothing)
            if statement is loops[-1]:
                multiply += [*self._scaled(), *self._multiplied(self.last, 1)]
                multiply += [Free(ring, 0, None) for ring in (*nothing, self.whole)]
        return RoleStatements(tuple(load), tuple(multiply), self.copies)

    def _tiles(self, one: _Iteration) -> Iterator[tuple[Ring, _Tile]]:
        return zip(self.rings, one.tiles, strict=True)

    def _nothing(self, tile: _Tile) -> Let:
        """Return a copy of a tile from beyond a tensor's last row, which gives zeros."""
        copy = self.copied[tile.load.var]
        *outer, rows, _ = copy.descriptor.shape
        let = Let(_var_like("nothing", tile.load.var), tile.load.value)
        self.copies[let.var] = replace(copy, start=(*(index(0) for _ in outer), rows, index(0)))
        return let

    def _first(self, nothing: Mapping[Ring, Let]) -> Iterator[Statement]:
        """Yield the takes and carries before the loops."""
        yield Take(self.whole, tuple(let.var for let in self.shared))
        yield from (Let(old, new) for old, new in self.names.items() if old is not new)
        for ring, tile in self._tiles(self.last):
            if tile.now and tile.later:
                yield Take(ring, (nothing[ring].var,))
        for total, weights in self.weights.items():
            yield Carry(weights, Const(0.0, weights.dtype))
            if (factor := self.factors.get(total)) is not None:
                yield Carry(factor, Const(1.0, factor.dtype))

    def _renamed(self, statement: Statement) -> Statement:
        """Return a statement; a transpose of a tile refers to the name that products use."""
        if isinstance(statement, Let) and statement.var in self.views:
            assert isinstance(statement.value, Var)
            return Let(statement.var, self.names.get(statement.value, statement.value))
        return statement

    def _scaled(self) -> Iterator[Statement]:
        for total, factor in self.factors.items():
            yield Update(total, Op("mul", (total, factor)))

    def _multiplied(self, one: _Iteration, before: int) -> Iterator[Statement]:
        """Yield the products of the previous iteration's weights; awaited after the loops.

        Args:
            before: 1 after the loops; 2 in an iteration, whose own tiles have been taken already.
        """
        names: dict[Expr, Var] = {}
        for ring, tile in self._tiles(one):
            if tile.now and tile.later:
                again = self._alias("before", tile.load.var)
                yield Take(ring, (again,), before)
                names[tile.load.var] = again
                for view in tile.views:
                    if any(view.var in reads(later.product) for later in one.later):
                        names[view.var] = _var_like(f"{view.var.name}_before", view.var)
                        yield Let(names[view.var], again)
            elif tile.later:
                yield Take(ring, (tile.load.var,))
                yield from tile.views
        for later in one.later:
            dot, total = _dot(later.product), later.product.var
            right = names.get(dot.right, dot.right)
            yield Update(total, Dot(self.weights[total], right, dot.over, dot.into, dot.tf32))
        if before == 1:
            yield Await(tuple(later.product.var for later in one.later), 0)

    def _products(self, one: _Iteration) -> Iterator[Statement]:
        """Yield the products of tiles, each after the takes of its operands."""
        for n, product in enumerate(one.products):
            for ring, tile in self._tiles(one):
                if tile.now and one.readers(tile)[0] == n:
                    yield Take(ring, (tile.load.var,))
                    yield from tile.views
            dot = _dot(product)
            left, right = (
                self.names.get(v, v) if isinstance(v, Var) else v for v in reads(product)
            )
            yield Let(product.var, Dot(left, right, dot.over, dot.into, dot.tf32))

    def _in_registers(self, one: _Iteration, statement: Statement) -> Iterator[Statement]:
        """Yield a statement; the load of a tile becomes one from its slot, which is free then."""
        ring = next((ring for ring, tile in self._tiles(one) if tile.load is statement), None)
        if ring is None or not isinstance(statement, Let):
            yield statement
            return
        slot = self._alias("tile", statement.var)
        yield Take(ring, (slot,))
        yield Let(statement.var, slot)
        yield Free(ring, 0, None)

    def _filled(self, one: _Iteration) -> Iterator[Statement]:
        yield from (Fill(ring, (tile.load,)) for ring, tile in self._tiles(one))

    def _rotated(self, one: _Iteration) -> Iterator[Statement]:
        yield from (*one.ahead, *self._scaled())
        yield from self._products(one)
        yield from self._multiplied(one, 2)
        under_way = len(one.products) + len(one.later)
        for n, (product, wave) in enumerate(zip(one.products, one.waves, strict=True)):
            yield Await((product.var,), under_way - 1 - n)
            for ring, tile in self._tiles(one):
                if tile.now and not tile.later and one.readers(tile)[-1] == n:
                    yield Free(ring, 0, None)
            for statement in wave:
                yield from self._in_registers(one, statement)
        yield Await(tuple(later.product.var for later in one.later), 0)
        for ring, tile in self._tiles(one):
            if tile.later:
                yield Free(ring, int(tile.now), None)
        for later in one.later:
            yield from later.rounded
            yield Update(self.weights[later.product.var], later.weights)
            if later.factor is not None:
                yield Update(self.factors[later.product.var], later.factor)


def _var_like(name: str, like: Var) -> Var:
    return Var(name, like.dtype, like.axes)


def _with_bodies(
    loop: For, made: Mapping[For, _Iteration], body: Callable[[_Iteration], Iterator[Statement]]
) -> For:
    """Return a loop nest with the bodies of its innermost loops replaced."""
    if loop in made:
        return replace(loop, body=tuple(body(made[loop])))
    inside = (_with_bodies(s, made, body) for s in loop.body if isinstance(s, For))
    return replace(loop, body=tuple(inside))
