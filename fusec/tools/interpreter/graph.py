"""Reference interpreter of graphs, kernels and schedules in NumPy: slow, small and exact.

Tensors go in and come out by logical shape; inside, each buffer is flat storage that its strides
address. bf16 values are passed as float32 arrays (see ``scalar.py``). Unwritten memory reads as NaN
or as the greatest integer, so that a missing store shows.

Three defects of a printed kernel raise ``InternalError`` here: a load or store out of range, two
points of a kernel that store to one element, and a load of a buffer that the same kernel writes at
another index.

Programs are run by ``program.py``, expressions evaluated by ``expression.py``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from fusec.errors import InternalError
from fusec.ir.dtype import NumberForm
from fusec.ir.expr import Buffer
from fusec.ir.graph import (
    Argument,
    CallStep,
    Comparison,
    Constant,
    Def,
    Extern,
    ForeachKernel,
    Graph,
    Junction,
    Kernel,
    Line,
    OwnTensor,
    RowLoop,
    Schedule,
    SizeMinimum,
    SizeValue,
    Step,
    Store,
    View,
    whole_view,
)
from fusec.ir.host import Allocation, FreeBuffers, HostLoop, HostProgram, HostStatement, NativeRun
from fusec.ir.index import Size, index
from fusec.ir.memory import made_by
from fusec.tools.interpreter.expression import (
    STAGE,
    Env,
    Memo,
    Tile,
    allocate,
    check_offsets,
    conjunction,
    eval_scalar,
    eval_tile,
    joint_axes,
    locate,
    ragged_mask,
    storage_length,
    store,
)
from fusec.tools.interpreter.scalar import Array, convert, fill_value

ExternCall: TypeAlias = Callable[
    [Extern | Constant, tuple[Any, ...], dict[str, Any]], Sequence[Array | None]
]
"""Runs an extern: ``call(node, args, kwargs)`` returns one array (or None) for each of its outputs.

