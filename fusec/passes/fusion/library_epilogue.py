"""Let a library's call apply what it applies for free: a bias, a residual, an activation.

Spec: ``schedule -> schedule``. Runs after fusion, because a bias or an activation that shares a
kernel with a residual or a norm is cheaper there.

* *Sums.* A kernel that only adds a tensor to the result of a call, and is its only consumer, is
  merged into the call. A product of matrices adds a row vector (``addmm``), a convolution a tensor
  like its result. A kernel for it would cost a round trip through memory.
* *Activations.* If all loads of a convolution's result have the form ``f(result)`` with one
  activation f, in one kernel or several, beside sums or other stores, the call returns
  ``f(result)`` instead. Kernels without stores left are removed.

Worked example: ``c = _convolution_pointwise(x, p, b, ..., "none", [], "")`` and ``y[n, h, w, c] =
c[n, h, w, c] * sigmoid(c[n, h, w, c])`` become ``y = _convolution_pointwise(x, p, b, ..., "swish",
[], "")``. A SiLU over 96 channels of 112 x 112 takes twice as long as the 1 x 1 convolution before
it; as the call's epilogue it takes as long as the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from fusec.ir.argument import whole_view
from fusec.ir.dtype import F32, HALF
from fusec.ir.expr import Buffer, Cast, Expr, Load, Op, cast, index_exprs, op
from fusec.ir.extern import BiasedProduct, Convolution, Fresh, Product
from fusec.ir.graph import Extern, Kernel, Schedule, Step, Store, View
from fusec.ir.index import Index, index, is_nonnegative
from fusec.ir.rewrite import reading, replace_nodes, rewrite
from fusec.passes.dag import count_readers

ACTIVATIONS: Mapping[str, Callable[[Expr], Expr]] = {
    "sigmoid": lambda x: op("sigmoid", x),
    "silu": lambda x: op("mul", x, op("sigmoid", x)),
    "hardswish": lambda x: op("mul", x, op("minimum", op("maximum", x + 3.0, 0.0), 6.0)) / 6.0,
}
"""Name -> activation, in the form that ``simplify`` produces."""


def library_epilogue(schedule: Schedule, *, convolutions: bool = True) -> Schedule:
    """Return the schedule with biases, residuals and activations in the library's calls.

    Args:
        convolutions: whether epilogues of convolutions may be computed before results are rounded.
    """
    before, readers = schedule, _readers(schedule)
    kinds = Product | Convolution if convolutions else Product
    for call in schedule.externs:
        if isinstance(call.effect, kinds):
            found = readers.get(call.writes[0], [])
            changed = _with_sum(schedule, call, found) or _with_activation(schedule, call, found)
            if changed is not None:
                schedule, readers = changed, _readers(changed)
    if schedule is before:
        return before
    count = itertools.count()
    return schedule.map_kernels(lambda kernel: (replace(kernel, name=f"k{next(count)}"),))


def _readers(schedule: Schedule) -> dict[Buffer, list[Kernel]]:
    """Return buffer -> the kernels that read it, of buffers that no call and no caller reads."""
    found: dict[Buffer, list[Kernel]] = {}
    for kernel in schedule.kernels:
        for buffer in kernel.reads:
            found.setdefault(buffer, []).append(kernel)
    count = count_readers(schedule)
    return {buffer: kernels for buffer, kernels in found.items() if len(kernels) == count[buffer]}


# -- sums ------------------------------------------------------------------------------------------


def _with_sum(schedule: Schedule, call: Extern, readers: list[Kernel]) -> Schedule | None:
    """Return the schedule with a call's only consumer, an addition, merged into it, or None."""
    (made,) = call.writes
    if len(readers) != 1 or len(readers[0].stores) != 1 or readers[0].inside:
        return None
    (kernel,) = readers
    (store,) = kernel.stores
    view = _summand(store, made)
    added = None if view is None else _adding(call, view)
    if added is None or not _alike(store.buffer, made) or store.buffer in schedule.graph.inputs:
        return None
    added = replace(added, outputs=(store.buffer,), origin=call.origin + kernel.origin)
    steps = (added if s is kernel else s for s in schedule.steps if s is not call)
    return replace(schedule, steps=tuple(steps))


def _adding(call: Extern, view: View) -> Extern | None:
    """Return the call that also adds a view, of its result's shape, to its result, or None."""
    match call.effect:
        case Product() as product if view.strides[0] is index(0) is not view.strides[1]:
            row = replace(view, shape=view.shape[1:], strides=view.strides[1:])
            return replace(
                call,  # its decomposition stays that of the product: the cost model uses it
                target=product.biased,
                args=(row, *call.args),
                reason="contraction with its bias: runs in the library",
                effect=BiasedProduct(product.linear),
            )
        case Convolution() as convolution if view.is_whole and _alike(view.buffer, call.writes[0]):
            x, *order = call.args[:-3]
            args = (x, view, *order, "add", None, None, (), None)
            return replace(_applied(call), target=convolution.added, args=args)
        case _:
            return None


