"""Roll up loops of Python that Dynamo unrolled, as one body with an axis more.

A loop over the positions of a sequence is as many operations in Dynamo's graph as the sequence is
long. Where iterations are equal but for the places that they read, all of them are one tensor each,
and the states, which follow one from another, are a recurrence or a scan. Worked example, Mamba's
scan::

    h, ys = zeros, []                               becomes
    for t in range(T):
        h = a[:, t] * h + b[:, t]                   h = recurrence(a.movedim(1, 0), b..., zeros)
        ys.append(h @ c[:, t])                      y = vmap(matmul)(h, c.movedim(1, 0))
    y = torch.stack(ys, 1)                          y = y.movedim(0, 1).clone()

Loops are found from what collects their values: a ``stack`` or ``cat`` of these, or writes to all
places along an axis of a new tensor. ``iterations.py`` finds what such values have in common.
Rolled forms are computed where values are collected. So nothing may be written, and no mode may
change, between the first iteration and there. What reads a state behind the loop reads a row of
all states.

Loops stay unrolled whose values follow from no state, and those whose iterations differ.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import called_name, tensor_of
from fusec.frontend.fx_passes.dynamo_graph import plain_parts
from fusec.frontend.fx_passes.fx_nodes import called_with, hint_of
from fusec.frontend.fx_passes.iterated_calls import (
    Column,
    StaysError,
    has_shape,
    has_strides,
    writes,
)
from fusec.frontend.fx_passes.iterations import Iterations, RolledLoop
from fusec.frontend.fx_passes.loop_bodies import contiguous, without_gradient
from fusec.frontend.fx_passes.subscripts import Slices, Subscript, is_plain, joined
from fusec.torch_interior import EXAMPLE, FakeTensor, FakeTensorMode

_NEW = ("zeros", "empty", "ones", "full")
"""Functions that make a tensor in memory of its own; also ``new_*`` and ``*_like``."""


class _UnfinishedError(Exception):
    """Some states would have to be computed one by one beside their rolled form."""

    def __init__(self, loop: RolledLoop) -> None:
        super().__init__(loop)
        self.loop = loop


@dataclass(frozen=True, slots=True, eq=False)
class _Collected:
    """Where the values of iterations are collected.

    Attributes:
        node: a ``stack`` or ``cat`` of them, or the last of the calls that write them.
        dim: the axis along which they lie.
        joined: whether each has this axis itself.
        places: where ``writes`` write them to a new tensor; None if ``node`` is their result.
    """

    node: fx.Node
    column: Column
    dim: int
    joined: bool = False
    places: Slices | None = None
    writes: tuple[fx.Node, ...] = ()


def roll_loops(gm: fx.GraphModule, least: int) -> None:
    """Replace unrolled loops of a Dynamo graph by recurrences and scans, in place.

    Assumes: nodes carry ``meta["example_value"]``.

    Args:
        least: the least number of iterations that are rolled up.
    """
    for part in [*plain_parts(gm)]:
        results = [found for found in _results(part.graph) if len(found.column) >= least]
        traced = [tensor_of(node) for node in part.graph.nodes]
        mode = next((x.fake_mode for x in traced if isinstance(x, FakeTensor)), None)
        if results and mode is not None and _Loops(part, mode, least, part is gm).roll(results):
            part.recompile()


# -- results ---------------------------------------------------------------------------------------


def _results(graph: fx.Graph) -> list[_Collected]:
    """Return what collects values in a graph, in its order."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    found = [*filter(None, map(_joined_values, graph.nodes))]
    for base, calls in _filled(graph).items():
        places = joined([Subscript(base, _items(call.args[1])) for call in calls])
        if places is not None:
            column = tuple(call.args[2] for call in calls)
            whole = places.width is not None
            found.append(_Collected(calls[-1], column, places.axis, whole, places, tuple(calls)))
    return sorted(found, key=lambda results: order[results.node])


def _joined_values(node: fx.Node) -> _Collected | None:
    """Return the values that a ``stack`` or ``cat`` joins."""
    name, made = called_name(node), tensor_of(node)
    if name not in ("stack", "cat", "concat") or made is None:
        return None
    parts, dim = called_with(_parts, node) or ((), 0)
    known = all(isinstance(part, fx.Node) for part in parts) and type(dim) is int
    return _Collected(node, tuple(parts), dim % made.dim(), name != "stack") if known else None


