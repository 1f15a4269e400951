"""What is legal at each stage. A verifier raises ``InvalidIR``, naming the line at fault.

In an expression, wherever it stands:

* its free axes, and the axes in limits of its ragged axes, are in scope;
* every load is guarded, or provably in range; a gather's ``Runtime`` index is so by definition;
  ``collect_unproven`` accepts what holds for the traced sizes;
* a reduction binds distinct axes;
* operations and reductions work in compute types (f32, f64, i32, i64, bool) that their row of
  ``scalar.py`` takes; nothing is opaque.

In a graph, no axis is both free and bound in a definition: any index may be substituted for a free
one. In a graph or schedule, every buffer is defined once and before use. In a kernel, whose axes
are unified, reduced axes are inside, never on the grid; a buffer that it writes is loaded at no
other index; stores are in range, which their guards may show, and disjoint: their indices determine
every axis of the grid and of the value (the race check, see ``disjoint.py``).

``verify_program`` is defined in ``verify_program.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fusec.errors import InvalidIR
from fusec.ir.disjoint import are_apart, determined_axes, has_distinct_elements
from fusec.ir.dtype import BOOL, I32, I64, DType, compute_type
from fusec.ir.edges import edges_when
from fusec.ir.expr import (
    Buffer,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Scan,
    Var,
    children,
    loads,
    postorder,
    substitute,
)
from fusec.ir.graph import (
    CallStep,
    Def,
    Extern,
    FlatKernel,
    ForeachKernel,
    Graph,
    Kernel,
    Line,
    RowLoop,
    Schedule,
    Step,
    Store,
    View,
    argument_views,
)
from fusec.ir.index import Axis, Index, index, is_in_range, product
from fusec.ir.monoid import ALL, ANY, ARGMAX, ARGMIN, PROD, RECURRENCE, Monoid
from fusec.ir.points import as_traced, is_in_range_as_traced, is_in_range_everywhere
from fusec.ir.scalar import SCALAR_OPS


def check(condition: bool, line: str, problem: str) -> None:
    """Raise InvalidIR unless ``condition``; ``line`` is the target of the statement at fault.

    ``problem`` is built even where the condition holds, so callers print no expressions in it.
    """
    if not condition:
        raise InvalidIR(f"{line}: {problem}")


def _target(buffer: Buffer, indices: Iterable[object]) -> str:
    return f"{buffer.name}[{', '.join(map(repr, indices))}] = ..."


def _names(axes: Iterable[Axis]) -> str:
    return ", ".join(axis.name for axis in sorted(axes, key=lambda axis: axis.serial))


# -- expressions -----------------------------------------------------------------------------------


def verify_expr(root: Expr, scope: frozenset[Axis], line: str) -> None:
    """Check an expression of a graph or kernel, whose free axes must be in ``scope``.

    Raises:
        InvalidIR: naming ``line``.
    """
    needed: dict[Expr, frozenset[Axis]] = {}
    for node in postorder((root,)):
        verify_node_types(node, line)
        check(not isinstance(node, Var), line, "a variable outside a program")
        if isinstance(node, Load):
            _verify_load(node, line)
        if isinstance(node, Reduce):
            distinct = len(set(node.over)) == len(node.over) > 0
            check(distinct, line, f"{node.monoid} over axes ({_names(node.over)})")
        needed[node] = _needed_axes(node, needed)
    loose = needed[root] - scope
    check(not loose, line, f"axes {_names(loose)} are not in scope")


def _needed_axes(node: Expr, needed: dict[Expr, frozenset[Axis]]) -> frozenset[Axis]:
    """Return the free axes of a node, including the axes in limits of ragged axes."""
    axes = node.axes.union(*(needed[child] for child in children(node)))
    bound = frozenset(node.over) if isinstance(node, Reduce) else frozenset()
    for axis in (*axes, *bound):
        if axis.limit is not None:
            axes |= axis.limit.axes
    return axes - bound


def _verify_load(node: Load, line: str) -> None:
    if node.guard is not None:
        check(node.guard.dtype is BOOL, line, f"guard of {node.buffer} is {node.guard.dtype}")
        return
    for value, extent in zip(node.indices, node.buffer.shape, strict=True):
        verify_range(value, extent, f"load of {node.buffer}", line)


def verify_range(value: Index, extent: Index, what: str, line: str, *forms: Index) -> None:
    """Check that ``0 <= value < extent`` is provable, as it is by definition for a gather alone.

    Args:
        forms: what ``value`` is equal to inside loops: it suffices to prove one of them.
    """
    tried = forms or (value,)
    if any(is_in_range(i, extent) for i in tried):
        return
    if any(is_in_range_everywhere(i, extent) for i in tried):
        return
    problem = f"{line}: {what} at {value} is not provably in [0, {extent}), nor guarded"
    _accept_as_traced(problem, lambda: any(is_in_range_as_traced(i, extent) for i in tried))


def _accept_as_traced(problem: str, holds: Callable[[], bool]) -> None:
    """Note what no proof covers if it holds for the traced sizes and ``collect_unproven`` asks.

    Raises:
        InvalidIR: else.
    """
    unproven = _unproven.get()
    if unproven is None or not holds():
        raise InvalidIR(problem)
    unproven.append(problem)


_unproven: ContextVar[list[str] | None] = ContextVar("_unproven", default=None)


@contextmanager
def collect_unproven() -> Iterator[list[str]]:
    """Accept what holds for the traced sizes, provably or not for all: ranges, distinct elements.

    Dynamo may guard that two sizes have a relation which the proofs do not use. Yields the problems
    that were accepted so.
    """
    problems: list[str] = []
    before = _unproven.set(problems)
    try:
        yield problems
    finally:
        _unproven.reset(before)


def verify_node_types(node: Expr, line: str) -> None:
    """Check the dtype rules of one node that its constructor does not check."""
    check(not node.dtype.is_opaque, line, f"a value of opaque type {node.dtype}")
    match node:
        case Op():
            dtype = node.args[0].dtype
            accepted = _accepts(SCALAR_OPS[node.name].takes, dtype)
            check(accepted and compute_type(dtype) is dtype, line, f"{node.name} on {dtype}")
        case IndexValue():
            check(node.dtype in (I32, I64), line, f"an index value of type {node.dtype}")
        case Reduce() | Scan():
            for monoid, body in zip(node.monoid.fields, node.bodies, strict=True):
                keeps = monoid is PROD and node.monoid is RECURRENCE and body.dtype is BOOL
                _verify_reduced(ALL if keeps else monoid, body.dtype, line)
            one = len(node.over) == 1 or not node.monoid.ordered
            check(one, line, f"{node.monoid}, which is ordered, over several axes")


def _verify_reduced(monoid: Monoid, dtype: DType, line: str) -> None:
    """Check the type of a value that a reduction combines."""
    accepted = _accepts(SCALAR_OPS[monoid.combine].takes, dtype)
    if monoid in (ANY, ALL):
        accepted = dtype is BOOL
    if monoid in (ARGMAX, ARGMIN):
        accepted = dtype in (I32, I64)
    check(accepted and compute_type(dtype) is dtype, line, f"{monoid} of {dtype}")


def _accepts(takes: str, dtype: DType) -> bool:
    """Return True if ``takes``, a value of ``ScalarOp.takes``, admits arguments of ``dtype``."""
    match takes:
        case "any":
            return True
        case "number":
            return dtype is not BOOL
        case "bits":
            return not dtype.is_float
        case "float":
            return dtype.is_float
        case "integer":
            return dtype.is_integer
        case _:
            return dtype.name == takes


# -- graphs ----------------------------------------------------------------------------------------


def verify_graph(graph: Graph) -> None:
    """Check a graph.

    Raises:
        InvalidIR: naming the definition or extern at fault.
    """
    _verify_lines(graph, graph.nodes)


def _verify_lines(graph: Graph, lines: Iterable[Line | Step]) -> None:
    """Check the lines of a graph, or the steps that it was cut into."""
    defined = {item for item in graph.inputs if isinstance(item, Buffer)}
    written = set(defined)
    for line in lines:
        match line:
            case Def():
                _verify_def(line, defined)
            case Kernel() | ForeachKernel():
                _verify_launch(line, defined, written)
            case RowLoop():
                _verify_row_loop(line, defined)
            case _:
                _verify_call(line, defined)
    for view in argument_views(graph.outputs):
        check(view.buffer.base in defined, "return", f"{view.buffer} is never defined")
        _verify_form(view, "return")


def _verify_def(line: Def, defined: set[Buffer]) -> None:
    target = _target(line.buffer, line.axes)
    check(len(line.axes) == len(line.buffer.shape), target, f"shape is {line.buffer.shape}")
    check(len(set(line.axes)) == len(line.axes), target, "an axis stands twice")
    for axis, extent in zip(line.axes, line.buffer.shape, strict=True):
        check(axis.extent is extent, target, f"{axis.name} has {axis.extent} of {extent} points")
    _verify_store_type(line.expr, line.buffer, target)
    verify_expr(line.expr, frozenset(line.axes), target)
    for node in postorder((line.expr,)):
        if isinstance(node, Reduce):
            both = frozenset(line.axes) & frozenset(node.over)
            check(not both, target, f"axes {_names(both)} are both free and bound")
    for load in loads((line.expr,)):
        check(load.buffer.base in defined, target, f"{load.buffer} is not defined yet")
    _define(line.buffer, defined, target)


def _verify_store_type(value: Expr, buffer: Buffer, line: str) -> None:
    check(value.dtype is buffer.dtype, line, f"{value.dtype} into a buffer of {buffer.dtype}")


def _define(buffer: Buffer, defined: set[Buffer], line: str) -> None:
    check(buffer.base not in defined, line, f"{buffer} is defined twice")
    if not has_distinct_elements(base := buffer.base):
        problem = f"{line}: strides {base.strides} overlap, or no proof says that they do not"
        traced = Buffer(base.name, as_traced(base.shape), as_traced(base.strides), base.dtype)
        _accept_as_traced(problem, lambda: has_distinct_elements(traced))
    defined.add(base)


def _verify_call(node: CallStep, defined: set[Buffer]) -> None:
    line = f"{', '.join(map(repr, node.writes)) or '_'} = extern {node.target}(...)"
    if isinstance(node, Extern):
        for view in node.views:
            check(view.buffer.base in defined, line, f"{view.buffer} is not defined yet")
            check(len(view.shape) == len(view.strides), line, f"view of {view.buffer}: rank")
            _verify_form(view, line)
    for buffer in node.writes:
        check(buffer not in defined, line, f"{buffer} is defined twice")
        defined.add(buffer)


def _verify_form(view: View, line: str) -> None:
    """Check that a complex view's last axis is that of two adjacent parts."""
    last = (*view.shape[-1:], *view.strides[-1:])
    pairs = not view.form.is_complex or last == (index(2), index(1))
    check(pairs, line, f"view of {view.buffer}: no pairs of parts")


