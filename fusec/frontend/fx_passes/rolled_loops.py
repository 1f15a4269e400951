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
places along an axis of a new tensor; or, where their last value alone is read, from calls of one
function at equal distances. Such values are a *column* (``columns.py``), whose rolled form is what
they have in common (``rolled_columns.py``). It is computed where values are collected. So nothing
may be written, and no mode may change, between the first iteration and there. What reads a state
behind the loop reads a row of all states.

Loops stay unrolled whose values follow from no state, and those whose iterations differ. So do
those with a gradient where memory of what they read or compute is written behind them: eager
refuses the gradient if it saved that memory, of which rolled forms and rows are copies.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import called_name, memory_of, tensor_of, written_by
from fusec.frontend.fx_passes.columns import (
    Column,
    Slices,
    StaysError,
    Subscript,
    are_alike,
    closure,
    has_shape,
    is_plain,
    joined,
    writes,
)
from fusec.frontend.fx_passes.dynamo_graph import plain_parts
from fusec.frontend.fx_passes.fx_nodes import called_with, has_strides, hint_of
from fusec.frontend.fx_passes.loop_bodies import contiguous, without_gradient
from fusec.frontend.fx_passes.rolled_columns import RolledColumns, RolledLoop
from fusec.torch_interior import EXAMPLE, FakeTensor, FakeTensorMode, keep_sources, pytree

_NEW = ("zeros", "empty", "ones", "full")
"""Functions that make a tensor in memory of its own; also ``new_*`` and ``*_like``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Collected:
    """Where the values of iterations are collected.

    Attributes:
        node: a ``stack`` or ``cat`` of them, the last call that writes them, or the last value.
        dim: the axis along which they lie; None if the last one alone is read.
        joined: whether each has this axis itself.
        places: where ``writes`` write them to a new tensor; None if ``node`` is their result.
    """

    node: fx.Node
    column: Column
    dim: int | None
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
        traced = [tensor_of(node) for node in part.graph.nodes]
        mode = next((x.fake_mode for x in traced if isinstance(x, FakeTensor)), None)
        stays: set[int] = set()
        while mode is not None:
            found = dict(enumerate(_results(part.graph, least)))
            if not found.keys() - stays:
                break
            graph = fx.Graph()
            graph.output(graph.graph_copy(part.graph, {}))
            keep_sources(part.graph, graph)
            loops = _Loops(part, mode, least, scans=part is gm)
            refused = loops.roll([x for k, x in found.items() if k not in stays])
            if not refused:
                break
            part.graph = graph
            stays |= {k for k, x in found.items() if x in refused}


# -- results ---------------------------------------------------------------------------------------


def _results(graph: fx.Graph, least: int) -> list[_Collected]:
    """Return the nodes that collect ``least`` values or more, in order, and last values."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    found = [*filter(None, map(_joined_values, graph.nodes))]
    for base, calls in _filled(graph).items():
        places = joined([Subscript(base, _items(call.args[1])) for call in calls])
        if places is not None:
            column = tuple(call.args[2] for call in calls)
            whole = places.width is not None
            found.append(_Collected(calls[-1], column, places.axis, whole, places, tuple(calls)))
    found = [results for results in found if len(results.column) >= least]
    found.sort(key=lambda results: order[results.node])
    return [*found, *_last_values(graph, least)]


