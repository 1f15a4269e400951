"""Turn a ``torch.while_loop`` that counts to a known number into ``torch.scan``.

Such a loop carries a number that each step adds to, and compares it with a constant or a size. So
it has as many steps as a range has numbers, and these are rows of a tensor, of which a scan takes
one in each step: it reads no condition, and has a gradient. Worked example::

    i, x = while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x.sin() * i), (0, x))

    (x,) = scan(lambda x, i: (x.sin() * i,), [x], [torch.arange(0, 5, 1)]);  i = 5

Others stay as they are: a loop that may have no step, since a scan has at least one; one whose
numbers may wrap; one with a graph inside; one that computes floats of a number of Python, which
are of f64, and of f32 where that is a tensor; and those that torch's scan does not differentiate.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusec.frontend.aliasing.overlap import called_name, memory_of, tensor_of
from fusec.frontend.fx_passes.columns import StaysError, closure, has_elements
from fusec.frontend.fx_passes.dynamo_graph import plain_parts
from fusec.frontend.fx_passes.loop_bodies import (
    contiguous,
    has_gradient,
    is_contiguous,
    keep_layout,
)
from fusec.frontend.fx_passes.rolled_columns import RolledColumns
from fusec.torch_interior import EXAMPLE, FakeTensor

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
"""Comparison of a counter -> the same with its operands exchanged."""
_CONSTANTS = ("tensor", "zeros", "ones", "full", "scalar_tensor")


def scan_counted_loops(gm: fx.GraphModule) -> None:
    """Replace loops of a known number of steps by scans, in place.

    Assumes: nodes carry ``meta["example_value"]``.
    """
    operation = torch.ops.higher_order.while_loop
    loops = gm.graph.find_nodes(op="call_function", target=operation)
    for node in loops if gm in plain_parts(gm) else ():
        condition, body = (_part(gm, name) for name in node.args[:2])
        carried: Any = node.args[2]
        for place, start in enumerate(carried):
            operand, sign, behind = _compared(condition, place)
            numbers = _start(start), _value(operand), behind, _step(body, place)
            if numbers[3] * sign <= 0 or not _has_steps(*numbers) or node.kwargs:
                continue
            if _may_wrap(start, *numbers):
                continue
            if not _is_scan(node, body, place):
                continue
            with gm.graph.inserting_before(node):
                stop = _outside(operand, condition, node)
            known = (numbers[0], stop, *numbers[2:])
            node.args = (node.args[1], place, known, *node.args[2:])
            node.target = counted
            break
    if loops:
        gm.recompile()


def _part(gm: fx.GraphModule, name: Any) -> fx.GraphModule:
    found: fx.GraphModule = operator.attrgetter(name.target)(gm)
    return found


def _value(item: Any) -> Any:
    return item.meta.get(EXAMPLE) if isinstance(item, fx.Node) else item


# -- the counter -----------------------------------------------------------------------------------


def _compared(condition: fx.GraphModule, place: int) -> tuple[Any, int, int]:
    """Return what a carried number is compared with, the sign of its steps, and how far behind.

    Where it is not compared, the sign is 0.
    """
    counter = condition.graph.find_nodes(op="placeholder")[place]
    test: Any = condition.graph.output_node().args[0]
    if not isinstance(test, fx.Node) or len(test.args) != 2 or test.kwargs:
        return None, 0, 0
    name, (one, other) = called_name(test), test.args
    if one is not counter:
        name, one, other = _MIRRORED.get(name, ""), other, one
    if one is not counter or name not in _MIRRORED:
        return None, 0, 0
    sign = 1 if name in ("lt", "le") else -1
    return other, sign, sign if name in ("le", "ge") else 0


def _start(value: Any) -> Any:
    """Return the number, or the size, from which a loop counts; None if it is not known."""
    made = tensor_of(value)
    if made is None:
        return value if isinstance(_value(value), int | torch.SymInt) else None
    constant = called_name(value) in _CONSTANTS and not value.all_input_nodes
    alone = len(value.users) == 1 and not made.dim()
    if not constant or not alone or made.dtype not in (torch.int32, torch.int64):
        return None
    how = {k: v for k, v in value.kwargs.items() if k != "device"}
    return int(value.target(*value.args, **how))


def _step(body: fx.GraphModule, place: int) -> int:
    """Return the constant that each step adds to a carried number; 0 if it is none."""
    counter = body.graph.find_nodes(op="placeholder")[place]
    returned: Any = body.graph.output_node().args[0]
    made = returned[place]
    name = called_name(made) if isinstance(made, fx.Node) else ""
    match (name, *(made.args if name and not made.kwargs else ())):
        case ("add", one, int(step)) | ("add", int(step), one) if one is counter:
            return step
        case ("sub", one, int(step)) if one is counter:
            return -step
    return 0


def _has_steps(start: Any, stop: Any, behind: int, step: int) -> bool:
    """Return True for the numbers of a loop that is known to have a step."""
    start = _value(start)
    if not all(isinstance(x, int | torch.SymInt) and type(x) is not bool for x in (start, stop)):
        return False
    return statically_known_true((stop + behind - start) * (1 if step > 0 else -1) >= 1)


def _may_wrap(counter: Any, start: Any, stop: Any, behind: int, step: int) -> bool:
    """Return True unless all numbers of a loop, the one that ends it included, are of its type.

    A size is far below the limits of 64 bits.
    """
    made = tensor_of(counter)
    limits = torch.iinfo(torch.int64 if made is None else made.dtype)
    start, end = _value(start), stop + behind + step
    if isinstance(start, int) and isinstance(end, int):
        least, most = min(start, end), max(start, end)
        return least < limits.min or most > limits.max or most - least > limits.max
    return limits.bits < 64 or abs(step) > torch.iinfo(torch.int32).max


# -- the scan --------------------------------------------------------------------------------------


def _is_scan(node: fx.Node, body: fx.GraphModule, place: int) -> bool:
    """Return True if torch's scan takes the steps of a loop.

    Where torch traced a number, a tensor that holds it may have another type: a result is then no
    longer what is carried.
    """
    carried, others = ([*map(_value, given)] for given in node.args[2:4])  # type: ignore[arg-type]
    states = [*carried[:place], *carried[place + 1 :]]
    floats = (isinstance(_value(n), float | torch.SymFloat) for n in body.graph.nodes)
    if any(floats) or any(isinstance(part, fx.GraphModule) for part in body.children()):
        return False
    tensors = [x for x in (*states, *others) if isinstance(x, torch.Tensor)]
    made = [x for x in map(tensor_of, body.graph.nodes) if x is not None]
    memory = {memory_of(x) for x in tensors}
    if not states or not all(isinstance(x, torch.Tensor) and is_contiguous(x) for x in states):
        return False
    if len(memory) < len(tensors) or not has_gradient(states, tensors, made):
        return False
    mode = next((x.fake_mode for x in states if isinstance(x, FakeTensor)), None)
    if mode is None:
        return False
    columns = RolledColumns(node.graph, mode, 0, scans=True)

    def once(*given: Any) -> Any:
        counter = torch.zeros((), dtype=torch.int64)
        return body(*given[:place], counter, *given[place:])

    try:
        found = list(columns.traced(once, (*states, *others)))
    except StaysError:
        return False
    del found[place]
    return all(map(has_elements, found, states)) and all(map(is_contiguous, found))


def _outside(operand: Any, condition: fx.GraphModule, node: fx.Node) -> Any:
    """Return what a counter is compared with, from outside of the condition.

    It is computed from sizes alone.
    """
    inside = condition.graph.find_nodes(op="placeholder")
    given: tuple[Any, ...] = (*node.args[2], *node.args[3])  # type: ignore[misc]
    copies: dict[Any, Any] = dict(zip(inside, given, strict=True))
    needed = closure([operand]) if isinstance(operand, fx.Node) else ()
    for inner in condition.graph.nodes:
        if inner in needed and inner not in copies:
            copies[inner] = node.graph.node_copy(inner, copies.__getitem__)
    return copies.get(operand, operand)


# -- functions that graphs call --------------------------------------------------------------------


def counted(
    body: Any, place: int, numbers: Sequence[Any], carried: Sequence[Any], others: Sequence[Any]
) -> tuple[Any, ...]:
    """Return what a loop carries at its end.

    Args:
        body: computes what is carried from it, and others.
        place: the counter's among what is carried.
        numbers: where the counter starts, where it stops, how far behind that, and its step.
    """
    start, stop, behind, step = numbers
    stop, states = stop + behind, [*carried[:place], *carried[place + 1 :]]
    first, most = carried[place], len(carried) - 1
    kind = first.dtype if isinstance(first, torch.Tensor) else torch.int64
    rows = torch.arange(start, stop, step, dtype=kind, device=states[0].device)

    def once(*given: Any) -> tuple[Any, ...]:
        before = list(map(keep_layout, given[:most]))
        before.insert(place, given[most])
        made = list(body(*before, *given[most + 1 :]))
        del made[place]
        return tuple(map(contiguous, made))

    made = list(torch.ops.higher_order.scan(once, states, [rows], tuple(others)))
    last = start + -(-(stop - start) // step) * step
    made.insert(place, torch.full_like(first, last) if isinstance(first, torch.Tensor) else last)
    return tuple(made)