# -- kernels and schedules -------------------------------------------------------------------------


def verify_kernel(kernel: Kernel) -> None:
    """Check a kernel by itself, but not whether the buffers that it loads are defined.

    Raises:
        InvalidIR: naming the store at fault.
    """
    head = f"kernel {kernel.name}"
    check(len(set(kernel.axes)) == len(kernel.axes), head, "an axis stands twice")
    _verify_reductions(kernel, head)
    for store in kernel.stores:
        _verify_store(store, kernel)
    bases = {store.buffer.base for store in kernel.stores}
    for one, other in itertools.combinations(kernel.stores, 2):
        apart = one.buffer.base is not other.buffer.base or are_apart(_places(one), _places(other))
        check(apart, head, f"an element of {one.buffer} may be stored twice")
    places = {(store.buffer, store.indices) for store in kernel.stores}
    for load in kernel.loads:
        same = load.buffer.base not in bases or (load.buffer, load.indices) in places
        check(same, head, f"{load.buffer} is written, and read at another index")


def verify_flat(kernel: FlatKernel) -> None:
    """Check that each load and store is addressed by an element offset over the kernel's axes.

    Raises:
        InvalidIR: naming the buffer at fault.
    """
    head = f"flat kernel {kernel.name}"
    _verify_reductions(kernel, head)
    places: list[Load | Store] = [*kernel.stores, *kernel.loads]
    for place in places:
        flat = place.buffer.base is not place.buffer
        check(flat, head, f"{place.buffer} is not addressed by its element offset")
        loose = place.indices[0].axes - frozenset(kernel.axes)
        check(not loose, head, f"axes {_names(loose)} are not in scope")


