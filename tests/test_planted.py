"""Faults planted in what stages make are found: by a verifier, or by what a structure computes.

A check that finds nothing proves nothing. Each fault here is one that a change could bring in: a
guard that is lost, an index that is off by one, a sum that begins elsewhere. It is planted in what
a stage made of an example (``tests/stages.py``), and what every test of a stage relies on has to
find it: the verifier behind the stage, or the interpreter beside what the stage was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from fusec.codegen.parametrize import Functions
from fusec.codegen.triton.form import Form
from fusec.driver.structures import Planned
from fusec.errors import FusecError
from fusec.ir.buffer import Buffer
from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Expr, IndexValue, Load, Op, Reduce, Select, Var, postorder
from fusec.ir.graph import (
    Def,
    Extern,
    ForeachKernel,
    Graph,
    Kernel,
    RowLoop,
    Schedule,
    Store,
    View,
    whole_view,
)
from fusec.ir.host import Allocation, FreeBuffers, HostProgram, HostStatement, NativeRun
from fusec.ir.index import index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.program import Carry, For, Let, Multiply, Program, Put, Statement, Unzip, Update
from fusec.ir.rewrite import rewrite
from fusec.passes.schedule.plan import LoopKind
from fusec.tools.bisect.interpret import copied
from tests.meaning import check
from tests.stages import step_of

Change = Callable[[Any], Any]
"""Takes part of a structure; returns another one, or the same where there is nothing to spoil."""


@dataclass(frozen=True)
class Fault:
    stage: str
    example: str
    what: str
    spoil: Change

    def __str__(self) -> str:
        return f"{self.stage}: {self.what}"


# -- faults of expressions -------------------------------------------------------------------------


def in_expressions(change: Callable[[Expr], Expr]) -> Change:
    """Return a change of the first expression that has what ``change`` looks for."""

    def spoil(structure: Any) -> Any:
        match structure:
            case Mapping():
                return first(structure.values(), spoil, partial(by_name, structure))
            case Graph():
                return first(structure.nodes, spoil, lambda new: replace(structure, nodes=new))
            case Schedule():
                return first(structure.steps, spoil, lambda new: replace(structure, steps=new))
            case Kernel():
                return first(structure.stores, spoil, lambda new: replace(structure, stores=new))
            case Planned():
                return replace(structure, kernel=spoil(structure.kernel))
            case Form():
                return replace(structure, program=spoil(structure.program))
            case Program():
                return first(structure.body, spoil, lambda new: replace(structure, body=new))
            case For():
                return first(structure.body, spoil, lambda new: replace(structure, body=new))
            case Def() | Store():
                return replace(structure, expr=in_one(structure.expr))
            case Let() | Update():
                return replace(structure, value=in_one(structure.value))
            case _:
                return structure

    def in_one(expr: Expr) -> Expr:
        for node in postorder((expr,)):
            new = change(node)
            if new is not node:
                return instead(expr, node, new)
        return expr

    return spoil


def instead(expr: Expr, node: Expr, new: Expr) -> Expr:
    """Return an expression with another node in the place of one."""
    (made,) = rewrite((expr,), lambda n: new if n is node else n)
    return made


def by_name(structure: Mapping[str, Any], parts: tuple[Any, ...]) -> Mapping[str, Any]:
    return dict(zip(structure, parts, strict=True))


def first(parts: Any, spoil: Change, build: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Return a structure whose first part that ``spoil`` changes is changed."""
    given = tuple(parts)
    for position, part in enumerate(given):
        new = spoil(part)
        if not same(new, part):
            return build((*given[:position], new, *given[position + 1 :]))
    return build(given)


def same(one: Any, other: Any) -> bool:
    return one is other or one == other or repr(one) == repr(other)


def swapped(name: str) -> Change:
    """The operands of an operation are swapped."""

    def change(node: Expr) -> Expr:
        if isinstance(node, Op) and node.name == name and node.args[0] is not node.args[1]:
            return Op(name, (node.args[1], node.args[0]))
        return node

    return in_expressions(change)


def renamed(name: str, wrong: str) -> Change:
    """An operation is another one."""
    return in_expressions(
        lambda n: Op(wrong, n.args) if isinstance(n, Op) and n.name == name else n
    )


def everywhere(change: Change) -> Change:
    """A change is made wherever there is something to change."""

    def spoil(structure: Any) -> Any:
        while not same(new := change(structure), structure):
            structure = new
        return structure

    return spoil