Views are passed as strided arrays over the storage, so that writes to arguments take effect; sizes
as ints, other arguments unchanged.
"""

KernelCall: TypeAlias = Callable[[Kernel, Env], None]
"""Runs a kernel of a schedule on the storage and the sizes of an environment."""

Interpreted: TypeAlias = Graph | Schedule | HostProgram

_SIGNS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip


# -- arrays and storage --------------------------------------------------------------------------


def to_storage(buffer: Buffer, values: Array, env: Env) -> Array:
    """Give ``buffer`` storage that holds ``values`` (by logical shape) and return the storage."""
    values = _real(np.asarray(values), buffer.form)
    shape = tuple(eval_scalar(extent, env) for extent in buffer.shape)
    if values.shape != shape:
        raise InternalError(f"{buffer} has shape {shape}, not {values.shape}", stage=STAGE)
    if buffer.dtype.is_opaque:
        env.storage[buffer.base] = np.zeros(storage_length(buffer, env), values.dtype)
    else:
        allocate(buffer, env)
    from_storage(buffer, env)[...] = convert(values, buffer.dtype)
    return env.storage[buffer.base]


def from_storage(buffer: Buffer, env: Env) -> Array:
    """Return the contents of ``buffer`` by logical shape: a writable view of its storage."""
    return _window(whole_view(buffer), env)


def _real(values: Array, form: NumberForm) -> Array:
    """Return the real numbers that memory has for a tensor of a number form."""
    if form.is_complex:
        values = np.stack((values.real, -values.imag if form.has_bit else values.imag), -1)
    return -values if form is NumberForm.NEGATIVE else values


def _seen(values: Array, form: NumberForm) -> Array:
    """Return the tensor of numbers in memory: over the same memory, unless it has a bit."""
    if not form.is_complex:
        return -values if form.has_bit else values
    seen: Array = values.view(np.result_type(values.dtype, np.complex64))[..., 0]
    return seen.conj() if form.has_bit else seen


def _window(view: View, env: Env) -> Array:
    """Return a view as a strided array over its buffer's storage.

    Raises:
        InternalError: if it reaches outside the storage.
    """
    storage = env.storage[view.buffer.base]
    shape = tuple(eval_scalar(extent, env) for extent in view.shape)
    strides = tuple(eval_scalar(stride, env) for stride in view.strides)
    offset = eval_scalar(view.offset, env)
    if 0 in shape:
        return np.empty(shape, storage.dtype)
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)
    if offset + low < 0 or offset + high >= storage.size:
        raise InternalError(f"{view} reaches outside its storage", stage=STAGE)
    bytes_per_step = tuple(stride * storage.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, bytes_per_step)


def _resolve(argument: Argument, env: Env) -> Any:
    match argument:
        case View():
            return _seen(_window(argument, env), argument.form)
        case OwnTensor():
            return _seen(_window(argument.view, env), argument.view.form)
        case SizeValue():
            return eval_scalar(argument.index, env)
        case Comparison():
            left, right = (eval_scalar(side, env) for side in (argument.left, argument.right))
            return _SIGNS[argument.sign](left, right)
        case Junction():
            parts = [_resolve(part, env) for part in argument.parts]
            return all(parts) if argument.sign == "and" else any(parts)
        case tuple():
            return tuple(_resolve(item, env) for item in argument)
        case _:
            return argument


# -- graphs and schedules ------------------------------------------------------------------------


def interpret_kernel(kernel: Kernel, env: Env) -> None:
    """Interpret one kernel of a schedule in an environment."""
    run_kernel(kernel, env.storage, env.sizes)


def run_graph(
    body: Interpreted,
    inputs: Sequence[Any],
    extern: ExternCall | None = None,
    kernel: KernelCall = interpret_kernel,
) -> list[Any]:
    """Return what a graph returns for these inputs, by its lines, its schedule or host program.

    In a host program a buffer that is freed reads as unwritten memory from then on, and one over
    which another lies as what is written there: freeing or reusing memory too early shows.

    Args:
        inputs: one for each of ``graph.inputs``: arrays by logical shape, ints for sizes. A size
            that is a tensor's extent is read from the tensor too.
        extern: runs the externs; needed if there are any.
        kernel: runs one kernel; it may run the kernel's program or machine code instead.
    Returns:
        One value for each of ``graph.outputs``: arrays (copies), ints for sizes, others as given.
    Raises:
        InternalError: if a step of a host program writes a buffer that has no memory.
    """
    graph = body if isinstance(body, Graph) else body.graph
    env = _bind_inputs(graph, inputs)
    _run_body(body, env, extern, kernel)
    return _collect_outputs(graph, env)


def _run_body(body: Interpreted, env: Env, extern: ExternCall | None, kernel: KernelCall) -> None:
    for statement in _statements(body):
        match statement:
            case Def():
                value = eval_tile(statement.expr, env)
                allocate(statement.buffer, env)
                here = tuple(map(index, statement.axes))
                _write(Store(statement.buffer, here, statement.expr), value, {}, env)
            case Kernel() | ForeachKernel() | NativeRun():
                for member in statement.kernels:
                    _check_memory(member, env)
                    kernel(member, env)
            case Allocation(buffer, over):
                if over is None:
                    allocate(buffer, env)
                else:
                    env.storage[buffer] = env.storage[over]
            case FreeBuffers(buffers):
                for buffer in buffers:
                    _free(buffer, env)
            case RowLoop():
                _run_row_loop(statement, statement.body, env, extern, kernel)
            case HostLoop():
                _run_row_loop(statement.loop, statement.body, env, extern, kernel)
            case _:
                _run_call(statement, env, extern)


def _statements(body: Interpreted) -> Iterator[Line | HostStatement]:
    """Yield the statements of a body, with the allocations that only a host program has itself."""
    if isinstance(body, HostProgram):
        yield from body.statements
        return
    allocated = set(body.graph.inputs if isinstance(body, Schedule) else body.inputs)
    for step in body.steps if isinstance(body, Schedule) else body.nodes:
        if not isinstance(step, Def):
            yield from (Allocation(b) for b in made_by(step) if b not in allocated)
            allocated.update(made_by(step))
        yield step


def _check_memory(step: Step, env: Env) -> None:
    for buffer in step.writes:
        if buffer not in env.storage:
            raise InternalError(f"{buffer} is written, and has no memory", stage=STAGE)


def _free(buffer: Buffer, env: Env) -> None:
    """Drop a buffer's storage, which existing views keep; the buffer reads as unwritten."""
    if not buffer.dtype.is_opaque:  # no kernel reads it
        env.storage[buffer] = np.full_like(env.storage[buffer], fill_value(buffer.dtype))