def _verify_reductions(kernel: Kernel, head: str) -> None:
    inside = frozenset(kernel.inside)
    for node in postorder(store.expr for store in kernel.stores):
        if isinstance(node, Reduce | Scan):
            loose = frozenset(node.over) - inside
            check(not loose, head, f"{node.monoid} over {_names(loose)}, which is not inside")


def _verify_store(store: Store, kernel: Kernel) -> None:
    line = f"kernel {kernel.name}: {_target(store.buffer, store.indices)}"
    scope = frozenset(kernel.axes)
    check(len(store.indices) == len(store.buffer.shape), line, f"shape is {store.buffer.shape}")
    for value in store.indices:
        loose = value.axes - scope
        check(not loose, line, f"axes {_names(loose)} are not in scope")
    if store.guard is not None:
        check(store.guard.dtype is BOOL, line, f"its guard is {store.guard.dtype}")
        verify_expr(store.guard, scope, line)
    for value, extent in zip(_places(store), store.buffer.shape, strict=True):
        verify_range(value, extent, "store", line)
    _verify_store_type(store.expr, store.buffer, line)
    verify_expr(store.expr, scope, line)
    written = store.expr.axes.union(kernel.grid, *(value.axes for value in store.indices))
    many = {axis for axis in written if axis.extent is not index(1)}
    if loose := frozenset(many) - determined_axes(store.indices):
        problem = f"{line}: different points of {_names(loose)} may write one element"
        *places, points = as_traced((*store.indices, sum(map(index, many), index(0))))
        known = determined_axes(tuple(places))
        _accept_as_traced(problem, lambda: points.axes <= known)


