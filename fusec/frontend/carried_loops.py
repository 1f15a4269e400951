"""Lower ``torch.scan`` and ``torch.while_loop``, which carry state, to loops around a graph.

``scan(f, init, xs)`` calls ``carry, y = f(carry, x[t])`` for each t; it returns the last carry, and
each y as a row of a tensor. So the rows of a ``RowLoop`` are its steps: the loop takes one row of
each x at a time, the tensors that f captures as a whole, and carries the state. A map over rows is
a scan that carries nothing. The gradient of a scan is a scan as well, of operands that torch has
flipped. A ``while_loop`` has no rows: what its condition says of the state is carried, too, and
read before each step. What cannot be lowered stays torch's operation, around a compiled body.

Worked example, ``scan(lambda h, x: ((x + h).tanh(), h * 2), h0, xs)`` with xs[512, 64]::

    rows scan -> scan_1, scan_0, scan_0_other    1 of 512 at a time
      sliced xs_v1: f32[1, 64] of xs
      carried h: f32[64] from h0, then next into scan_0 and scan_0_other in turn
      graph scan(xs_v1: f32[1, 64], h: f32[64])
        next[i] = tanh(xs_v1[0, i] + h[i])
        y[0, i] = h[i] * 2
        return y, next

Assumes, as torch requires: the body neither writes its arguments nor returns what aliases them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusec.errors import Unsupported
from fusec.frontend.call import GraphBuilder
from fusec.frontend.forms import form_of
from fusec.frontend.fx_passes.fx_nodes import tensor_of
from fusec.frontend.operands import Operands
from fusec.frontend.origin import origin_of
from fusec.frontend.shapes import TensorType
from fusec.frontend.stand_ins import StandIns
from fusec.frontend.value import ZERO, Value, make_axes, whole
from fusec.ir.definition import by_name, sizes_in
from fusec.ir.dtype import BOOL, NumberForm
from fusec.ir.expr import Buffer, Load
from fusec.ir.graph import (
    Argument,
    Carried,
    Def,
    Extern,
    Graph,
    Line,
    NodeConstant,
    RowLoop,
    View,
    whole_view,
)
from fusec.ir.index import index
from fusec.ir.strides import contiguous_strides

_CONDITION = TensorType((), (), BOOL, torch.device("cpu"))
Lower: TypeAlias = Callable[[fx.GraphModule, GraphBuilder, Iterable[Any]], tuple[Any, ...]]
"""Lowers the calls of a subgraph, given its arguments; returns its results."""


def is_loop(node: fx.Node) -> bool:
    """Return True for the operations of loops that are lowered."""
    operations = torch.ops.higher_order
    return node.target in (operations.scan, operations.map_impl, operations.while_loop)


def lower_loop(
    node: fx.Node, parts: Sequence[fx.GraphModule], operands: Operands, lower: Lower
) -> tuple[Value, ...]:
    """Append a loop; return the last values of what it carries, then all rows.

    Args:
        parts: the loop's body, behind its condition if it has one.
    Raises:
        Unsupported: naming what the loop has that cannot be lowered.
    """
    *conditions, part = parts
    init, xs, captured = _groups(node, bool(conditions))
    lines, count = operands.lines, len(init)
    whole_kinds = [_type_of(operands, value) for value in node.meta["val"]]
    if any(k.strides != contiguous_strides(k.shape) for k in whole_kinds[count:]):
        raise Unsupported("a loop whose rows are not stacked")
    kinds = (*whole_kinds[:count], *map(_row, whole_kinds[count:]))
    body = replace(lines, nodes=[], stand_ins=StandIns())

    def taken(one: fx.Node) -> Buffer:
        return body.buffer(one.name, _type_of(operands, one.meta["val"]))

    carried = [body.buffer(one.name, kind) for one, kind in zip(init, kinds, strict=False)]
    sliced = [body.buffer(x.name, _row(_type_of(operands, x.meta["val"]))) for x in xs]
    kept = {one: taken(one) for one in dict.fromkeys(captured) if tensor_of(one) is not None}
    others = [whole(kept[n]) if n in kept else operands.for_lowering(n) for n in captured]
    results = lower(part, body, (*map(whole, carried), *map(_only_row, sliced), *others))
    made = _all_stored(body, node, results, kinds)
    buffers = [lines.buffer(f"{node.name}_{k}", kind) for k, kind in enumerate(whole_kinds)]
    states = [
        Carried(_start(operands, one, kind), final, lines.buffer(f"{final.name}_other", kind))
        for one, kind, final in zip(init, kinds, buffers, strict=False)
    ]
    for condition in conditions:  # before the first iteration, and at the end of each
        given = map(operands.for_lowering, (*init, *captured))
        first = _told(node, condition, lines, given, lower)
        made.insert(0, _told(node, condition, body, (*map(whole, made), *others), lower))
        pair = (
            lines.buffer(f"{node.name}_{k}", _CONDITION) for k in ("proceeds", "proceeds_other")
        )
        states.insert(0, Carried(whole_view(first), *pair))
        carried.insert(0, body.buffer("proceeds", _CONDITION))
    inputs, count = (*sliced, *kept.values(), *carried), len(carried)
    lines.nodes.append(
        RowLoop(
            lines.names.new(node.name),
            lines.sizes.index(xs[0].meta["val"].shape[0] if xs else 1),
            1,
            index(1),
            _graph(node.name, body.nodes, inputs, (*made[count:], *made[:count])),
            tuple(map(operands.window, xs)),
            tuple(map(operands.window, kept)),
            tuple(buffers[len(init) :]),
            added=(),
            carried=tuple(states),
            while_true=bool(conditions),
        )
    )
    return tuple(map(whole, buffers))


def _groups(node: fx.Node, has_condition: bool) -> list[list[Any]]:
    """Return a loop's carried values, the tensors it takes rows of, and those it takes whole."""
    groups = [list(group) for group in node.args[1 + has_condition :]]  # type: ignore[arg-type]
    if node.kwargs:
        raise Unsupported("a loop that writes its arguments")
    if has_condition:
        return [groups[0], [], groups[1]]
    xs = groups[-2]
    if not xs or free_unbacked_symbols(xs[0].meta["val"].shape[:1]):
        raise Unsupported("a loop whose length depends on data")
    return [[], *groups][-3:]