def shifted(node: Expr) -> Expr:
    """A load reads the next element."""
    if isinstance(node, Load) and node.indices:
        *before, last = node.indices
        return Load(node.buffer, (*before, last + 1), node.guard)
    return node


def unguarded(node: Expr) -> Expr:
    if isinstance(node, Load) and node.guard is not None:
        return Load(node.buffer, node.indices, None)
    return node


def other_side(node: Expr) -> Expr:
    """A choice takes the other side."""
    return Select(node.condition, node.other, node.then) if isinstance(node, Select) else node


def maximum(node: Expr) -> Expr:
    """A sum is a maximum."""
    if isinstance(node, Reduce) and node.monoid is SUM:
        return Reduce(MAX, node.over, node.body)
    return node


def doubled(node: Expr) -> Expr:
    """A number is twice what it was."""
    if isinstance(node, Const) and node.dtype.is_float and 0 < abs(node.value) < 1e9:
        return Const(2 * node.value, node.dtype)
    return node


# -- faults of lists -------------------------------------------------------------------------------


def lost(kind: type) -> Change:
    """The first line, step or store of a kind is lost."""

    def without(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        position = next((n for n, part in enumerate(parts) if isinstance(part, kind)), None)
        return parts if position is None else (*parts[:position], *parts[position + 1 :])

    return in_lists(without)


def in_lists(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Change:
    def spoil(structure: Any) -> Any:
        match structure:
            case Mapping():
                return first(structure.values(), spoil, partial(by_name, structure))
            case Graph():
                return replace(structure, nodes=change(structure.nodes))
            case Schedule():
                return replace(structure, steps=change(structure.steps))
            case Form():
                return replace(structure, program=spoil(structure.program))
            case Program():
                body = change(structure.body)
                if body != structure.body:
                    return replace(structure, body=body)
                return first(structure.body, spoil, lambda new: replace(structure, body=new))
            case For():
                return replace(structure, body=change(structure.body))
            case _:
                return structure

    return spoil


def in_each(kind: type, change: Callable[[Any], Any]) -> Change:
    """The first part of a kind is changed."""

    def among(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        for position, part in enumerate(parts):
            if isinstance(part, kind) and (new := change(part)) is not part:
                return (*parts[:position], new, *parts[position + 1 :])
        return parts

    return in_lists(among)


def untransposed(call: Extern) -> Extern:
    """The second factor is given as the call before had it."""
    if not call.target.startswith("mkldnn."):
        return call
    a, b, *rest = call.args
    assert isinstance(b, View)
    return replace(call, args=(a, b.transposed, *rest))


def reversed_steps(schedule: Schedule) -> Schedule:
    return replace(schedule, steps=schedule.steps[::-1])


def swapped_outputs(graph: Graph) -> Graph:
    return replace(graph, outputs=graph.outputs[::-1])


def first_store(change: Callable[[Store], Store]) -> Change:
    """The last store of the first kernel is changed."""
    return in_each(Kernel, lambda k: replace(k, stores=(*k.stores[:-1], change(k.stores[-1]))))


def store_shifted(store: Store) -> Store:
    return replace(store, indices=(*store.indices[:-1], store.indices[-1] + 1))


def into_another(store: Store) -> Store:
    known = store.buffer
    return replace(store, buffer=Buffer.row_major(known.name, known.shape, known.dtype))


def guards_end(end: int | None) -> Change:
    """A guard by which a part ends at 80 says that it ends elsewhere, or nowhere."""

    def moved(store: Store) -> Store:
        match store.guard:
            case Op(name="lt", args=(IndexValue() as at, IndexValue())):
                last = None if end is None else IndexValue(index(end), at.dtype)
                return replace(store, guard=last and Op("lt", (at, last)))
            case _:
                return store

    return lambda kernels: {
        name: replace(k, stores=tuple(map(moved, k.stores))) for name, k in kernels.items()
    }


def store_elsewhere(store: Store) -> Store:
    """A store begins at 0 of the axis in which it has an offset."""
    return replace(store, indices=tuple(i - index(i.const) for i in store.indices))


def one_member_twice(foreach: ForeachKernel) -> ForeachKernel:
    return replace(foreach, kernels=(foreach.kernels[0], *foreach.kernels[:-1]))


# -- faults of plans, programs and forms -----------------------------------------------------------


def in_plan(change: Callable[[Any], Any]) -> Change:
    def spoil(planned: Mapping[str, Planned]) -> Mapping[str, Planned]:
        return {n: replace(p, plan=change(p.plan)) for n, p in planned.items()}

    return spoil


def half_the_lanes(plan: Any) -> Any:
    """Lanes hold half of a row, which is no loop."""
    halved = [
        replace(b, tile=b.tile // 2) if b.kind is LoopKind.LANES else b for b in plan.bindings
    ]
    return replace(plan, bindings=tuple(halved))


def ends_early(loop: For) -> For:
    return replace(loop, stops=tuple(stop - 1 for stop in loop.stops))


def begins_elsewhere(carry: Carry) -> Carry:
    return replace(carry, initial=Const(1.0, carry.initial.dtype))


def put_unguarded(put: Put) -> Put:
    return put if put.guard is None else replace(put, guard=None)


def used_before(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The last store comes first."""
    return (body[-1], *body[:-1])


def in_host(change: Callable[[list[HostStatement]], None]) -> Change:
    def spoil(host: HostProgram) -> HostProgram:
        statements = list(host.statements)
        change(statements)
        return replace(host, statements=tuple(statements))

    return spoil


def freed_early(statements: list[HostStatement]) -> None:
    """What is freed at last is freed first."""
    assert isinstance(statements[-1], FreeBuffers)
    statements.insert(0, statements.pop())


def over_the_first(statements: list[HostStatement]) -> None:
    """What the second kernel makes lies over what the first one made, which it reads."""
    first, second = (s for s in statements if isinstance(s, Allocation))
    statements[1] = replace(second, over=first.buffer)


def unallocated(statements: list[HostStatement]) -> None:
    statements.remove(next(s for s in statements if isinstance(s, Allocation)))


def launched_early(statements: list[HostStatement]) -> None:
    """A run launches its second kernel first."""
    position = next(k for k, s in enumerate(statements) if isinstance(s, NativeRun))
    statements[position] = replace(statements[position], kernels=statements[position].kernels[::-1])


def in_form(change: Callable[[Form], Form]) -> Change:
    return lambda forms: {name: change(form) for name, form in forms.items()}


def without_a_dimension(form: Form) -> Form:
    return replace(form, dimension=dict(list(form.dimension.items())[1:]))


ANOTHER = Var("another", F32, frozenset())
"""A value of another kernel."""


def copy_of_another(form: Form) -> Form:
    return replace(form, copies=dict(zip((ANOTHER,), form.copies.values(), strict=False)))


def another_is_cheap(form: Form) -> Form:
    return replace(form, approximate=form.approximate | {ANOTHER})


# -- faults of FX graphs ---------------------------------------------------------------------------


def in_fx(change: Callable[[fx.Graph], None], half: int | None = None) -> Change:
    def spoil(given: Any) -> Any:
        gm = copied(given if half is None else given[half])
        change(gm.graph)
        gm.recompile()
        return gm if half is None else (*given[:half], gm, *given[half + 1 :])

    return spoil


def argument(target: str, position: int | str, wrong: Any) -> Callable[[fx.Graph], None]:
    """An argument of a call is another one."""

    def change(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.op == "call_function" and target in str(n.target))
        if isinstance(position, str):
            node.kwargs = {**node.kwargs, position: wrong}
        else:
            node.args = (*node.args[:position], wrong, *node.args[position + 1 :])

    return change


def turned(graph: fx.Graph) -> None:
    """The last cat joins its parts from behind."""
    *_, cat = (node for node in graph.nodes if "cat" in str(node.target))
    cat.args = (cat.args[0][::-1], *cat.args[1:])


def exchanged(target: str, one: int, other: int) -> Callable[[fx.Graph], None]:
    """Two arguments of a call are exchanged."""

    def change(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.op == "call_function" and target in str(n.target))
        args = list(node.args)
        args[one], args[other] = args[other], args[one]
        node.args = tuple(args)

    return change


def other_start(graph: fx.Graph) -> None:
    """A loop starts with another state."""
    (scan,) = (node for node in graph.nodes if "scan" in str(node.target))
    body, (start,), rows, others = scan.args
    with graph.inserting_before(scan):
        wrong = graph.call_function(torch.ones_like, (start,))
    scan.args = (body, [wrong], rows, others)


def read_before(graph: fx.Graph) -> None:
    """A number is read before it is made."""
    made = next(n for n in graph.nodes if n.op == "call_function")
    reader = next(iter(made.users))
    made.prepend(reader)


def in_loop(change: Change) -> Change:
    """The body of a loop over rows is changed."""
    return in_each(RowLoop, lambda loop: replace(loop, body=change(loop.body)))


def starts_elsewhere(loop: RowLoop) -> RowLoop:
    """What the loop carries starts as another tensor of its layout does."""
    (one,) = loop.carried
    return replace(loop, carried=(replace(one, initial=whole_view(one.other)),))


def last_in_the_other(loop: RowLoop) -> RowLoop:
    """The last iteration writes the buffer that is not returned."""
    (one,) = loop.carried
    return replace(loop, carried=(replace(one, final=one.other, other=one.final),))


def counted(loop: RowLoop) -> RowLoop:
    """The loop takes a step for each of its rows, of which it has none."""
    return replace(loop, while_true=False)


def begins_otherwise(loop: RowLoop) -> RowLoop:
    """The condition is computed from the other buffer of the state."""
    condition, *others = loop.carried
    return replace(loop, carried=(replace(condition, initial=whole_view(condition.other)), *others))


def never_moves(loop: RowLoop) -> RowLoop:
    """Each iteration takes the first rows."""
    moved = (replace(v, strides=(index(0), *v.strides[1:])) for v in loop.sliced)
    return replace(loop, sliced=tuple(moved))


def a_term_less(product: Multiply) -> Multiply:
    return replace(product, terms=tuple(count - 1 for count in product.terms))


def not_added(product: Multiply) -> Multiply:
    return replace(product, adds=index(0)) if product.adds is not index(0) else product


def narrow_rows(product: Multiply) -> Multiply:
    return replace(product, into=replace(product.into, row=product.into.row - 1))


def other_numbers(functions: Functions) -> Functions:
    """Each kernel passes what the next one should."""
    calls = list(functions.calls.values())
    turned = zip(functions.calls, (*calls[1:], calls[0]), strict=True)
    return replace(functions, calls=dict(turned))


def in_functions(change: Change) -> Change:
    """Return a change of what is printed, as of programs by name."""
    return lambda made: replace(made, functions=change(made.functions))


FAULTS = (
    # before capture
    Fault(
        "associative_scans", "recurrence", "factors for terms", in_fx(exchanged("recurring", 0, 1))
    ),
    Fault("rolled_loops", "unrolled", "factors for terms", in_fx(exchanged("recurring", 1, 2))),
    Fault(
        "rolled_loops", "carried", "an iteration less",
        in_fx(argument("sliced", 1, (slice(None), slice(0, 7)))),
    ),
    Fault("rolled_loops", "carried", "another start", in_fx(other_start)),
    Fault("equal_sizes", "lengths", "keys for values", in_fx(exchanged("attention", 1, 2))),
    Fault(
        "whole_gradients", "upsample", "another mode",
        in_fx(argument("interpolate", "mode", "bicubic")),
    ),
    Fault(
        "spell_out", "flex", "keys for queries",
        in_fx(exchanged("decomposed_flex_attention", 0, 1)),
    ),
    Fault("masked_writes", "masked", "another number", in_fx(argument("assign", 2, 2.0))),
    Fault("share_cat_prefixes", "dense", "parts in another order", in_fx(turned)),
    Fault("freeze", "scaled", "the bias left out", in_fx(argument("convolution", 2, None))),
    Fault(
        "widen_images", "narrow images", "another stride",
        in_fx(argument("convolution", 3, [2, 2])),
    ),
    Fault("widen", "narrow", "operands exchanged", in_fx(exchanged("mm.default", 0, 1))),
    Fault(
        "memory_formats", "images", "another stride", in_fx(argument("convolution", 3, [2, 2]))
    ),
    Fault("memory_formats", "images", "read before it is converted", in_fx(read_before)),
    Fault("winograd", "filter", "the bias left out", in_fx(argument("winograd.default", 2, None))),
    Fault("draws", "dropout", "numbers read before they are drawn", in_fx(read_before)),
    Fault("softmax_gradients", "weights", "the other sign", in_fx(exchanged("sub", 0, 1))),
    Fault(
        "partition", "attention", "a gradient with the other sign",
        in_fx(exchanged("sub", 0, 1), half=1),
    ),
    Fault(
        "partition", "attention", "a forward with another scale",
        in_fx(argument("mul", 1, 2.0), half=0),
    ),
    # frontend
    Fault("capture", "norm", "a subtraction that is a sum", renamed("sub", "add")),
    Fault("capture", "norm", "a sum that is a maximum", in_expressions(maximum)),
    Fault("capture", "norm", "an epsilon twice as large, and a count", in_expressions(doubled)),
    Fault(
        "capture", "attention", "a causal mask with its sides exchanged", in_expressions(other_side)
    ),
    Fault("capture", "parts", "a part of a cat that begins one too late", in_expressions(shifted)),
    Fault("capture", "columns", "a line lost", lost(Def)),
    Fault("capture", "norm", "outputs in another order", swapped_outputs),
    # graph passes
    Fault("eager_rounding", "rounding", "a product that is a sum", renamed("mul", "add")),
    Fault("simplify", "attention", "a choice with its sides exchanged", in_expressions(other_side)),
    Fault("simplify", "parts", "a guard lost", in_expressions(unguarded)),
    Fault("dead_code", "twice", "a live line dropped", lost(Def)),
    Fault("share", "twice", "a reader of the wrong line", swapped("div")),
    Fault("share", "statistics", "a line dropped that others read", lost(Def)),
    Fault("row_parts", "statistics", "the sum of parts is a maximum", in_expressions(maximum)),
    Fault("row_parts", "statistics", "pieces that begin one too late", in_expressions(shifted)),
    Fault("split_reduction", "columns", "parts that begin one too late", in_expressions(shifted)),
    Fault("split_reduction", "columns", "the final sum is a maximum", in_expressions(maximum)),
    Fault("inline", "parts", "a guard lost on the way into a reader", in_expressions(unguarded)),
    Fault("inline", "norm", "a producer put where another index is read", in_expressions(shifted)),
    Fault("recompute", "attention", "a difference that is a sum", renamed("sub", "add")),
    Fault("recompute", "attention", "a line dropped that is read still", lost(Def)),
    Fault("chunk", "loss", "a row's sum that is a maximum", in_loop(in_expressions(maximum))),
    Fault("capture", "carried", "another step", in_loop(renamed("tanh", "sin"))),
    Fault("capture", "carried", "no start", in_each(RowLoop, starts_elsewhere)),
    # schedules
    Fault("fuse", "norm", "an output that no kernel writes", lost(Kernel)),
    Fault("fuse", "columns", "kernels in the wrong order", reversed_steps),
    Fault("fuse", "norm", "a store one element on", first_store(store_shifted)),
    Fault("library_epilogue", "bias", "the call lost", lost(Extern)),
    Fault("library_epilogue", "behind", "the call lost", lost(Extern)),
    Fault("store_parts", "parts", "two parts at one place", first_store(store_elsewhere)),
    Fault(
        "split_loop", "product", "the final kernel lost", lambda s: replace(s, steps=s.steps[:-1])
    ),
    Fault("split_loop", "product", "parts added up as a maximum", in_expressions(maximum)),
    Fault("contract", "products", "a product's sum that is a maximum", in_expressions(maximum)),
    Fault("loops", "loss", "a chunk's sum that is a maximum", in_loop(in_expressions(maximum))),
    Fault("loops", "loss", "a chunk's kernel lost", in_loop(lost(Kernel))),
    Fault("loops", "carried", "another step", in_loop(renamed("tanh", "sin"))),
    Fault("loops", "carried", "the last state elsewhere", in_each(RowLoop, last_in_the_other)),
    Fault("loops", "carried", "rows that do not move on", in_each(RowLoop, never_moves)),
    Fault("loops", "carried", "a state that is never written", in_loop(lost(Kernel))),
    Fault("loops", "halved", "another condition", in_loop(renamed("gt", "le"))),
    Fault("loops", "halved", "steps for rows in place of a condition", in_each(RowLoop, counted)),
    Fault("loops", "halved", "a condition without a start", in_each(RowLoop, begins_otherwise)),
    Fault("libraries", "library", "a weight not transposed", in_each(Extern, untransposed)),
    Fault("libraries", "library", "a call lost", lost(Extern)),
    Fault("layouts", "walks", "a result where nobody looks for it", first_store(into_another)),
    Fault("in_place", "cache", "the next position", first_store(store_shifted)),
    Fault("in_place", "cache", "a part that is never written", lost(Kernel)),
    Fault("in_place", "step", "an update the other way round", swapped("sub")),
    Fault(
        "fuse_horizontally", "step", "a member twice, another one never",
        in_each(ForeachKernel, one_member_twice),
    ),
    # memory
    Fault("memory", "columns", "freed before its last reader", in_host(freed_early)),
    Fault("memory", "columns", "a result over what is read still", in_host(over_the_first)),
    Fault("memory", "norm", "memory forgotten", in_host(unallocated)),
    Fault("memory", "columns", "kernels of a run in the wrong order", in_host(launched_early)),
    # kernels and plans
    Fault("infinite_masks", "least", "a mask the other way round", renamed("lt", "ge")),
    Fault(
        "online_softmax", "attention", "a divisor left where it was, too", in_expressions(doubled)
    ),
    Fault("nested_sums", "nested", "a maximum", in_expressions(maximum)),
    Fault("coalesce", "norm", "flat offsets one too far", in_expressions(shifted)),
    Fault("coalesce", "parts", "a store at another offset", lambda kernels: {
        name: replace(k, stores=(*k.stores[:-1], store_shifted(k.stores[-1])))
        for name, k in kernels.items()
    }),
    Fault("unroll_parts", "short rows", "a part that does not end", guards_end(None)),
    Fault("unroll_parts", "short rows", "a part that ends one too late", guards_end(81)),
    Fault("unroll_parts", "short rows", "a part that ends one too early", guards_end(79)),
    Fault("factor_groups", "groups", "a scale that is added", renamed("mul", "add")),
    Fault("unroll_pairs", "pairs", "parts the other way round", lambda kernels: {
        name: replace(k, stores=tuple(
            replace(store, expr=other.expr)
            for store, other in zip(k.stores, k.stores[::-1], strict=True)
        ))
        for name, k in kernels.items()
    }),
    Fault("plan", "norm", "an axis that is not bound", in_plan(
        lambda plan: replace(plan, bindings=plan.bindings[:-1])
    )),
    Fault("plan", "statistics", "lanes for half of a row", in_plan(half_the_lanes)),
    # programs
    Fault("lower", "norm", "a loop that ends early", in_each(For, ends_early)),
    Fault("lower", "norm", "an accumulator that begins at 1", in_each(Carry, begins_elsewhere)),
    Fault("lower", "norm", "an update forgotten", lost(Update)),
    Fault("lower", "products", "a product that is not added", lost(Update)),
    Fault("lower", "norm", "a store forgotten", lost(Put)),
    Fault("vector_tiles", "tiles", "a product with a term too few", in_each(Multiply, a_term_less)),
    Fault("vector_tiles", "scores", "a product that is not added", in_each(Multiply, not_added)),
    Fault("vector_tiles", "tiles", "rows that overlap", in_each(Multiply, narrow_rows)),
    Fault("vector_tiles", "scores", "an array without its last row", in_each(For, ends_early)),
    Fault("parametrize", "widths", "numbers of another kernel", other_numbers),
    Fault(
        "parametrize", "widths", "a loop that ends early", in_functions(in_each(For, ends_early))
    ),
    Fault("parametrize", "widths", "a store forgotten", in_functions(lost(Put))),
    Fault("base_two", "attention", "the base is e still", everywhere(renamed("exp2", "exp"))),
    Fault("sink", "attention", "a value used before it is named", in_lists(used_before)),
    # the form that is printed
    Fault(
        "orient", "product", "a lane axis without a place",
        in_form(without_a_dimension)
    ),
    Fault("orient", "statistics", "another function", everywhere(renamed("ndtr", "tanh"))),
    Fault("copy_tiles", "product", "a copy that belongs to no access", in_form(copy_of_another)),
    Fault("join_pairs", "pairs of a GPU", "elements the other way round", in_each(
        Unzip, lambda pair: replace(pair, halves=pair.halves[::-1])
    )),
    Fault("join_pairs", "pairs of a GPU", "a store forgotten", lost(Put)),
    Fault("approximate", "product", "a value of another kernel", in_form(another_is_cheap)),
)  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    step = step_of(fault.stage, fault.example)
    spoilt = fault.spoil(step.after)
    assert spoilt is not step.after, "nothing was spoilt"
    with pytest.raises((FusecError, AssertionError)):
        check(step, spoilt)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("stage", "example"), sorted({(fault.stage, fault.example) for fault in FAULTS})
)
def test_without_a_fault_nothing_is_found(stage: str, example: str) -> None:
    step = step_of(stage, example)
    check(step, step.after)