def _places(store: Store) -> tuple[Index, ...]:
    """Return a store's indices, with shorter axes where its guard says where these end."""
    ends: dict[Axis, Index] = {}
    for edge in () if store.guard is None else edges_when(store.guard, True):
        (*others, axis) = edge.axes or (None,)
        last = index(0) if axis is None else index(axis) - edge
        if axis is not None and not others and last.is_constant:
            ends[axis] = index(Axis(axis.name, last + 1))
    return tuple(substitute(value, ends) for value in store.indices)


def verify_schedule(schedule: Schedule) -> None:
    """Check every kernel, and that kernels and externs define every buffer once and before use.

    Raises:
        InvalidIR: naming the store or extern at fault.
    """
    _verify_lines(schedule.graph, schedule.steps)


def _verify_launch(
    launch: Kernel | ForeachKernel, defined: set[Buffer], written: set[Buffer]
) -> None:
    """Check the kernels of one launch; ``written`` has the inputs not written in place so far."""
    line = f"kernel {launch.name}"
    for buffer in launch.reads:
        check(buffer in defined, line, f"{buffer} is not defined yet")
    for kernel in launch.kernels:
        verify_kernel(kernel)
        for buffer in kernel.writes:
            if buffer in written:  # in place, once
                written.remove(buffer)
                defined.remove(buffer)
            _define(buffer, defined, line)


def _verify_row_loop(loop: RowLoop, defined: set[Buffer]) -> None:
    """Check a row loop's body, and that its inputs and outputs match the loop's buffers."""
    line = f"rows {loop.name}"
    match loop.body:
        case Graph():
            verify_graph(loop.body)
        case Schedule():
            verify_schedule(loop.body)
    for view in loop.views:
        check(view.buffer.base in defined, line, f"{view.buffer} is not defined yet")
    fused = 0 if isinstance(loop.body, Graph) else len(loop.carried)
    inner = [item for item in loop.graph.inputs if isinstance(item, Buffer)]
    given = len(loop.views) + len(loop.added) + len(loop.placed) + fused
    check(len(inner) == given, line, f"its body takes {len(inner)} buffers of {given}")
    for view, buffer in zip(loop.sliced, inner, strict=False):
        check(view.shape[0] is loop.rows, line, f"{view.buffer} has {view.shape[0]} rows")
        same = buffer.shape == (loop.count, *view.shape[1:]) and buffer.strides == view.strides
        check(same, line, f"{buffer} is no slice of {view.buffer}")
    outputs = argument_views(loop.graph.outputs)
    made = len(loop.results) + len(loop.carried) - fused
    check(len(outputs) == made, line, f"its body returns {len(outputs)} of {made} buffers")
    for one, states in zip(loop.carried, loop.states, strict=True):
        for held in (one.initial, one.other, *states):
            same = (held.shape, held.strides) == (one.final.shape, one.final.strides)
            check(same, line, f"{one.final} is carried in several layouts")
    if loop.while_true:
        told = loop.carried[0].final if loop.carried else None
        check(told is not None and told.dtype is BOOL and not told.shape, line, "has no condition")
        rows = (*loop.sliced, *loop.results, *loop.placed, *loop.added)
        check(not rows, line, "has rows, and a condition")
    for buffer, part in loop.chunks.items():
        row = loop.rows * product(part.shape[1:])
        check(product(buffer.shape) is row, line, f"{part} has not {buffer}'s rows")
    for buffer in loop.writes:
        _define(buffer, defined, line)