def _told(
    node: fx.Node,
    condition: fx.GraphModule,
    lines: GraphBuilder,
    given: Iterable[Any],
    lower: Lower,
) -> Buffer:
    """Define the buffer of a loop's condition at given values."""
    apart = replace(lines, nodes=[])
    results = lower(condition, apart, given)
    (told,) = _all_stored(apart, node, results, (_CONDITION,))
    lines.nodes += [_callable_anywhere(line, f"{node.name}.{told.name}") for line in apart.nodes]
    return told


def _type_of(operands: Operands, traced: Any) -> TensorType:
    """Return the type of a tensor that a loop's kernels read or store."""
    if not isinstance(traced, torch.Tensor) or form_of(traced) is not NumberForm.PLAIN:
        raise Unsupported("a loop over other things than real tensors")
    kind = operands.lines.sizes.tensor(traced)
    if kind.is_opaque or kind.device != operands.device:
        raise Unsupported("a loop over tensors that no kernel reads")
    if ZERO in kind.shape:
        raise Unsupported("an empty tensor")
    return kind


def _row(kind: TensorType) -> TensorType:
    return replace(kind, shape=(index(1), *kind.shape[1:]))


def _only_row(buffer: Buffer) -> Value:
    """Return the tensor that a buffer of one row has in it."""
    axes = make_axes(buffer.shape[1:])
    place = (ZERO, *map(index, axes))
    return Value(buffer.shape[1:], buffer.dtype, axes, Load(buffer, place, None))


def _all_stored(
    body: GraphBuilder, node: fx.Node, results: Sequence[Any], kinds: Sequence[TensorType]
) -> list[Buffer]:
    if len(results) != len(kinds):
        raise Unsupported("a loop that returns other things than tensors")
    return [_stored(body, node, *each) for each in zip(results, kinds, strict=True)]


def _stored(body: GraphBuilder, node: fx.Node, value: Any, kind: TensorType) -> Buffer:
    """Define the buffer of one result of a body: what is carried, or a row of a result."""
    row = len(kind.shape) - len(value.shape) if isinstance(value, Value) else -1
    if row not in (0, 1) or kind.shape[row:] != value.shape or kind.overlaps:
        raise Unsupported("a loop whose body returns other things than tensors of known strides")
    buffer = body.buffer(f"{node.name}_next" if row == 0 else f"{node.name}_row", kind)
    body.define(buffer, lambda at: value.at(at[row:]), origin_of(node))
    return buffer


def _graph(
    name: str, lines: Iterable[Line], inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]
) -> Graph:
    """Return the graph of a body.

    Raises:
        Unsupported: if it has calls that only its FX graph can make, or that do more than compute.
    """
    nodes = tuple(_callable_anywhere(line, name) for line in lines)
    sizes = sizes_in(i for b in (*inputs, *outputs) for i in (*b.shape, *b.strides))
    sizes = sizes.union(*(line.sizes for line in nodes))
    return Graph(name, (*by_name(sizes), *inputs), nodes, tuple(map(whole_view, outputs)))


def _callable_anywhere(line: Line, loop: str) -> Line:
    """Return a line of a body, named apart from the calls of the graph around it."""
    match line:
        case Def() | RowLoop():
            return line
        case Extern():
            pure = not line.impure and not line.bound_sizes and line.target.startswith("aten.")
            if pure and not any(map(_is_of_node, line.arguments)):
                return replace(line, node=f"{loop}.{line.node}")
            raise Unsupported(f"a loop around {line.target}: {line.reason}")
        case _:
            raise Unsupported("a loop whose body holds a tensor")


def _is_of_node(argument: Argument) -> bool:
    """Return True for an argument that the FX graph alone has."""
    if isinstance(argument, tuple):
        return any(map(_is_of_node, argument))
    return isinstance(argument, NodeConstant)


def _start(operands: Operands, node: fx.Node, kind: TensorType) -> View:
    """Return the initial value of what a loop carries, in the layout of the later ones."""
    own = operands.lines.sizes.tensor(node.meta["val"])
    if (own.shape, own.strides) == (kind.shape, kind.strides):
        return operands.window(node)
    value = operands.for_lowering(node)
    if not isinstance(value, Value) or value.shape != kind.shape:
        raise Unsupported("a loop over other things than real tensors")
    buffer = operands.lines.buffer(f"{node.name}_start", kind)
    operands.lines.define(buffer, value.at, origin_of(node))
    return whole_view(buffer)
