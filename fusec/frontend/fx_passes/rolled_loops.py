"""Roll up loops of Python that Dynamo unrolled, where each iteration is a step of a recurrence.

A loop over the positions of a sequence, whose states a list collects, is as many operations in
Dynamo's graph as the sequence is long. Worked example::

    h, out = zeros, []                               becomes
    for t in range(T):
        h = torch.exp(a[:, t]) * h + b[:, t]         factors = torch.exp(a[:, 0:T])
        out.append(h)                                y = recurrence(factors, b[:, 0:T], zeros)
    y = torch.stack(out, 1)

A ``stack`` is rolled up if each of its parts follows from the one before by the same steps: it is
multiplied by a value, or a value is added to it, or both in this order; no value depends on a
state. These values of all iterations are one tensor each: slices at neighbouring places are a
longer slice, equal functions of one element are that function of such tensors, and anything else is
stacked. So the factors and terms of iterations are what they were. States may be read by the next
iteration and by the ``stack``, the last one by anything. Graphs have side effects: nothing may be
written while the loop runs.

Other loops stay unrolled, among them those whose states go through a function that is not affine.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import called_name, tensor_of, written_by
from fusec.frontend.fx_passes.dynamo_graph import plain_parts
from fusec.frontend.fx_passes.fx_nodes import called_with
from fusec.frontend.ops import recurrences as _registers_the_operation  # noqa: F401

Operand: TypeAlias = "fx.Node | int | float"

_POINTWISE = frozenset(
    (
        *("abs", "add", "cos", "div", "exp", "expm1", "log", "log1p", "mul", "multiply", "neg"),
        *("reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "square"),
        *("sub", "subtract", "tanh", "truediv"),
    )
)
"""Functions of each element, which may be called for all iterations at once."""
_STEPS = {"add": "add", "mul": "mul", "multiply": "mul", "sub": "sub", "subtract": "sub"}
_ADDED = ("add", "sub", "from")
_ITERATIONS = frozenset((("mul",), *((x,) for x in _ADDED), *(("mul", x) for x in _ADDED)))
"""The steps of iterations that are rolled up. Others would be multiplied out: where a sum cancels,
``h*s - y*s`` has not the digits of ``(h - y) * s``, and ``a*b`` may overflow where h is small."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation on the way from a state to the next.

    Attributes:
        name: add, mul, sub, or "from": the operand minus the value so far.
    """

    name: str
    operand: Operand
    node: fx.Node


@dataclass(frozen=True, slots=True)
class _Loop:
    """The iterations whose states a ``stack`` joins.

    Attributes:
        steps: of each iteration but the first, from the state before.
    """

    stack: fx.Node
    dim: int
    states: tuple[fx.Node, ...]
    steps: tuple[tuple[_Step, ...], ...]


def roll_loops(gm: fx.GraphModule, least: int) -> None:
    """Replace stacked states of unrolled loops of a Dynamo graph by recurrences, in place.

    Assumes: nodes carry ``meta["example_value"]``.

    Args:
        least: the least number of iterations that are rolled up.
    """
    for part in plain_parts(gm):
        stacks = [node for node in part.graph.nodes if called_name(node) == "stack"]
        loops = [found for node in stacks if (found := _find(node, least)) is not None]
        for loop in loops:
            _Roller(part.graph, loop).roll()
        if loops:
            part.recompile()


# -- finding loops ---------------------------------------------------------------------------------


def _find(stack: fx.Node, least: int) -> _Loop | None:
    """Return the loop whose states a ``stack`` joins, or None."""
    states, dim = called_with(_joined, stack) or ((), 0)
    made = tensor_of(stack)
    if len(set(states)) != len(states) or len(states) < least or made is None:
        return None
    if made.device.type != "cpu" or not made.is_floating_point() or not _are_alike(states):
        return None
    follows = _followers(stack.graph, states)
    steps = [_way(state, before, follows) for before, state in itertools.pairwise(states)]
    names = [[step.name for step in found] for found in steps]
    if tuple(names[0]) not in _ITERATIONS or any(found != names[0] for found in names):
        return None
    columns = [[step.operand for step in column] for column in zip(*steps, strict=True)]
    numbers = [column for column in columns if not all(isinstance(x, fx.Node) for x in column)]
    if any(not _same_number(x, column[0]) for column in numbers for x in column):
        return None
    if numbers and made.dtype.itemsize < 4:  # eager multiplies by them in f32
        return None
    loop = _Loop(stack, dim % made.dim(), states, tuple(map(tuple, steps)))
    return loop if _is_closed(loop) else None


def _joined(tensors: Any, dim: int = 0) -> tuple[tuple[fx.Node, ...], int]:
    """Return the arguments of a ``stack``; no tensors where they are not a list of nodes."""
    known = isinstance(tensors, list | tuple) and all(isinstance(x, fx.Node) for x in tensors)
    return (tuple(tensors) if known else (), dim)


def _are_alike(nodes: Sequence[fx.Node]) -> bool:
    """Return True for tensors of one shape, type and device, of known sizes."""
    found = [tensor_of(node) for node in nodes]
    first = found[0]
    if first is None or not all(isinstance(extent, int) for extent in first.shape):
        return False
    return all(
        x is not None and (x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device)
        for x in found
    )


def _followers(graph: fx.Graph, states: tuple[fx.Node, ...]) -> set[fx.Node]:
    """Return the nodes that depend on any of the states, and these."""
    found = set(states)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _way(state: fx.Node, before: fx.Node, follows: set[fx.Node]) -> list[_Step]:
    """Return the steps from one state to the next; none unless each has one operand that varies."""
    steps: list[_Step] = []
    node = state
    while node is not before:
        step = _step(node, follows)
        if step is None:
            return []
        node = step[0]
        steps.append(step[1])
    return steps[::-1]


def _step(node: fx.Node, follows: set[fx.Node]) -> tuple[fx.Node, _Step] | None:
    """Return the operand of a call that depends on states, and the step that the call takes."""
    name = _STEPS.get(called_name(node))
    if name is None or node.kwargs or len(node.args) != 2:
        return None
    varies = [isinstance(x, fx.Node) and x in follows for x in node.args]
    if sum(varies) != 1:
        return None
    varying, operand = node.args if varies[0] else reversed(node.args)
    name = "from" if varies[1] and name == "sub" else name
    made, own = tensor_of(node), tensor_of(operand)
    if isinstance(operand, fx.Node) and (own is None or made is None or own.dtype != made.dtype):
        return None
    if not isinstance(operand, fx.Node | int | float) or isinstance(operand, bool):
        return None
    assert isinstance(varying, fx.Node)
    return varying, _Step(name, operand, node)


def _is_closed(loop: _Loop) -> bool:
    """Return True if only iterations and the ``stack`` read states, and nothing else happens.

    The last state may be read behind the ``stack``. A call without a result may switch a mode.
    """
    inside = {step.node for steps in loop.steps for step in steps} | {loop.stack}
    *others, last = loop.states
    if any(user not in inside for node in (*inside, *others) for user in node.users
           if node not in (last, loop.stack)):  # fmt: skip
        return False
    for node in loop.stack.graph.nodes:
        if node is loop.stack:
            return True
        silent = node.op.startswith("call") and not node.users and tensor_of(node) is None
        early = last in node.all_input_nodes
        if silent or early or any(written is not None for written in written_by(node)):
            return False
    return True


# -- rolling them up -------------------------------------------------------------------------------


class _Roller:
    """Writes the recurrence of a loop.

    Attributes:
        rank: of a state.
        used: the nodes of iterations that tensors of all iterations stand for.
    """

    def __init__(self, graph: fx.Graph, loop: _Loop) -> None:
        self.graph, self.loop = graph, loop
        made = tensor_of(loop.states[0])
        assert made is not None
        self.shape = tuple(made.shape)
        self.known: dict[tuple[Any, ...], fx.Node] = {}
        self.used: dict[fx.Node, None] = {}

    def roll(self) -> None:
        """Replace the ``stack``, and the last state where others read it."""
        loop, first = self.loop, self.loop.states[0]
        start, steps = self._start(), loop.steps
        if start is not None:
            steps = (start[1], *steps)
        with self.graph.inserting_before(loop.stack):
            coefficients = zip(self._coefficients(steps), (1.0, 0.0), strict=True)
            found = [self._of_all(*each, len(steps)) for each in coefficients]
            if start is None:  # the first factor is not read
                row = self._call(torch.unsqueeze, first, 0)
                found = [self._call(torch.cat, [row, x], 0) for x in found]
            moved = [self._call(torch.movedim, x, 0, loop.dim) for x in found]
            before = None if start is None else start[0]
            target = torch.ops.fusec.recurrence.default
            made = self._call(target, *moved, before, loop.dim, False)
        made.meta = {k: v for k, v in loop.stack.meta.items() if k != "example_value"}
        loop.stack.replace_all_uses_with(made)
        self._replace_last(made)
        self._erase()

    def _start(self) -> tuple[fx.Node, tuple[_Step, ...]] | None:
        """Return what the first iteration begins with, and its steps; None if they are others."""
        node: Any = self.loop.states[0]
        found: list[_Step] = []
        for like in reversed(self.loop.steps[0]):
            if not isinstance(node, fx.Node) or not _is_same_call(node, like.node):
                return None
            place = like.node.args.index(like.operand)
            operand: Any = node.args[place]
            if not _fit(operand, like.operand):
                return None
            found.append(_Step(like.name, operand, node))
            node = node.args[1 - place]
        if not _fit(node, self.loop.states[0]):
            return None
        self.used.update(dict.fromkeys(step.node for step in found))
        return node, tuple(reversed(found))

    def _coefficients(
        self, steps: tuple[tuple[_Step, ...], ...]
    ) -> tuple[Operand | None, Operand | None]:
        """Return factor and term of all iterations; None for a factor of 1, a term of 0."""
        factor: Operand | None = None
        term: Operand | None = None
        for column in zip(*steps, strict=True):
            value = self._family(tuple(step.operand for step in column), len(self.shape))
            match column[0].name:
                case "add":
                    term = value
                case "sub":
                    term = self._negative(value)
                case "from":
                    term, factor = value, self._negative(1.0 if factor is None else factor)
                case _:
                    factor = value
        return factor, term

    def _negative(self, value: Operand) -> Operand:
        return self._call(operator.neg, value) if isinstance(value, fx.Node) else -value

    def _of_all(self, value: Operand | None, default: float, count: int) -> fx.Node:
        """Return a coefficient as a tensor with a row for each iteration."""
        if not isinstance(value, fx.Node):
            number = default if value is None else value
            value = self._call("new_full", self.loop.states[0], (), number)
        return self._call("expand", value, (count, *self.shape))

    # -- tensors of all iterations -----------------------------------------------------------------

    def _family(self, items: tuple[Any, ...], rank: int) -> Any:
        """Return values of iterations as one; a tensor has a row for each, and ``rank`` axes more.

        A value that is the same in all is itself.
        """
        if all(item is items[0] or _same_number(item, items[0]) for item in items):
            return items[0]
        key = (items, rank)
        if key not in self.known:
            own = tensor_of(items[0])
            assert own is not None
            made = self._slices(items) or self._calls(items)
            made = made or self._call(torch.stack, list(items), 0)
            for _ in range(rank - own.dim()):
                made = self._call(torch.unsqueeze, made, 1)
            self.known[key] = made
            self.used.update(dict.fromkeys(items))
        return self.known[key]

    def _slices(self, items: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return slices at neighbouring places of one tensor as one slice, or None."""
        places = [place for place in map(_place, items) if place is not None]
        if len(places) < len(items) or any(p.rest != places[0].rest for p in places):
            return None
        first, at = places[0], [place.at for place in places]
        step = at[1] - at[0]
        if step not in (1, -1) or any(b - a != step for a, b in itertools.pairwise(at)):
            return None
        index = (*first.before, slice(min(at), max(at) + 1), *first.behind)
        made = self._call(operator.getitem, first.source, index)
        axis = -1 - len(first.behind) if Ellipsis in first.before else len(first.before)
        made = self._call(torch.movedim, made, axis, 0) if axis else made
        return made if step == 1 else self._call(torch.flip, made, [0])

    def _calls(self, items: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return equal functions of each element as one call, or None."""
        first = items[0]
        own = tensor_of(first)
        alike = own is not None and called_name(first) in _POINTWISE and not first.kwargs
        if own is None or not alike or not all(_is_same_call(item, first) for item in items):
            return None
        columns = list(zip(*(item.args for item in items), strict=True))
        if not all(_fit(a, column[0]) for column in columns for a in column):
            return None
        arguments = tuple(self._family(column, own.dim()) for column in columns)
        return self.graph.create_node(first.op, first.target, arguments)

    # -- writing -----------------------------------------------------------------------------------

    def _call(self, target: Any, *args: Any) -> fx.Node:
        if isinstance(target, str):
            return self.graph.call_method(target, args)
        return self.graph.call_function(target, args)

    def _replace_last(self, made: fx.Node) -> None:
        """Let what reads the last state read the recurrence's last point."""
        last = self.loop.states[-1]
        readers = [user for user in last.users if user is not self.loop.stack]
        if not readers:
            return
        with self.graph.inserting_after(made):
            point = self.graph.call_function(torch.select, (made, self.loop.dim, -1))
        with self.graph.inserting_after(point):
            copy = self.graph.call_method("clone", (point,))
        for reader in readers:
            reader.replace_input_with(last, copy)

    def _erase(self) -> None:
        """Erase the iterations, and what tensors of all of them stand for."""
        inside = {step.node for steps in self.loop.steps for step in steps} | {self.loop.stack}
        for node in reversed(list(self.graph.nodes)):
            if (
                (node in inside or node in self.used)
                and not node.users
                and node.op != "placeholder"
            ):
                self.graph.erase_node(node)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place ``t`` of ``source[before, t, behind]``, where all but t are whole axes."""

    source: fx.Node
    before: tuple[Any, ...]
    at: int
    behind: tuple[Any, ...]

    @property
    def rest(self) -> tuple[Any, ...]:
        return (self.source, len(self.before), Ellipsis in self.before, self.behind)


def _place(node: fx.Node) -> _Place | None:
    """Return the place of a slice that one integer selects, which is not negative, or None."""
    if node.target is not operator.getitem:
        return None
    source, index = node.args
    if not isinstance(source, fx.Node):
        return None
    if called_name(source) == "unbind" and isinstance(index, int):
        found: tuple[Any, int] = called_with(_unbound, source) or (None, -1)
        tensor, dim = found
        return _Place(tensor, (slice(None),) * dim, index, ()) if dim >= 0 <= index else None
    items = index if isinstance(index, tuple) else (index,)
    places = [k for k, item in enumerate(items) if type(item) is int]
    if tensor_of(source) is None or len(places) != 1:
        return None
    (k,) = places
    before, at, behind = items[:k], items[k], items[k + 1 :]
    plain = all(map(_is_whole, before)) or before == (Ellipsis,)
    if not plain or not all(x is None or _is_whole(x) for x in behind):
        return None
    return _Place(source, before, at, behind) if isinstance(at, int) and at >= 0 else None


def _unbound(input: Any, dim: int = 0) -> tuple[Any, int]:
    return input, dim


def _is_same_call(a: fx.Node, b: fx.Node) -> bool:
    """Return True for calls of one function, by position alone."""
    return (a.op, a.target, len(a.args)) == (b.op, b.target, len(b.args)) and not a.kwargs


def _is_whole(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _same_number(a: Any, b: Any) -> bool:
    return not isinstance(a, fx.Node) and type(a) is type(b) and bool(a == b)


def _fit(a: Any, b: Any) -> bool:
    """Return True for equal numbers, and for tensors of one shape and type."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return _are_alike((a, b))
    return _same_number(a, b)
