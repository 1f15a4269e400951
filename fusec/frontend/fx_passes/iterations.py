"""Compute values of all iterations of an unrolled loop at once, with an axis more.

A *column* has a value for each iteration of a loop. Its rolled form is one tensor with the axis of
iterations in front, which equals ``torch.stack(column)``. It is found by what values have in
common, from the results of a loop up to what it reads::

    one value in all iterations             that value
    x[:, 3], x[:, 5], x[:, 7]               x[:, 3:8:2], its axis moved to the front
    h[t] = a[t] * h[t-1] + b[t]             fusec::recurrence of the columns a and b
    h[t] = f(h[t-1], x[t])                  torch's scan, whose body is f (``loop_bodies.py``)
    h[t-1], where the column h is known     h[:-1] behind the first state
    f(x[t], y[t])                           f under vmap, of the columns x and y
    others, if they follow from no state    a stack of them

Nothing else depends on an iteration before. So each form is right by the forms of its arguments,
wherever equal arguments give equal results: a call is made under ``vmap`` with fake tensors first,
and one that draws, writes, has no batching rule or gives another type has no rolled form.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fusec.frontend.aliasing.overlap import called_name, memory_of, tensor_of
from fusec.frontend.fx_passes.iterated_calls import (
    Column,
    Rolled,
    StaysError,
    are_alike,
    arguments_of,
    axes_of,
    each,
    function_of,
    has_elements,
    is_same,
    may_be_called,
    name_of,
)
from fusec.frontend.fx_passes.loop_bodies import (
    LoopBody,
    affine_form,
    contiguous,
    is_contiguous,
    keep_layout,
)
from fusec.frontend.fx_passes.subscripts import joined, subscript_of
from fusec.frontend.ops import recurrences as _registers_the_operation  # noqa: F401
from fusec.torch_interior import EXAMPLE, FakeTensorMode


@dataclass(frozen=True, slots=True, eq=False)
class RolledLoop:
    """A loop that is one operation.

    Attributes:
        node: a recurrence, or a scan.
        since: the place in the graph of the first operation that it stands for.
        follows: the values that steps compute, and all nodes before ``node`` that depend on them.
        places: what steps compute -> its column, and its place there.
        rolled: column -> all of its values; of a scan, those that were asked for.
        body: the step of a scan.
        outputs: column -> the output of a scan.
    """

    node: fx.Node
    since: float
    follows: frozenset[fx.Node]
    places: Mapping[fx.Node, tuple[Column, int]]
    rolled: dict[Column, fx.Node]
    body: LoopBody | None = None
    outputs: dict[Column, fx.Node] = field(default_factory=dict)


class Iterations:
    """The rolled forms of a graph's columns.

    Attributes:
        mode: of the fake tensors that Dynamo traced.
        scans: loops may become scans. AOTAutograd traces none in a body, as that of a checkpoint.
        order: node -> its place in the graph.
        used: the nodes that rolled forms stand for.
        following: the nodes that follow from states that are rolled up, and these.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, scans: bool) -> None:
        self.graph, self.mode, self.scans = graph, mode, scans
        self.order: dict[fx.Node, float] = {node: k for k, node in enumerate(graph.nodes)}
        self.known: dict[Column, Rolled] = {}
        self.loops: list[RolledLoop] = []
        self.used: dict[fx.Node, None] = {}
        self.following: set[fx.Node] = set()
        self.made: list[fx.Node] = []
        self._tried: set[Column] = set()
        self._like: fx.Node | None = None
        self._place = 0.0

    @contextlib.contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Insert calls before a node."""
        self._like, self._place = node, self.order[node] - 1
        self._tried.clear()
        with self.graph.inserting_before(node):
            yield

    @contextlib.contextmanager
    def behind(self, made: fx.Node, last: fx.Node, like: fx.Node) -> Iterator[None]:
        """Insert calls behind the last one that follows a rolled form, as if in its place."""
        self._like, self._place = like, self.order[made]
        with self.graph.inserting_before(last.next):
            yield

    def roll(self, column: Column) -> Rolled:
        """Return the rolled form of a column, written at the graph's insertion point.

        Raises:
            StaysError: if it has none.
        """
        if is_same(column):
            return Rolled(column[0], varies=False)
        if column not in self.known:
            if column in self._tried or not all(isinstance(item, fx.Node) for item in column):
                raise StaysError(column)
            self._tried.add(column)
            self.known[column] = self._roll(column)
            self.used.update(dict.fromkeys(column))
        return self.known[column]

    def _roll(self, column: Column) -> Rolled:
        found = self._of_known_states(column) or self._slices(column)
        if found is not None:
            return found
        if self.order[column[0]] > self.order[column[-1]]:
            turned = self.roll(column[::-1])
            return self._varying(column, self.call(torch.flip, turned.node, [0]), turned)
        if self._reaches(column[1], column[0]):
            self.find_loop(column)
            return self._of_known_states(column) or self._stays(column)
        if self._reaches(column[-1], column[0]):
            raise StaysError(column)
        try:
            return self._calls(column) or self._behind_first(column)
        except StaysError:
            return self._stack(column)

    # -- forms -------------------------------------------------------------------------------------

    def _slices(self, column: Column) -> Rolled | None:
        """Return slices at equally spaced places of one tensor as one slice."""
        found = joined([subscript_of(item) for item in column])
        if found is None or not are_alike(column):
            return None
        made = self.call(operator.getitem, found.source, found.index)
        if found.width is not None:
            made = self.call(torch.unflatten, made, found.axis, (len(column), found.width))
        made = self.call(torch.movedim, made, found.axis, 0) if found.axis else made
        made = self.call(torch.flip, made, [0]) if found.turned else made
        return self._varying(column, made)

    def _calls(self, column: Column) -> Rolled | None:
        """Return equal calls as one under ``vmap``; None if they are not equal."""
        found = arguments_of(column)
        if found is None:
            return None
        if not may_be_called(column[0]):
            raise StaysError(column)
        places, columns = found
        arguments = [self.roll(values) for values in columns]
        if called_name(column[0]) == "getitem" and tensor_of(column[0].args[0]) is None:
            made = self.call(operator.getitem, *(x.node for x in arguments))
            return self._varying(column, made, *arguments)
        if not any(x.varies for x in arguments):
            if not self.draws_nothing(column[0]):
                raise StaysError(column)
            return Rolled(column[0], varies=False, since=self._first(column))
        _check_promotion(columns, arguments)
        varying = {x.node for x in arguments if x.varies}
        nodes: Any = [x.node for x in arguments]
        given: Any = map_aggregate(places, nodes.__getitem__)
        axes = axes_of(given, varying.__contains__)
        return self._varying(column, self.call(each, name_of(column[0]), axes, *given), *arguments)

    def _behind_first(self, column: Column) -> Rolled:
        """Return a column whose first value is another one than those behind it.

        Raises:
            StaysError: if it is not.
        """
        if arguments_of(column[1:]) is None or not are_alike(column):
            raise StaysError(column)
        return self._joined(column, column[:1], self.roll(column[1:]), ())

    def _stack(self, column: Column) -> Rolled:
        if not self.following.isdisjoint(column) or not are_alike(column):
            raise StaysError(column)
        return self._varying(column, self.call(torch.stack, list(column)))

    def _stays(self, column: Column) -> Rolled:
        raise StaysError(column)

    def _joined(self, column: Column, before: Column, middle: Rolled, behind: Column) -> Rolled:
        """Return values around those of a rolled form."""
        rows = [[self.call(torch.unsqueeze, x, 0) for x in items] for items in (before, behind)]
        parts = [*rows[0], middle.node, *rows[1]]
        made = self.call(torch.cat, parts) if len(parts) > 1 else middle.node
        return self._varying(column, made, middle)

    def _varying(self, column: Column, node: fx.Node, *arguments: Rolled) -> Rolled:
        """Return a form of a column, which has its shape and type, made of forms of arguments.

        Raises:
            StaysError: if it has another one.
        """
        for item in column[:: len(column) - 1]:
            if not has_elements(node.meta[EXAMPLE], item.meta.get(EXAMPLE), len(column)):
                raise StaysError(column)
        since = min(self._first(column), *(x.since for x in arguments), math.inf)
        return Rolled(node, True, since, any(x.recurs for x in arguments))

    def _first(self, column: Column) -> float:
        return min(self.order[node] for node in column)

    # -- loops -------------------------------------------------------------------------------------

    def _of_known_states(self, column: Column) -> Rolled | None:
        """Return a column that has all of some states but one at either end."""
        for loop in self.loops:
            known, at = loop.places.get(column[1], ((), 0))
            low, high = max(0, 1 - at), min(len(column), len(known) - at + 1)
            rows = slice(low + at - 1, high + at - 1)
            if column[low:high] != known[rows] or high - low < 2:
                continue
            if low > 1 or len(column) - high > 1 or not are_alike(column):
                continue
            part = self.states_of(loop, known)
            if rows != slice(0, len(known)):
                part = self.call(operator.getitem, part, rows)
            middle = Rolled(part, True, loop.since, recurs=True)
            return self._joined(column, column[:low], middle, column[high:])
        return None

    def find_loop(self, states: Column) -> RolledLoop:
        """Return the loop of states each of which follows from the one before.

        Raises:
            StaysError: if steps are not equal calls.
        """
        made = tensor_of(states[0])
        if made is None or made.device.type != "cpu" or not are_alike(states):
            raise StaysError(states)
        try:
            given, body = 0, LoopBody(states, self)
        except StaysError:  # the first state is no step from one before
            given, body = 1, LoopBody(states[1:], self)
        try:
            loop = self._recurrence(states, given, body)
        except StaysError:
            loop = self._scan(states[given:], body)
        self.used.update(dict.fromkeys(item for column in body.calls for item in column))
        self.loops.append(loop)
        self.following |= loop.follows
        return loop

    def _recurrence(self, states: Column, given: int, body: LoopBody) -> RolledLoop:
        """Return states each of which is affine in the one before, as a recurrence.

        Raises:
            StaysError: if they are not.
        """
        made = tensor_of(states[0])
        assert made is not None
        if not made.is_floating_point():
            raise StaysError(states)
        line = affine_form(body, states[given:], self._negative)
        (carry,) = body.carries.values()
        row = self._coefficient(Rolled(carry.start, varies=False), made, 1)
        rows = len(states) - given
        factor = self._coefficient(line.factor or Rolled(1.0, varies=False), made, rows)
        term = self._coefficient(line.term or Rolled(-0.0, varies=False), made, rows)
        whole = self.call(torch.broadcast_tensors, factor, term, row)
        both = [self.call(operator.getitem, whole, k) for k in range(2)]
        if given:  # the first factor is not read
            both, first = [self.call(torch.cat, [row, x]) for x in both], None
        else:
            first = self.call(operator.getitem, self.call(operator.getitem, whole, 2), 0)
        node = self.call(torch.ops.fusec.recurrence.default, *both, first, 0, False)
        self._varying(states, node)
        places = {state: (states, k) for k, state in enumerate(states) if k >= given}
        return RolledLoop(node, body.since, frozenset(body.follows), places, {states: node})

    def _scan(self, states: Column, body: LoopBody) -> RolledLoop:
        """Return a loop of any step as a scan, without outputs but the last states."""
        if not any(rolled.varies for rolled in body.given.values()):
            count = self.call(torch.zeros, len(states))
            body.take(Rolled(count, varies=True), self.traced(lambda x: x[0], (count,)))
        given = [body.given[node] for node in body.arguments()[len(body.carries) :]]
        gathers = self._gathers([rolled.node for rolled in given])
        if gathers or not self.scans or not body.has_gradient():
            raise StaysError(states)
        taken: set[int] = set()
        starts = [self._apart(carry.start, taken, True) for carry in body.carries.values()]
        rows = [rolled.node for rolled in given if rolled.varies]
        others = tuple(self._apart(x.node, taken, False) for x in given if not x.varies)
        module = self.graph.create_node("get_attr", f"loop_body_{len(self.made)}")
        self.made.append(module)
        node = self._insert(torch.ops.higher_order.scan, module, starts, rows, others)
        node.meta[EXAMPLE] = tuple(carry.meta[EXAMPLE] for carry in body.carries)
        places = {
            item: (column, k)
            for column in body.calls
            if tensor_of(column[0]) is not None
            for k, item in enumerate(column)
        }
        return RolledLoop(node, body.since, frozenset(body.follows), places, {}, body)

    def _apart(self, node: fx.Node, taken: set[int], dense: bool) -> fx.Node:
        """Return an argument of a scan that shares no memory with those before it."""
        value = tensor_of(node)
        if value is None:
            return node
        memory = memory_of(value)
        shared = memory in taken
        taken.add(memory)
        if dense and (shared or not is_contiguous(value)):
            return self.call(contiguous, node)
        return self.call(torch.clone, node) if shared else node

    def _gathers(self, nodes: list[fx.Node]) -> bool:
        """Return True if rolled forms copy inputs of the graph: weights of layers, one by one."""
        pending, made = list(nodes), {*self.made}
        seen = {*nodes}
        while pending:
            node = pending.pop()
            if node.target is torch.stack and any(
                x.op == "placeholder" for x in node.all_input_nodes
            ):
                return True
            new = [x for x in node.all_input_nodes if x in made and x not in seen]
            seen.update(new)
            pending += new
        return False

    def states_of(self, loop: RolledLoop, column: Column) -> fx.Node:
        """Return all values of a column of a loop."""
        body = loop.body
        if column not in loop.rolled:
            assert body is not None

            def stacked(x: torch.Tensor) -> torch.Tensor:
                return contiguous(x.expand(len(column), *x.shape))

            example = self.traced(stacked, (body.values[column],))
            made = self._output(loop, len(body.carries) + len(loop.outputs), example)
            loop.rolled[column] = made
            loop.outputs[column] = made if made.args[0] is loop.node else made.all_input_nodes[0]
        return loop.rolled[column]

    def last_of(self, loop: RolledLoop, member: fx.Node) -> fx.Node | None:
        """Return the last state of a scan without the others; None for other values."""
        carries = loop.body.carries.items() if loop.body else ()
        for k, (node, carry) in enumerate(carries):
            if carry.column[-1] is member:
                return self.call(keep_layout, self._output(loop, k, node.meta[EXAMPLE]))
        return None

    def _output(self, loop: RolledLoop, place: int, example: torch.Tensor) -> fx.Node:
        """Return an output of a scan, which needs a gradient only if it does in eager."""
        with self.graph.inserting_before(loop.node.next):
            made = self._insert(operator.getitem, loop.node, place)
            made.meta[EXAMPLE] = example
            given = [x for x in map(tensor_of, loop.node.all_input_nodes) if x is not None]
            needed = example.requires_grad or not any(x.requires_grad for x in given)
            if not needed and example.is_floating_point():
                made = self.call(torch.detach, made)
        self.order[made] = self.order[loop.node]
        return made

    def _negative(self, value: Rolled) -> Rolled:
        if not isinstance(value.node, fx.Node):
            return Rolled(-value.node, varies=False, since=value.since)
        return Rolled(self.call(torch.neg, value.node), value.varies, value.since)

    def _coefficient(self, value: Rolled, state: torch.Tensor, rows: int) -> fx.Node:
        """Return a coefficient as a tensor with an axis more than a state.

        Raises:
            StaysError: if it has another type.
        """
        rank = state.dim() + 1
        node: Any = value.node
        if type(node) in (int, float):
            how = {"dtype": state.dtype, "device": state.device}
            return self.call(torch.full, (rows, *(1,) * state.dim()), node, **how)
        own = tensor_of(node)
        if own is None or (own.dtype, own.device) != (state.dtype, state.device):
            raise StaysError(value)
        for _ in range(rank - own.dim()):
            node = self.call(torch.unsqueeze, node, 1 if value.varies else 0)
        assert isinstance(node, fx.Node)
        return node

    # -- the graph ---------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, and trace its value.

        Raises:
            StaysError: if it cannot be traced.
        """
        node = self._insert(target, *args, **kwargs)
        node.meta[EXAMPLE] = self.traced(functools.partial(target, **kwargs), args)
        return node

    def _insert(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        self.made.append(node)
        self._place += 2.0**-20
        self.order[node] = self._place
        if self._like is not None:
            node.meta.update({k: v for k, v in self._like.meta.items() if k != EXAMPLE})
        return node

    def item(self, node: fx.Node, place: Any) -> fx.Node:
        """Return an item of a call's results, even if the graph does not read it."""
        wanted = (node, place)
        for user in node.users:
            if user.target is operator.getitem and user.args == wanted:
                return user
        with self.graph.inserting_before(node.next):
            made = self.call(operator.getitem, *wanted)
        self.order[made] = self.order[node]
        return made

    def traced(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Return what a function makes of fake tensors.

        Raises:
            StaysError: if it raises or warns.
        """
        given = fx.map_arg(tuple(arguments), lambda node: node.meta[EXAMPLE])
        sizes = self.mode.shape_env
        unknown = sizes.ignore_fresh_unbacked_symbols() if sizes else contextlib.nullcontext()
        try:
            with self.mode, unknown, warnings.catch_warnings():
                warnings.simplefilter("error")
                return function(*given)
        except Exception as error:  # whatever a function of torch does not take
            raise StaysError(function) from error

    def draws_nothing(self, node: fx.Node) -> bool:
        """Return True for a call of torch's own that gives the same whenever it is made."""
        if not may_be_called(node):
            return False
        function = function_of(name_of(node) or "")

        def beside(args: Any, kwargs: Any) -> Any:  # vmap allows no draws
            once = functools.partial(function, *args, **kwargs)
            return torch.vmap(lambda _: once(), randomness="error")(torch.zeros(2))

        try:
            self.traced(beside, (node.args, node.kwargs))
        except StaysError:
            return False
        return True

    def _reaches(self, node: fx.Node, source: fx.Node) -> bool:
        """Return True if a node follows from another one."""
        pending, seen, first = [node], {node}, self.order[source]
        while pending:
            for given in pending.pop().all_input_nodes:
                if given is source:
                    return True
                if given not in seen and self.order[given] > first:
                    seen.add(given)
                    pending.append(given)
        return False

    def followers(self, states: Column) -> set[fx.Node]:
        """Return the nodes that follow from states, and these, up to the insertion point."""
        found, end = set(states), math.ceil(self._place)
        pending = list(states)
        while pending:
            for user in pending.pop().users:
                if user not in found and self.order[user] < end:
                    found.add(user)
                    pending.append(user)
        return found


def _check_promotion(columns: Sequence[Column], arguments: Sequence[Rolled]) -> None:
    """Check that no scalar meets tensors of a narrower float, to which ``vmap`` would round it.

    Raises:
        StaysError: if one does; eager multiplies ``f16`` by an ``f32`` of no axes in ``f32``.
    """
    pairs = zip(map(tensor_of, (column[0] for column in columns)), arguments, strict=True)
    given = [(x, rolled.varies) for x, rolled in pairs if x is not None]
    narrow = {x.dtype for x, _ in given if x.dim() and x.is_floating_point() and x.itemsize < 4}
    if any(varies and not x.dim() and narrow - {x.dtype} for x, varies in given):
        raise StaysError(columns)
