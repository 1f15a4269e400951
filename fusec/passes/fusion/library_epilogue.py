"""Move an activation or a residual addition into the epilogue of the library's convolution.

Spec: ``schedule -> schedule``. If a call supports epilogues (``Convolution``) and all loads of its
result have the form ``f(result)`` with one activation f, in one kernel or several, beside sums or
other stores, the call returns ``f(result)`` instead. A kernel that only adds a tensor to the result
is merged into the call, too. Kernels without stores left are removed.

Worked example: ``c = _convolution_pointwise(x, p, b, ..., "none", [], "")`` and ``y[n, h, w, c] =
c[n, h, w, c] * sigmoid(c[n, h, w, c])`` become ``y = _convolution_pointwise(x, p, b, ..., "swish",
[], "")``. A SiLU over 96 channels of 112 x 112 takes twice as long as the 1 x 1 convolution before
it; as the call's epilogue it takes as long as the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Cast, Const, Expr, Load, cast, loads, op
from fusec.ir.extern import Convolution, Fresh
from fusec.ir.graph import Extern, Kernel, Schedule, Step, Store, View
from fusec.ir.index import index
from fusec.ir.rewrite import reading, rewrite
from fusec.passes.dag import count_readers

_REASON = "convolution with what stands behind it: runs in the library"


def _number(value: float) -> Expr:
    return Const(value, F32)


def _hardswish(x: Expr) -> Expr:
    gate = op("minimum", op("maximum", op("add", x, _number(3.0)), _number(0.0)), _number(6.0))
    return op("div", op("mul", x, gate), _number(6.0))


ACTIVATIONS: Mapping[str, Callable[[Expr], Expr]] = {
    "sigmoid": lambda x: op("sigmoid", x),
    "silu": lambda x: op("mul", x, op("sigmoid", x)),
    "hardswish": _hardswish,
}
"""Name -> activation, in the form that ``simplify`` produces."""


def library_epilogue(schedule: Schedule) -> Schedule:
    """Return the schedule with activations and residuals in the calls of convolutions."""
    for call in schedule.externs:
        if isinstance(call.effect, Convolution) and call.result not in schedule.graph.returned:
            schedule = _with_residual(schedule, call, call.effect) or (
                _with_activation(schedule, call, call.effect) or schedule
            )
    return schedule


def _readers(schedule: Schedule, buffer: Buffer) -> list[Kernel]:
    """Return the kernels that read a buffer; empty if another step or the caller reads it."""
    found = [kernel for kernel in schedule.kernels if buffer in kernel.reads]
    return found if len(found) == count_readers(schedule)[buffer] else []


# -- activations -----------------------------------------------------------------------------------


def _with_activation(schedule: Schedule, call: Extern, effect: Convolution) -> Schedule | None:
    """Return the schedule with the activation that all consumers apply moved into the call."""
    (made,) = call.writes
    readers = _readers(schedule, made)
    found = {n for k in readers for n in loads(s.expr for s in k.stores) if n.buffer is made}
    if not found or any(load.guard is not None for load in found):
        return None
    active = Buffer(made.name, made.shape, made.strides, made.dtype)
    for name, rest in effect.activations:
        instead = {
            ACTIVATIONS[name](cast(n, F32)): cast(Load(active, n.indices), F32) for n in found
        }
        new = {kernel: _replaced(kernel, instead) for kernel in readers}
        if any(made in kernel.reads for kernel in new.values()):
            continue
        applied = replace(
            call,
            args=(*call.args[: -len(rest)], *rest),
            outputs=(active,),
            reason=_REASON,
            effect=Fresh(),
            origin=call.origin + readers[0].origin,
        )
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
        if _own_load(store, _uncast(store.expr)) is active
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


def _replaced(kernel: Kernel, instead: Mapping[Expr, Expr]) -> Kernel:
    return kernel.map(partial(rewrite, rule=lambda node: instead.get(node, node)))


# -- residuals -------------------------------------------------------------------------------------


def _with_residual(schedule: Schedule, call: Extern, effect: Convolution) -> Schedule | None:
    """Return the schedule with a call's only consumer, a residual addition, merged into it."""
    (made,) = call.writes
    readers = _readers(schedule, made)
    if len(readers) != 1 or len(readers[0].stores) != 1 or readers[0].inside:
        return None
    (kernel,) = readers
    (store,) = kernel.stores
    if not _alike(store.buffer, made) or store.buffer in schedule.graph.inputs:
        return None
    other = _added(store, made)
    if other is None or other.dtype is not made.dtype:
        return None
    view = View(other, other.shape, other.strides, index(0))
    x, *order = call.args[:-3]
    added = replace(
        call,
        target=effect.added,
        args=(x, view, *order, "add", None, None, (), None),
        outputs=(store.buffer,),
        reason=_REASON,
        effect=Fresh(),
        origin=call.origin + kernel.origin,
    )
    steps = (added if s is kernel else s for s in schedule.steps if s is not call)
    return replace(schedule, steps=tuple(steps))


def _added(store: Store, made: Buffer) -> Buffer | None:
    """Return the buffer that a store adds to a call's result of its shape; None for any other."""
    expr = _uncast(store.expr)
    mine = cast(Load(made, store.indices), F32)
    for load in loads((expr,)):
        other = cast(load, F32)
        if expr in (op("add", mine, other), op("add", other, mine)) and load is not _uncast(mine):
            return _own_load(store, load)
    return None


# -- patterns --------------------------------------------------------------------------------------


def _own_load(store: Store, expr: Expr) -> Buffer | None:
    """Return the buffer that is loaded at the store's indices, each element once, or None."""
    if not isinstance(expr, Load) or expr.guard is not None or expr.indices != store.indices:
        return None
    rows = zip(expr.indices, expr.buffer.shape, strict=True)
    walked = [at for at, extent in rows if extent is not index(1)]
    plain = all(at.axes and at is index(next(iter(at.axes))) for at in walked)
    same = expr.buffer.shape == store.buffer.shape
    return expr.buffer if plain and same and len(set(walked)) == len(walked) else None


def _alike(a: Buffer, b: Buffer) -> bool:
    return (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)


def _uncast(expr: Expr) -> Expr:
    """Return a stored value without its cast to the result's type and a cast to f32 below that."""
    inner = expr.arg if isinstance(expr, Cast) else expr
    return inner.arg if isinstance(inner, Cast) and inner.dtype is F32 else inner