def _applied(call: Extern) -> Extern:
    """Return a convolution's call, marked as one that applies something to its result."""
    reason = "convolution with its epilogue: runs in the library"
    return replace(call, reason=reason, effect=Fresh())


def _summand(store: Store, made: Buffer) -> View | None:
    """Return the summand that a store adds to a call's result, as a view of its shape, or None."""
    expr = _uncast(store.expr)
    if not isinstance(expr, Op) or expr.name != "add":
        return None
    sides = map(_narrow, expr.args)
    for mine, other in itertools.permutations(sides):
        if (
            _is_own_load(store, mine, made)
            and isinstance(other, Load)
            and other.guard is None
            and other.dtype is made.dtype
            and other.buffer.base is not made.base
        ):
            return _view(store, other)
    return None


def _view(store: Store, load: Load) -> View | None:
    """Return the view of the store's shape that a load reads at the store's indices, or None."""
    if load.indices == store.indices and load.buffer.shape == store.buffer.shape:
        return whole_view(load.buffer)
    start = load.buffer.offset(load.indices)
    strides: list[Index] = []
    for at in store.indices:
        axis = at.as_axis()
        step = index(0) if axis is None else start.coefficient(axis)
        if step is None or step.axes or not is_nonnegative(step):
            return None
        strides.append(step)
        start -= step * at
    if start.axes or any(True for _ in index_exprs(start)):
        return None
    return View(load.buffer, store.buffer.shape, tuple(strides), start)


# -- activations -----------------------------------------------------------------------------------


def _with_activation(schedule: Schedule, call: Extern, readers: list[Kernel]) -> Schedule | None:
    """Return the schedule with the activation that all consumers apply moved into the call."""
    if not isinstance(call.effect, Convolution):
        return None
    (made,) = call.writes
    found = {n for k in readers for n in k.loads if n.buffer is made}
    if not found or any(load.guard is not None for load in found):
        return None
    active = Buffer(made.name, made.shape, made.strides, made.dtype)
    for name, rest in call.effect.activations:
        instead: dict[Expr, Expr] = {
            ACTIVATIONS[name](cast(n, F32)): cast(Load(active, n.indices), F32) for n in found
        }
        rule = partial(replace_nodes, new=instead)
        new = {kernel: kernel.map(rule) for kernel in readers}
        if any(made in kernel.reads for kernel in new.values()):
            continue
        args = (*call.args[: -len(rest)], *rest)
        origin = call.origin + readers[0].origin
        applied = replace(_applied(call), args=args, outputs=(active,), origin=origin)
        return _without_copies(schedule, call, applied, new)
    return None


def _without_copies(
    schedule: Schedule, call: Extern, applied: Extern, new: Mapping[Kernel, Kernel]
) -> Schedule:
    """Replace a call and its consumers; if one only copies the result, the call stores it there."""
    (active,) = applied.writes
    copies = [
        store
        for kernel in new.values()
        for store in kernel.stores
        if _is_own_load(store, _uncast(store.expr), active)
        and _alike(store.buffer, active)
        and store.buffer not in schedule.graph.inputs
    ]
    kept = dict(new)
    if copies:
        copy = copies[0]
        applied = replace(applied, outputs=(copy.buffer,))
        for before, kernel in new.items():
            stores = tuple(store for store in kernel.stores if store is not copy)
            left = replace(kernel, stores=stores)
            kept[before] = left.map(partial(rewrite, rule=reading({active: copy.buffer})))
    steps: list[Step] = []
    for step in schedule.steps:
        match step:
            case Kernel():
                changed = kept.get(step, step)
                steps += [changed] if changed.stores else []
            case _:
                steps.append(applied if step is call else step)
    return replace(schedule, steps=tuple(steps))


# -- patterns --------------------------------------------------------------------------------------


def _is_own_load(store: Store, expr: Expr, buffer: Buffer) -> bool:
    """Return True for the load of a buffer's element that the store has the place of."""
    return (
        isinstance(expr, Load)
        and expr.buffer is buffer
        and expr.guard is None
        and expr.indices == store.indices
        and buffer.shape == store.buffer.shape
    )


def _alike(a: Buffer, b: Buffer) -> bool:
    return (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)


def _uncast(expr: Expr) -> Expr:
    """Return a stored value without a cast from f32 to 16 bits, and one to f32 below that."""
    match expr:
        case Cast(dtype=dtype, arg=value) if dtype in HALF and value.dtype is F32:
            return _narrow(value)
    return _narrow(expr)


def _narrow(expr: Expr) -> Expr:
    """Return the value of 16 bits that is cast to f32; others, whose casts count, as they are."""
    match expr:
        case Cast(dtype=dtype, arg=value) if dtype is F32 and value.dtype in HALF:
            return value
    return expr