def _run_row_loop(
    loop: RowLoop, body: Interpreted, env: Env, extern: ExternCall | None, kernel: KernelCall
) -> None:
    """Run the body for each chunk of rows: results go into their rows.

    What an iteration carries is stored in the two buffers of the value in turn, the last in the
    final one.
    """
    _check_memory(loop, env)
    rows, fused = eval_scalar(loop.rows, env), not isinstance(loop.body, Graph)

    def rows_of(buffer: Buffer) -> np.ndarray:
        shape = (eval_scalar(extent, env) for extent in loop.chunks[buffer].shape[1:])
        return from_storage(buffer, env).reshape(rows, *shape)

    for buffer in loop.added:
        from_storage(buffer, env)[...] = 0
    state = [_window(one.initial, env) for one in loop.carried]
    for start in itertools.count() if loop.while_true else range(0, rows, loop.chunk):
        if loop.while_true and not state[0]:
            break
        count, is_other = min(loop.chunk, rows - start), (rows - 1 - start) // loop.chunk % 2
        following = [from_storage((one.final, one.other)[is_other], env) for one in loop.carried]
        sizes = [env.sizes.get(i, count) for i in loop.graph.inputs if isinstance(i, Size)]
        sliced = [_window(view, env)[start : start + count] for view in loop.sliced]
        whole = [_window(view, env) for view in loop.whole]
        added = [from_storage(buffer, env) for buffer in loop.added]
        parts = [rows_of(buffer)[start : start + count] for buffer in loop.placed]
        stored = (*added, *parts, *following[: len(following) * fused])
        inner = _bind_inputs(loop.graph, (*sizes, *sliced, *whole, *state, *stored))
        given = replace(inner, storage=dict(inner.storage))
        _run_body(body, inner, extern, kernel)
        values = iter(_collect_outputs(loop.graph, inner))
        for buffer in loop.results:
            rows_of(buffer)[start : start + count] = next(values)
        for buffer in loop.added:
            from_storage(buffer, env)[...] = from_storage(buffer, given)
        for part, buffer in zip(parts, loop.placed, strict=True):
            part[...] = from_storage(loop.chunks[buffer], given)
        for place, (_, made) in zip(following, loop.states, strict=True):
            place[...] = from_storage(made, given) if fused else next(values)
        state = following
    for one, last in zip(loop.carried, state, strict=True):
        from_storage(one.final, env)[...] = last


def _bind_inputs(graph: Graph, inputs: Sequence[Any]) -> Env:
    sizes: dict[Size, int] = {}
    for item, value in zip(graph.inputs, inputs, strict=True):
        match item:
            case Size():
                _bind_size(sizes, item, int(value))
            case Buffer():
                whole = not item.form.is_complex  # else the array lacks the axis of the parts
                for extent, length in zip(item.shape, np.shape(value), strict=whole):
                    symbol = extent.as_size()
                    if symbol is not None:
                        _bind_size(sizes, symbol, length)
    env = Env(sizes=sizes)
    for item, value in zip(graph.inputs, inputs, strict=True):
        if isinstance(item, Buffer):
            to_storage(item, value, env)
    return env