def _parts(tensors: Any, dim: int = 0) -> tuple[Any, int]:
    return (tensors if isinstance(tensors, list | tuple) else (), dim)


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _filled(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return new tensors, and the calls that write parts of them before they are read."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        name = called_name(node)
        is_new = name in _NEW or name.startswith("new_") or name.endswith("_like")
        if not is_new or tensor_of(node) is None or node.kwargs.get("out") is not None:
            continue
        for user in sorted(node.users, key=order.__getitem__):
            if user.target is not operator.setitem or user.args[0] is not node:
                break
            if node in user.args[1:] or not all(map(is_plain, _items(user.args[1]))):
                break
            found.setdefault(node, []).append(user)
    return found


# -- loops -----------------------------------------------------------------------------------------


class _Loops:
    """The loops of a graph.

    Rolled forms are written beside the loops, then what nothing reads any more is erased.

    Attributes:
        effects: the places of calls over which nothing may be moved.
        rolled: results -> what is read in their place, or the call that writes them.
        rows: member of states -> the row of their rolled form that is read in its place.
        moved: what reads a state before its rolled form is known -> the loop.
    """

    def __init__(self, part: fx.GraphModule, mode: FakeTensorMode, least: int, scans: bool) -> None:
        self.part, self.graph, self.least = part, part.graph, least
        self.nodes = list(part.graph.nodes)
        self.iterations = Iterations(part.graph, mode, scans)
        self.order = self.iterations.order
        own = {call for calls in _filled(part.graph).values() for call in calls}
        self.effects = [self.order[n] for n in self.nodes if writes(n) and n not in own]
        self.rolled: dict[_Collected, fx.Node] = {}
        self.rows: dict[fx.Node, fx.Node] = {}
        self.moved: dict[fx.Node, RolledLoop] = {}
        self.active: list[RolledLoop] = []

    def roll(self, results: list[_Collected]) -> bool:
        """Return True if a loop was rolled up."""
        for found in results:
            with contextlib.suppress(StaysError):
                self.rolled[found] = self._write(found)
        live: set[fx.Node] = set()
        while self.rolled:
            try:
                live = self._live()
                break
            except _UnfinishedError as unfinished:
                self.moved.clear()
                loop = unfinished.loop.node
                self.rolled = {
                    r: made for r, made in self.rolled.items() if loop not in _behind(made)
                }
        self._replace(live)
        self._write_bodies()
        return bool(self.rolled)

    # -- writing results ---------------------------------------------------------------------------

    def _write(self, results: _Collected) -> fx.Node:
        """Return the collected values of all iterations, or the call that writes them.

        Raises:
            StaysError: if they follow from no recurrence, or from what changes in between.
        """
        iterations, dim = self.iterations, results.dim
        end, call = self.order[results.node], iterations.call
        with iterations.before(results.node):
            found = iterations.roll(results.column)
            if not found.recurs or any(found.since < place < end for place in self.effects):
                raise StaysError(results)
            made, places = found.node, results.places
            made = call(torch.flip, made, [0]) if places and places.turned else made
            made = call(torch.movedim, made, 0, dim) if dim else made
            made = call(torch.flatten, made, dim, dim + 1) if results.joined else made
            if places is None:
                return self._laid_out(made, results.node)
            part = call(operator.getitem, places.source, places.index)
            if not has_shape(made.meta[EXAMPLE], part.meta[EXAMPLE].shape):
                raise StaysError(results)
            how = (places.source, places.index, made)
            iterations.made.append(self.graph.call_function(operator.setitem, how))
            return iterations.made[-1]

    def _laid_out(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Return a tensor in memory of its own, with the strides of another one.

        Raises:
            StaysError: if its elements lie in no order of its axes.
        """
        call, wanted = self.iterations.call, tensor_of(like)
        assert wanted is not None
        strides: tuple[Any, ...] = wanted.stride()
        order = sorted(range(wanted.dim()), key=lambda axis: -hint_of(strides[axis]))
        plain = order == [*range(wanted.dim())]
        made = node if plain else call(torch.permute, node, order)
        made = call(contiguous, made)
        if not plain:
            made = call(torch.permute, made, [order.index(axis) for axis in range(len(order))])
        if not has_strides(made.meta[EXAMPLE], wanted):
            raise StaysError(like)
        return made

    # -- what is read afterwards -------------------------------------------------------------------

    def _live(self) -> set[fx.Node]:
        """Return the nodes that are needed if results are read from rolled forms.

        Raises:
            _UnfinishedError: for states that would have to be computed one by one, too.
        """
        behind = set().union(*map(_behind, self.rolled.values()))
        self.active = [loop for loop in self.iterations.loops if loop.node in behind]
        dropped = {call for results in self.rolled for call in results.writes}
        pending = [n for n in self.nodes if n.op == "output" or (writes(n) and n not in dropped)]
        pending += [made for results, made in self.rolled.items() if results.writes]
        live = set(pending)
        while pending:
            node = pending.pop()
            self._move(node)
            for given in node.all_input_nodes:
                source = self._source(node, given)
                if source not in live:
                    live.add(source)
                    pending.append(source)
        return live

    def _move(self, node: fx.Node) -> None:
        """Note that a node is to be behind rolled states that it follows from."""
        for loop in self.active:
            if node not in loop.follows or self.order[node] > self.order[loop.node]:
                continue
            if len(self.moved) >= self.least or not self.iterations.draws_nothing(node):
                raise _UnfinishedError(loop)
            before = self.moved.setdefault(node, loop)
            self.moved[node] = max(before, loop, key=lambda loop: self.order[loop.node])

    def _source(self, node: fx.Node, given: fx.Node) -> fx.Node:
        """Return what a node reads instead of another one."""
        for results, made in self.rolled.items():
            if results.node is given:
                return made
        for loop in self.active:
            if given not in loop.follows:
                continue
            if node not in self.moved and self.order[node] < self.order[loop.node]:
                raise _UnfinishedError(loop)
            if given in loop.places:
                return self._row(loop, given)
        return given

    def _row(self, loop: RolledLoop, member: fx.Node) -> fx.Node:
        """Return a value of one iteration as a row of all of them, or as the last state."""
        if member not in self.rows:
            made, iterations = loop.node, self.iterations
            column, place = loop.places[member]
            with iterations.behind(made, self._end(loop), member):
                row = iterations.last_of(loop, member)
                if row is None:
                    states = iterations.states_of(loop, column)
                    row = iterations.call(torch.select, states, 0, place)
                try:
                    self.rows[member] = self.rows[made] = self._laid_out(row, member)
                except StaysError as error:
                    raise _UnfinishedError(loop) from error
        return self.rows[member]

    def _end(self, loop: RolledLoop) -> fx.Node:
        """Return the last node of those that stand behind a loop."""
        return self.rows.get(loop.node) or next(iter(loop.rolled.values()), loop.node)

    def _replace(self, live: set[fx.Node]) -> None:
        """Let live nodes read rolled forms, and erase those that stand for iterations."""
        for node in [node for node in self.nodes if node in self.moved]:
            loop = self.moved[node]
            self._end(loop).append(node)
            self.rows[loop.node] = node
        for node in live:
            for given in node.all_input_nodes:
                if (source := self._source(node, given)) is not given:
                    node.replace_input_with(given, source)
        done = {*self.iterations.made}
        if self.rolled:
            done |= {*self.iterations.used, *(results.node for results in self.rolled)}
            done |= {call for results in self.rolled for call in results.writes}
        for node in reversed(list(self.graph.nodes)):
            erased = node in done and node not in live and node.op not in ("placeholder", "output")
            if erased and not node.users:
                self.graph.erase_node(node)

    def _write_bodies(self) -> None:
        """Give each scan its body, which returns what is read."""
        for loop in self.iterations.loops:
            if loop.body is None or not loop.node.users:
                continue
            read = {c: node for c, node in loop.outputs.items() if node in loop.node.users}
            for place, node in enumerate(read.values(), len(loop.body.carries)):
                node.update_arg(1, place)
            name = loop.node.args[0]
            assert isinstance(name, fx.Node)
            body = loop.body.module([*read])
            self.part.add_module(str(name.target), body)
            self._detach(loop.node, without_gradient(body))

    def _detach(self, scan: fx.Node, positions: list[int]) -> None:
        """Detach arguments of a scan that need a gradient, at positions among its tensors."""
        module, *groups = scan.args
        lengths = [len(group) for group in groups]  # type: ignore[arg-type]
        given: list[Any] = [item for group in groups for item in group]  # type: ignore[union-attr]
        for place in positions:
            value = tensor_of(given[place])
            if value is not None and value.requires_grad:
                with self.iterations.before(scan):
                    given[place] = self.iterations.call(torch.detach, given[place])
        rest = iter(given)
        parts = [[next(rest) for _ in range(length)] for length in lengths]
        scan.args = (module, parts[0], parts[1], tuple(parts[2]))


def _behind(node: fx.Node) -> set[fx.Node]:
    """Return what a node follows from."""
    found, pending = {node}, [node]
    while pending:
        new = [given for given in pending.pop().all_input_nodes if given not in found]
        found.update(new)
        pending += new
    return found