def _last_values(graph: fx.Graph, least: int) -> Iterator[_Collected]:
    """Yield values that are equally many calls apart, of which the last one is read otherwise.

    Where inputs of the graph are read one by one, as weights of layers are, it is no loop.
    """
    nodes = list(graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    alike: dict[Any, list[int]] = {}

    def readers(place: int) -> set[int]:
        return {order[user] - place for user in nodes[place].users}

    def inputs(end: int, step: int) -> set[fx.Node]:
        return {x for n in nodes[end - step : end] for x in n.all_input_nodes if not x.args}

    for last, node in enumerate(nodes):
        places = alike.setdefault(node.target, [])
        like_last = partial(_is_like, node)
        for place in reversed(places if node.users and tensor_of(node) is not None else []):
            step = last - place
            few = last < (least - 1) * step
            if few or any(n.target == node.target for n in nodes[last + step : last + step + 1]):
                break
            walked = itertools.takewhile(like_last, nodes[last::-step])
            column = tuple(walked)[::-1]
            if len(column) < least or readers(last) == readers(place):
                continue
            if inputs(last, step) == inputs(place, step):
                yield _Collected(node, column, None)
                break
        places.append(last)


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    return node.target == other.target and are_alike((node, other))


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


def _written(call: fx.Node) -> list[Any]:
    """Return what a call with an effect writes: all that it reads, unless its name says what."""
    named = [item for item in pytree.tree_leaves(written_by(call)) if item is not None]
    return named or call.all_input_nodes


def _memories(nodes: Iterable[Any]) -> set[int]:
    return {memory_of(value) for value in map(tensor_of, nodes) if value is not None}


# -- loops -----------------------------------------------------------------------------------------


class _Loops:
    """The loops of a graph.

    Rolled forms are written beside the loops, then what nothing reads any more is erased.

    Attributes:
        effects: the places of calls over which nothing may be moved -> the memory that they write.
        owners: memory -> the node that made it; others with this memory are its views.
        rolled: results -> what is read in their place, or the call that writes them.
    """

    def __init__(self, part: fx.GraphModule, mode: FakeTensorMode, least: int, scans: bool) -> None:
        self.part, self.graph, self.least = part, part.graph, least
        self.columns = RolledColumns(part.graph, mode, least, scans)
        self.order = dict(self.columns.order)
        own = {call for calls in _filled(part.graph).values() for call in calls}
        effects = {n: place for n, place in self.order.items() if writes(n) and n not in own}
        self.effects = {place: _memories(_written(n)) for n, place in effects.items()}
        self.owners: dict[int, fx.Node] = {}
        for node in part.graph.nodes:
            if (value := tensor_of(node)) is not None:
                self.owners.setdefault(memory_of(value), node)
        self.rolled: dict[_Collected, fx.Node] = {}

    def roll(self, results: list[_Collected]) -> set[_Collected]:
        """Roll up loops; return results that have to stay, with which the graph is of no use."""
        for found in results:
            if found.dim is None and found.node in self.columns.used:  # of a loop that is known
                continue
            with contextlib.suppress(StaysError):
                self.rolled[found] = self._write(found)
        for found, made in self.rolled.items():
            found.node.replace_all_uses_with(made)
            for call in found.writes:
                self.graph.erase_node(call)
        behind = closure(self.rolled.values())
        loops = [loop for loop in self.columns.loops if loop.node in behind]
        unfinished = self._read_rows(loops) or self._sort(loops)
        if unfinished:
            nodes = {loop.node for loop in unfinished}
            return {x for x, made in self.rolled.items() if not nodes.isdisjoint(closure([made]))}
        self._write_bodies()
        if loops:
            self.part.recompile()
        return set()

    # -- writing results ---------------------------------------------------------------------------

    def _write(self, results: _Collected) -> fx.Node:
        """Return the collected values of all iterations, or the call that writes them.

        Raises:
            StaysError: if they follow from no state, or from what changes in between.
        """
        columns, dim, node = self.columns, results.dim, results.node
        with columns.before(node):
            found, places = columns.roll(results.column), results.places
            behind = closure([found.node]) if found.varies else ()
            loops = [loop for loop in columns.loops if loop.node in behind]
            if dim is None:  # nothing varies in others: one kernel may run all iterations
                loops = [x for x in loops if node in x.places and not (x.body and x.body.counts)]
            if not loops or self._changes(results):
                raise StaysError(results)
            if dim is None:
                return self._row(loops[0], node)
            turned = places is not None and places.turned
            made = columns.call(collected, found.node, dim, results.joined, turned)
            if places is None:
                return self._laid_out(made, node)
            part = columns.call(operator.getitem, places.source, places.index)
            if not has_shape(made.meta[EXAMPLE], part.meta[EXAMPLE].shape):
                raise StaysError(results)
            return columns.insert(operator.setitem, places.source, places.index, made)

    def _changes(self, results: _Collected) -> bool:
        """Return True if something changes between the first iteration and the results.

        Or behind these, if a gradient may need it.
        """
        used, order = self.columns.used, self.columns.order
        of_loop = closure(results.column, lambda n: [x for x in n.all_input_nodes if x in used])
        first, end = min(order[node] for node in of_loop), order[results.node]
        if any(first < place < end for place in self.effects):
            return True
        if not any(x is not None and x.requires_grad for x in map(tensor_of, of_loop)):
            return False
        saved = _memories(x for node in of_loop for x in (node, *node.all_input_nodes))
        behind = (memory for place, memory in self.effects.items() if place > end)
        return not saved.isdisjoint(itertools.chain.from_iterable(behind))

    def _laid_out(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Return a tensor in memory of its own, with the strides of another one.

        Raises:
            StaysError: if its elements lie in no order of its axes.
        """
        wanted = tensor_of(like)
        assert wanted is not None
        strides: tuple[Any, ...] = wanted.stride()
        order = sorted(range(wanted.dim()), key=lambda axis: -hint_of(strides[axis]))
        made = self.columns.call(laid_out, node, order)
        if not has_strides(made.meta[EXAMPLE], wanted):
            raise StaysError(like)
        return made

    # -- what is read afterwards -------------------------------------------------------------------

    def _read_rows(self, loops: Sequence[RolledLoop]) -> list[RolledLoop]:
        """Let what is left read rows of rolled forms, and erase what these stand for.

        A row has memory of its own. What is a view of another value stays one, of its row.

        Returns:
            a loop of which too many rows are read, or one cannot be laid out.
        """
        computed = {member: loop for loop in loops for member in loop.places}
        forms = {n: None for x in loops for n in (*x.rolled.values(), *x.outputs.values())}
        made = [node for node in self.columns.made if node not in forms]
        done = {*self.columns.made} - {*self.rolled.values()}
        if self.rolled:
            done |= {*self.columns.used, *(results.node for results in self.rolled)}
        last = (results.node for results in self.rolled if results.dim is None)
        apart = {owner for node in last if (owner := self._owner(node)) is not node}
        rows, nodes = 0, [node for node in self.graph.nodes if node not in self.columns.made]
        for node in (*reversed(made), *reversed(nodes), *forms):  # what still reads it is needed
            owner = self._owner(node)
            if node.users and node in computed and (owner is node or owner in apart):
                rows += self.least if owner in apart else 1
                try:
                    node.replace_all_uses_with(self._row(computed[node], node))
                except StaysError:
                    rows = self.least
                if rows >= self.least:
                    return [computed[node]]
            dead = node.op.startswith(("call", "get_attr")) and not node.users
            if dead and (node in done or (loops and self.columns.draws_nothing(node))):
                self.graph.erase_node(node)
        return []

    def _owner(self, node: fx.Node) -> fx.Node | None:
        """Return the node that made the memory of a node's tensor."""
        value = tensor_of(node)
        return None if value is None else self.owners.get(memory_of(value))

    def _row(self, loop: RolledLoop, member: fx.Node) -> fx.Node:
        """Return a value of one iteration as a row of all of them, or as the last state."""
        columns, (column, place) = self.columns, loop.places[member]
        with columns.before(loop.node.next, member):
            row = columns.last_of(loop, member)
            if row is None:
                row = columns.call(torch.select, columns.states_of(loop, column), 0, place)
            return self._laid_out(row, member)

    def _sort(self, loops: Sequence[RolledLoop]) -> list[RolledLoop]:
        """Move nodes behind what they read; return loops behind which too much would move."""
        place = {node: k for k, node in enumerate(self.graph.nodes)}
        nodes, missing = [*place], {node: len(node.all_input_nodes) for node in place}
        ready = [k for k, node in enumerate(nodes) if not missing[node]]
        found: list[fx.Node] = []
        while ready:
            found.append(nodes[heapq.heappop(ready)])
            for user in found[-1].users:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, place[user])
        last = itertools.accumulate(map(place.__getitem__, found), max)
        moved = [n for n, k in zip(found, last, strict=True) if place[n] < k and n in self.order]
        if len(moved) >= self.least or not all(map(self.columns.draws_nothing, moved)):
            needed = closure(moved)
            return [loop for loop in loops if loop.node in needed]
        for before, node in itertools.pairwise(found):
            before.append(node)
        return []

    def _write_bodies(self) -> None:
        """Give each scan its body, which returns what is read."""
        for loop in self.columns.loops:
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
        given, form = pytree.tree_flatten(scan.args)
        for place in positions:
            value = tensor_of(node := given[place + 1])
            if value is not None and value.requires_grad:
                with self.columns.before(scan):
                    given[place + 1] = self.columns.call(torch.detach, node)
        scan.args = pytree.tree_unflatten(given, form)


# -- functions that graphs call --------------------------------------------------------------------


def collected(x: torch.Tensor, dim: int, joined: bool, turned: bool) -> torch.Tensor:
    """Return values of all iterations with these along an axis, which each may have itself."""
    x = (x.flip(0) if turned else x).movedim(0, dim)
    return x.flatten(dim, dim + 1) if joined else x


def laid_out(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a copy whose axes lie in memory in an order."""
    return contiguous(x.permute(*order)).permute(*(order.index(k) for k in range(x.dim())))