def _bind_size(sizes: dict[Size, int], size: Size, value: int) -> None:
    if sizes.setdefault(size, value) != value:
        raise InternalError(f"size {size} is both {sizes[size]} and {value}", stage=STAGE)


def _collect_outputs(graph: Graph, env: Env) -> list[Any]:
    values = [_resolve(output, env) for output in graph.outputs]
    return [value.copy() if isinstance(value, np.ndarray) else value for value in values]


def _run_call(node: CallStep, env: Env, extern: ExternCall | None) -> None:
    match node:
        case SizeMinimum():
            env.sizes = {**env.sizes, node.size: min(eval_scalar(a, env) for a in node.size.args)}
        case Constant():
            (values,) = _call(extern, node, (), {})
            to_storage(node.buffer, np.asarray(values), env)
        case Extern():
            _run_extern(node, env, extern)


def _call(
    extern: ExternCall | None,
    node: Extern | Constant,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Sequence[Any]:
    if extern is None:
        raise InternalError(f"nothing runs extern {node.target}", stage=STAGE)
    return extern(node, args, kwargs)


def _run_extern(node: Extern, env: Env, extern: ExternCall | None) -> None:
    args = tuple(_resolve(argument, env) for argument in node.args)
    kwargs = {name: _resolve(argument, env) for name, argument in node.kwargs}
    results = _call(extern, node, args, kwargs)
    for bound in node.bound_sizes:
        value = np.asarray(results[bound.result])
        number = int(value) if bound.axis is None else value.shape[bound.axis]
        env.sizes = {**env.sizes, bound.size: number}
    for buffer, values in zip(node.outputs, results, strict=True):
        if buffer is not None:
            to_storage(buffer, np.asarray(values), env)
            if node.may_alias and _is_view(values, env.storage[buffer], args):
                env.storage[buffer] = values.reshape(-1)


def _is_view(values: Any, storage: Array, args: tuple[Any, ...]) -> bool:
    """Return True if a result aliases an argument in the layout of its own buffer."""
    if not isinstance(values, np.ndarray) or not values.flags.c_contiguous:
        return False
    same = values.dtype == storage.dtype and np.array_equal(values.reshape(-1), storage, True)
    return same and any(isinstance(a, np.ndarray) and np.shares_memory(a, values) for a in args)


# -- kernels -------------------------------------------------------------------------------------


def run_kernel(kernel: Kernel, buffers: dict[Buffer, Array], sizes: Mapping[Size, int]) -> None:
    """Run all stores of a kernel; ``buffers`` is flat storage by buffer, changed in place.

    Buffers that the kernel writes and that have no storage get one.
    """
    _check_aliases(kernel)
    env = Env(sizes=sizes, storage=buffers)
    memo: Memo = {}
    values = [eval_tile(line.expr, env, memo) for line in kernel.stores]
    for line, value in zip(kernel.stores, values, strict=True):
        if line.buffer.base not in buffers:
            allocate(line.buffer, env)
        _write(line, value, memo, env)


def _check_aliases(kernel: Kernel) -> None:
    places = {(line.buffer, line.indices) for line in kernel.stores}
    for load in kernel.loads:
        if load.buffer.base in kernel.writes and (load.buffer, load.indices) not in places:
            raise InternalError(
                f"kernel {kernel.name} reads {load}, which it writes at another index", stage=STAGE
            )


def _write(line: Store, value: Tile, memo: Memo, env: Env) -> None:
    offset = locate(line.buffer, line.indices, env, memo)
    guard = None if line.guard is None else eval_tile(line.guard, env, memo)
    mask = conjunction((guard, ragged_mask(joint_axes((offset, value)), env)))
    check_offsets(offset, mask, env, f"{line.buffer}[{', '.join(map(repr, line.indices))}]")
    store(line.buffer, offset, value, mask, env)
