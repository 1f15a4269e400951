"""Lower expressions to single operations, each hoisted to the outermost scope that can hold it.

The half of lowering that is independent of tasks and sweeps (``lower.py`` has these): expressions
become ``Let``s over names, masked where lanes are ragged, and contractions of two tiles ``Dot``s.

Worked example: in a loop over co, ``w[c] * s`` with s known outside is ``v = w[co*16 + ci]`` in the
loop's scope, then ``t = v * s`` there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from fusec.codegen.lowering.layout import Layout, below
from fusec.codegen.lowering.tasks import Accumulate
from fusec.errors import InternalError
from fusec.ir.combine import State, carried, combine, folded, identities
from fusec.ir.contraction import Factors, cut_factors, sides, without_scales
from fusec.ir.dtype import BF16, F4X2, F8, DType
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Scan,
    Select,
    Var,
    both,
    cast,
    children,
    postorder,
    reach,
    rebuild,
)
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, Index, floordiv, index, product
from fusec.ir.monoid import SUM, Monoid
from fusec.ir.names import Names
from fusec.ir.online import SCALE_RULES, find_row_maxima
from fusec.ir.program import Carry, For, Let, Put, Scratch, Statement, Update
from fusec.ir.rewrite import Rules, checked_where, is_checked, replace_nodes, rewrite
from fusec.ir.scalar import SCALAR_OPS
from fusec.ir.serial import stored_scatters
from fusec.passes.schedule.plan import Plan


def uniform_comparison(node: Op, lanes: tuple[Axis, ...]) -> Expr:
    """``co*16 + ci < 32`` is ``co < 2``: what all lanes of a tile agree on is a scalar.

    The halves of a rotary embedding, a cat or a pad at a multiple of the tile then branch once a
    tile, and their loads stay contiguous.
    """
    left, right = node.args
    if not isinstance(left, IndexValue) or not isinstance(right, IndexValue):
        return node
    # a < b is a - b < 0; flooring the quotient by the tile's width keeps the sign.
    before = difference = left.index - right.index
    for lane in lanes:
        if lane not in difference.axes:
            continue
        rest = difference - index(lane)
        tiles = rest // lane.extent
        if lane in rest.axes or tiles * lane.extent is not rest or lane in tiles.axes:
            return node
        difference = tiles
    if difference is before:
        return node
    return Op(node.name, (IndexValue(difference, left.dtype), IndexValue(index(0), left.dtype)))


@dataclass(slots=True, eq=False)
class Scope:
    """One open loop (or the program's top level): its statements and the values defined in it.

    Attributes:
        rows: if it runs over groups, how many rows of the tile are in one: without any, what inner
            loops compute is not read.
    """

    loop: Axis | None
    bound: frozenset[Axis]
    masks: dict[Axis, Expr]
    rows: Expr | None = None
    body: list[Statement] = field(default_factory=list)
    memo: dict[Expr, Var | Const] = field(default_factory=dict)


class Values:
    """Define values by name, each in the outermost scope in which its loops are bound.

    Attributes:
        running: maximum that an open loop is computing -> what the terms of its sums referred to
            before its last step, and what they refer to since. That is its name in the loop.
        so_far: scan of an open loop -> what it has combined.
        rows: the same, in private arrays, where loops are inside the one that it scans along.
        shares: lane axis, number n -> the lane axis of n lanes each: pairs, or blocks with a scale.
    """

    def __init__(self, kernel: FlatKernel, plan: Plan) -> None:
        self.kernel = kernel
        self.plan = plan
        self.layout = Layout(plan)
        self.nest, self.lanes = self.layout.nest, self.layout.lanes
        self.arrays: dict[Expr, tuple[Buffer, Index]] = {}
        self.names = Names()
        self.running: dict[Reduce, tuple[Expr, ...]] = {}
        self.so_far: dict[Scan, tuple[Var | Const, ...]] = {}
        self.rows: dict[Scan, tuple[Load | Const, ...]] = {}
        cut = self.layout.cut
        uniform = Rules((partial(uniform_comparison, lanes=tuple(self.lanes)), "lt", "ge"))
        cut_up = kernel.substitute(cut).map(lambda exprs: rewrite(exprs, uniform))
        cut_up = cut_up.map(lambda exprs: rewrite(exprs, SCALE_RULES)) if plan.online else cut_up
        self.dots: dict[Reduce, tuple[Factors, ...]] = {}
        self.shares: dict[tuple[Axis, int], Axis] = {}
        cut_up = cut_up.map(self._join_products) if plan.dots else cut_up
        self.stores, self.labels = cut_up.stores, dict(cut_up.labels)
        self.scattered = stored_scatters(cut_up)
        self.scopes = [Scope(None, frozenset(), self.layout.masks)]

    def _join_products(self, exprs: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Merge added products over the same loop into one sum; fills ``dots`` with all products.

        ``sum(k: a*b) + sum(k: c*d)`` is ``sum(k: a*b + c*d)``. Three separate accumulators of a
        128x128 tile in 8 warps take 192 registers a thread; a shared one takes 64.
        """
        self.dots.update(self._find_dots(exprs))
        stored = exprs[: len(self.kernel.stores)]
        nodes = postorder(stored)
        uses = Counter((*stored, *(child for node in nodes for child in children(node))))
        for node in nodes:
            match node:
                case Op(name="add", args=(Reduce() as a, Reduce() as b)) if uses[a] == uses[
                    b
                ] == 1 and self._share_a_tile(a, b):
                    total = Reduce(SUM, a.over, Op("add", (a.body, b.body)))
                    self.dots[total] = (*self.dots[b], *self.dots[a])
                    return self._join_products(replace_nodes(exprs, {node: total}))
        return exprs

    def _find_dots(self, exprs: tuple[Expr, ...]) -> dict[Reduce, tuple[Factors, ...]]:
        """Return the contractions of two tiles: each factor owns one lane, and they share one."""
        found: dict[Reduce, tuple[Factors, ...]] = {}
        lanes = frozenset(self.lanes)
        for node in postorder(exprs):
            if not isinstance(node, Reduce) or (parts := cut_factors(node)) is None:
                continue
            if not self.plan.scaled:
                parts = without_scales(node, parts)
            if parts.left.dtype in self.plan.widened:
                parts = sides(node) or parts
            owned = [parts.left_axes, parts.right_axes, frozenset(node.over)]
            if all(len(axes & lanes) == 1 for axes in owned) and not parts.shared & lanes:
                (terms,) = owned[2] & lanes
                exact = _exact_within(parts, terms.extent.const)
                found[node] = (self._in_blocks(parts, terms) if parts.scales else exact,)
        return found

    def _in_blocks(self, parts: Factors, terms: Axis) -> Factors:
        """Return factors whose scales have a lane for each block, and whose pairs one for each."""
        blocks = {terms: index(self._share(terms, parts.block)) * parts.block}
        pairs = {terms: index(self._share(terms, 2)) * 2}
        left, right = (
            side.substitute(pairs) if side.dtype is F4X2 else side
            for side in (parts.left, parts.right)
        )
        scales = tuple(scale.substitute(blocks) for scale in parts.scales)
        return replace(parts, left=left, right=right, scales=scales)

    def _share(self, lane: Axis, of: int) -> Axis:
        """Return the lane axis whose lanes stand for ``of`` lanes each."""
        share = self.shares.get((lane, of))
        if share is None:
            share = Axis(f"{lane.name}{of}", floordiv(lane.extent, index(of)))
            self.shares[lane, of] = share
            self.layout.add_share(lane, share, of)
        return share

    def _share_a_tile(self, a: Reduce, b: Reduce) -> bool:
        """Return True if two products reduce over the same loop and have tiles of one shape."""
        if a not in self.dots or b not in self.dots or find_row_maxima((a, b)):
            return False
        looped = bool(self.layout.loops_of(a.over)) and set(a.over) == set(b.over)
        return looped and (a.axes ^ b.axes).isdisjoint(self.lanes)

    # -- values ------------------------------------------------------------------------------------

    @property
    def here(self) -> Scope:
        return self.scopes[-1]

    def _home(self, node: Expr) -> Scope:
        """Return the outermost open scope in which all loops the node depends on are bound.

        If the plan reloads operands (``Plan.reloads``), tiles live in the innermost scope.
        """
        if self.plan.reloads and any(a in self.lanes for a in node.axes):
            return self.here
        needed = self.layout.loops_of(node.axes)
        # A running maximum has a name in its loop alone, and so has what depends on it.
        first = max(map(self._place, self._operands(node)), default=0) if self.running else 0
        for scope in self.scopes[first:]:
            if needed <= scope.bound:
                return scope
        raise InternalError(f"{node} is needed outside its loops", stage="codegen.lower")

    def _place(self, node: Expr) -> int:
        """Return the position of the innermost scope that has a name for a value, or 0."""
        return max((at for at, scope in enumerate(self.scopes) if node in scope.memo), default=0)

    def _known(self, node: Expr) -> Var | Const | None:
        if isinstance(node, Const | Var):
            return node
        for scope in reversed(self.scopes):
            found = scope.memo.get(node)
            if found is not None:
                return found
        return None

    def value(self, root: Expr) -> Var | Const:
        """Return the name of a value; defines it and its operands, each in its home scope."""

        def unknown(node: Expr) -> tuple[Expr, ...]:
            return self._operands(node) if self._known(node) is None else ()

        for node in reach((root,), unknown):
            if self._known(node) is None:
                self._name(node)
        return self._atom(root)

    def _operands(self, node: Expr) -> tuple[Expr, ...]:
        """Return the values to define before ``node``: its children, and the masks that apply."""
        if node in self.arrays:
            return self._bounds_of(node)
        if isinstance(node, Reduce) and self.layout.loops_of(node.over):
            raise InternalError(f"reduction {node} was not swept", stage="codegen.lower")
        if isinstance(node, Reduce) and node in self.dots:
            return self._dot_operands(node)
        if (taken := self._taken(node)) is not None:
            return (taken,)
        masks: tuple[Expr, ...] = ()
        if isinstance(node, Load) or is_checked(node):
            masks = tuple(self._masks_of(node.axes))
        elif isinstance(node, Reduce):
            masks = tuple(self._masks_of(node.over))
        return (*children(node), *masks)

    def _taken(self, node: Expr) -> Expr | None:
        """Return the branch of a ``Select`` whose condition is constant in this scope, or None."""
        if isinstance(node, Select) and isinstance(known := self._known(node.condition), Const):
            return node.then if known.value else node.other
        return None

    def _bounds_of(self, node: Expr) -> tuple[Expr, ...]:
        """Return the masks of a value in an array: none in a private one, which has whole tiles."""
        array, slot = self.arrays[node]
        made = any(array is stored.store.buffer for stored in self.scattered.values())
        return tuple(self._masks_of(slot.axes)) if made else ()

    def _masks_of(self, axes: Iterable[Axis]) -> list[Expr]:
        masks = self.here.masks
        return [masks[a] for a in sorted(axes, key=lambda a: a.serial) if a in masks]

    def _name(self, node: Expr) -> None:
        scope = self._home(node)
        if node in self.arrays:
            array, slot = self.arrays[node]
            guard = self._conjunction(scope, [*self._bounds_of(node)])
            self._let(scope, node, Load(array.flat(), (slot,), guard))
            return
        if isinstance(node, Reduce) and node in self.dots:
            (product,) = self._products(node, None)
            self._let(scope, node, product)
            return
        if (taken := self._taken(node)) is not None:
            scope.memo[node] = self._atom(taken)
            return
        new = {child: self._atom(child) for child in children(node)}
        shown = rebuild(node, new, None)
        match node:
            case Load():
                guard = self._conjunction(scope, [node.guard, *self._masks_of(node.axes)])
                assert isinstance(shown, Load)
                self._let(scope, node, Load(shown.buffer, shown.indices, guard))
            case Scan():
                self._scan(scope, node)
            case Reduce():
                self._let_folded(scope, node, node.over, self._masked(scope, node))
            case Op() if is_checked(node):
                assert isinstance(shown, Op)
                guard = self._conjunction(scope, [*self._masks_of(node.axes)])
                if guard is not None:
                    args = checked_where(guard, shown).args
                    shown = Op(node.name, tuple(self._named(scope, arg) for arg in args))
                self._let(scope, node, shown)
            case _:
                self._let(scope, node, shown)

    def _scan(self, scope: Scope, node: Scan) -> None:
        """Combine the terms of this iteration with the state of the loop of ``scope``."""
        terms = tuple(map(self._atom, node.bodies))
        lanes = tuple(a for a in node.over if a in self.lanes)
        if lanes and (guard := self._conjunction(scope, [*self._masks_of(lanes)])) is not None:
            pairs = zip(terms, identities(node), strict=True)
            terms = tuple(self._once(scope, Select(guard, *pair)) for pair in pairs)
        so_far = self.so_far.get(node)
        if so_far is None:
            loops = self.layout.loops_of(node.over)
            around = next(k for k, outer in enumerate(self.scopes) if outer.loop in loops) - 1
            if not self.layout.loops_of(node.axes) - loops <= self.scopes[around + 1].bound:
                self._scan_row(scope, node, self.scopes[around], terms)
                return
            kept = frozenset(a for a in node.axes if a in self.lanes)
            so_far = self.so_far[node] = self._carried(self.scopes[around], node, kept)
        if lanes:
            ends = self._scan_lanes(scope, node, lanes, so_far, terms)
        else:
            ends = self._steps(scope, combine(node.monoid, so_far, terms))
            scope.memo[node] = so_far[-1]
        for old, end in zip(so_far, ends, strict=True):
            if isinstance(old, Var):
                scope.body.append(Update(old, end))

    def _scan_row(self, scope: Scope, node: Scan, around: Scope, terms: State) -> None:
        """Combine the terms with the state in a private array, declared in ``around``."""
        if node not in self.rows:
            fields = zip(identities(node), carried(node), strict=True)
            self.rows[node] = tuple(
                self._row(around, node, neutral) if is_needed else neutral
                for neutral, is_needed in fields
            )
        rows = self.rows[node]
        before = tuple(self._named(scope, row) for row in rows)
        ends = self._steps(scope, combine(node.monoid, before, terms))
        for row, end in zip(rows, ends, strict=True):
            if isinstance(row, Load):
                value = scope.memo[node] = self._named(scope, end)
                scope.body.append(Put(row.buffer, row.indices[0], value, None))

    def _row(self, scope: Scope, node: Scan, neutral: Const) -> Load:
        """Declare an array for the state of a scan, filled with its identity."""
        array, slot = self._array(scope, node, neutral.dtype, "row", node.over)
        self._fill(scope, array, slot, neutral)
        return Load(array.flat(), (slot,))

    def _scan_lanes(
        self, scope: Scope, node: Scan, lanes: tuple[Axis, ...], so_far: State, terms: State
    ) -> State:
        """Name a scan's results in the lanes of an iteration; return its state in each of them."""
        terms = tuple(self._along_all(scope, lanes, term) for term in terms)
        found = tuple(
            self._once(scope, Scan(part, lanes, *terms[:count], *so_far[:count]))
            for count, part in enumerate(node.monoid.fields, 1)
        )
        scope.memo[node] = found[-1]
        return found

    def _carried(self, scope: Scope, node: Scan, lanes: frozenset[Axis]) -> tuple[Var | Const, ...]:
        """Declare carries for a scan's fields; one that no result needs is constant."""
        carries: list[Var | Const] = []
        parts = zip(node.monoid.fields, identities(node), carried(node), strict=True)
        for part, neutral, is_needed in parts:
            carry = self._carry(scope, node, part, neutral, lanes) if is_needed else neutral
            carries.append(carry)
        return tuple(carries)

    def _declared(self, scope: Scope, node: Reduce, lanes: frozenset[Axis]) -> tuple[Var, ...]:
        """Declare carries for partial results of a reduction in a scope."""
        parts = zip(node.monoid.fields, identities(node), strict=True)
        return tuple(self._carry(scope, node, *each, lanes) for each in parts)

    def _carry(
        self,
        scope: Scope,
        node: Reduce | Scan,
        part: Monoid,
        neutral: Const,
        lanes: frozenset[Axis],
    ) -> Var:
        hint = self._hint(node) if part is node.monoid else part.name
        carry = self._var(f"{hint}_acc", neutral.dtype, lanes)
        scope.body.append(Carry(carry, neutral))
        return carry

    def _array(
        self, scope: Scope, node: Expr, dtype: DType, hint: str = "", over: tuple[Axis, ...] = ()
    ) -> tuple[Buffer, Index]:
        """Declare a private array with a slot for each lane of a value and iteration of its loops.

        Args:
            over: axes whose loops share a slot.
        """
        loops = self.layout.loops_of(node.axes) - self.layout.loops_of(over) - scope.bound
        axes = sorted(loops, key=self.nest.index) + [a for a in self.lanes if a in node.axes]
        slot = index(0)
        for axis in axes:
            slot = slot * axis.extent + index(axis)
        length = product(a.extent for a in axes)
        name = self.names.new(f"a_{hint or self._hint(node)}")
        array = Buffer(name, (length,), (index(1),), dtype)
        scope.body.append(Scratch(array, length))
        return array, slot

    def _fill(self, scope: Scope, array: Buffer, slot: Index, value: Const) -> None:
        self._over_slots(scope, slot, Put(array.flat(), slot, value, None))

    def _add_slots(self, whole: Accumulate, block: Accumulate) -> None:
        """Add the sums of a block, in an array of their own, to those so far."""
        (array,), (part,), slot = whole.arrays, block.arrays, whole.slot
        assert slot is not None and block.slot is not None
        lanes = frozenset(a for a in slot.axes if a in self.lanes)
        old, own, new = (self._var(name, array.dtype, lanes) for name in ("old", "part", "new"))
        read = Let(old, Load(array.flat(), (slot,))), Let(own, Load(part.flat(), (block.slot,)))
        added = Let(new, Op("add", (old, own))), Put(array.flat(), slot, new, None)
        self._over_slots(self.here, slot, *read, *added)

    def _multiply_slot(self, task: Accumulate) -> None:
        """Add products of tiles to a slot of a private array."""
        (array,) = task.arrays
        assert task.slot is not None
        lanes = frozenset(a for a in task.slot.axes if a in self.lanes)
        total = self._var("old", array.dtype, lanes)
        self.here.body.append(Let(total, Load(array.flat(), (task.slot,))))
        for dot in self._products(task.reduction, None):
            sum_ = Dot(dot.left, dot.right, dot.over, total, dot.tf32)
            total = self._var("new", array.dtype, lanes)
            self.here.body.append(Let(total, sum_))
        self.here.body.append(Put(array.flat(), task.slot, total, None))

    def _over_slots(self, scope: Scope, slot: Index, *body: Statement) -> None:
        """Append statements for each slot of a private array."""
        for loop in reversed([a for a in self.nest if a in slot.axes and a not in scope.bound]):
            body = (For(loop, index(0), self.layout.loops[loop].stops, body),)
        scope.body.extend(body)

    def _masked(self, scope: Scope, node: Reduce) -> State:
        """Return a reduction's bodies, with its identities in masked lanes."""
        guard = self._conjunction(scope, [*self._masks_of(node.over)])
        bodies = tuple(self._atom(body) for body in node.bodies)
        if guard is None:
            return bodies
        pairs = zip(bodies, identities(node), strict=True)
        return tuple(self._once(scope, Select(guard, *pair)) for pair in pairs)

    def _dot_operands(self, node: Reduce) -> tuple[Expr, ...]:
        """Return the operands of a contraction's products: factors and scales."""
        return tuple(side for parts in self.dots[node] for side in self._sides(node, parts))

    def _sides(self, node: Reduce, parts: Factors) -> tuple[Expr, ...]:
        """Return a product's factors, 0 where the lane it sums over is masked, and its scales."""
        if parts.scales:
            return (parts.left, parts.right, *parts.scales)
        (lane,) = (a for a in node.over if a in self.lanes)
        factors = [parts.left, parts.right]
        for mask in self._masks_of(node.over):
            factors = [
                f if _is_loaded(f) and lane in f.axes else Select(mask, f, Const(0, f.dtype))
                for f in factors
            ]
        return tuple(_along(lane, factor) for factor in factors)

    def _products(self, node: Reduce, into: Var | None) -> list[Dot]:
        """Return a contraction's products, each with ``into`` as its accumulator."""
        found: list[Dot] = []
        for parts in self.dots[node]:
            left, right, *scales = map(self._atom, self._sides(node, parts))
            terms = {a for a in node.over if a in self.lanes}
            terms |= {share for a in terms for share, _ in self.layout.shares.get(a, ())}
            over = sorted(terms & (left.axes | right.axes), key=lambda a: a.serial)
            found.append(Dot(left, right, tuple(over), into, self.plan.tf32, tuple(scales)))
        return found

    def _let_folded(self, scope: Scope, node: Reduce, over: tuple[Axis, ...], state: State) -> None:
        """Name a reduction's result: its state reduced over the lanes ``over``."""
        whole = tuple(self._along_all(scope, over, value) for value in state)
        (shown,) = self._steps(scope, (folded(node.monoid, over, whole),))
        self._let(scope, node, shown)

    def _along_all(self, scope: Scope, over: tuple[Axis, ...], body: Expr) -> Expr:
        """Return a value broadcast along the lanes in ``over`` that it lacks."""
        for lane in over:
            if lane not in body.axes:
                tile = Select(self.value(below(index(lane), lane.extent)), body, body)
                body = self._let(scope, tile, tile)
        return body

    def _steps(self, scope: Scope, roots: State) -> State:
        """Name the intermediate values below ``roots``, so that each root is one operation."""
        new: dict[Expr, Expr] = {}
        nodes = postorder(roots)
        read = {child for node in nodes for child in children(node)}
        for node in nodes:
            shown = rebuild(node, new, None)
            plain = node in roots and node not in read
            new[node] = shown if plain else self._named(scope, shown)
        return tuple(new[root] for root in roots)

    def _conjunction(self, scope: Scope, guards: list[Expr | None]) -> Expr | None:
        """Name and return the conjunction of guards, or None if all are None or true."""
        total: Expr | None = None
        for guard in guards:
            if guard is None:
                continue
            atom = self.value(guard)
            if isinstance(atom, Const) and atom.value:
                continue
            total = both(total, atom)
            if isinstance(total, Op):
                total = self._once(scope, total)
        return total

    def _atom(self, node: Expr) -> Var | Const:
        known = self._known(node)
        if known is None:
            raise InternalError(f"{node} has no name yet", stage="codegen.lower")
        return known

    def _named(self, scope: Scope, node: Expr) -> Var | Const:
        """Return a value as an operand: itself if it is a name or constant, else a new name."""
        return node if isinstance(node, Var | Const) else self._once(scope, node)

    def _once(self, scope: Scope, node: Expr) -> Var | Const:
        """Name an operation on named values, or return its name if ``scope`` can see one.

        Inner scopes are not searched: operands are names, which do not tell their loops, and a
        loop inside ``scope`` may have named the same guard for a load that varies along the loop.
        """
        for outer in self.scopes:
            if (known := outer.memo.get(node)) is not None:
                return known
            if outer is scope:
                break
        return self._let(scope, node, node)

    def _let(self, scope: Scope, key: Expr, shown: Expr) -> Var:
        lanes = frozenset(a for a in shown.axes if a in self.lanes)
        var = self._var(self._hint(key), shown.dtype, lanes)
        scope.body.append(Let(var, shown))
        scope.memo[key] = var
        return var

    def _hint(self, node: Expr) -> str:
        label = self.labels.get(node)
        if label is not None:
            return label
        match node:
            case Load():
                return node.buffer.name
            case Reduce() | Scan():
                return node.monoid.name
            case Op():
                return "t" if SCALAR_OPS[node.name].infix else node.name
            case IndexValue():
                return "i"
            case _:
                return "t"

    def _var(self, hint: str, dtype: DType, lanes: frozenset[Axis]) -> Var:
        return Var(self.names.new(f"v_{hint}"), dtype, lanes)


def _exact_within(parts: Factors, terms: int) -> Factors:
    """Return factors of 8 bits in bf16, which holds them, if one tile has too many terms."""
    if parts.left.dtype not in F8 or terms <= parts.coarse or parts.scales:
        return parts
    return replace(parts, left=cast(parts.left, BF16), right=cast(parts.right, BF16))


def _is_loaded(factor: Expr) -> bool:
    """Return True for a load, converted or not, which is 0 in masked lanes without a ``Select``."""
    return isinstance(factor.arg if isinstance(factor, Cast) else factor, Load)


def _along(lane: Axis, factor: Expr) -> Expr:
    """Return a factor, broadcast along a lane if it does not have it."""
    if lane in factor.axes:
        return factor
    return Select(below(index(lane), lane.extent), factor, factor)
