"""Compute values of all iterations of an unrolled loop at once, with an axis more.

A *column* has a value for each iteration of a loop. Its rolled form is one tensor with the axis of
iterations in front, which equals ``torch.stack(column)``. It is found by what values have in
common, from the results of a loop up to what it reads::

    one value in all iterations             that value
    x[:, 3], x[:, 5], x[:, 7]               x[:, 3:8:2], its axis moved to the front
    h[t] = a[t] * h[t-1] + b[t]             fusec::recurrence of the columns a and b
    h[t] = f(h[t-1], x[t])                  torch's scan, whose body is f (``loop_bodies.py``)
    h[t-1], where the column h is known     h[:-1] behind the first state
    states of two steps that take turns     those of each, interleaved
    f(x[t], y[t])                           f under vmap, of the columns x and y
    others, if they follow from no state    a stack of them

Nothing else depends on an iteration before. So each form is right by the forms of its arguments,
wherever equal arguments give equal results: a call is made under ``vmap`` with fake tensors first,
and one that draws, writes, has no batching rule or gives another type has no rolled form.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import called_name, memory_of, tensor_of
from fusec.frontend.fx_passes.columns import (
    Column,
    Rolled,
    StaysError,
    are_alike,
    arguments_of,
    closure,
    each,
    function_of,
    has_elements,
    is_same,
    joined,
    may_be_called,
    name_of,
    subscript_of,
)
from fusec.frontend.fx_passes.loop_bodies import (
    LoopBody,
    affine_form,
    contiguous,
    is_contiguous,
    keep_layout,
    recurring,
)
from fusec.frontend.ops import recurrences as _registers_the_operation  # noqa: F401
from fusec.torch_interior import EXAMPLE, FakeTensorMode, pytree


@dataclass(frozen=True, slots=True, eq=False)
class RolledLoop:
    """A loop that is one operation.

    Attributes:
        node: a recurrence, or a scan.
        follows: the values that steps compute, and all nodes before ``node`` that depend on them.
        places: what steps compute -> its column, and its place there.
        rolled: column -> all of its values; of a scan, those that were asked for.
        body: the step of a scan.
        outputs: column -> the output of a scan.
    """

    node: fx.Node
    follows: frozenset[fx.Node]
    places: Mapping[fx.Node, tuple[Column, int]]
    rolled: dict[Column, fx.Node]
    body: LoopBody | None = None
    outputs: dict[Column, fx.Node] = field(default_factory=dict)


class RolledColumns:
    """The rolled forms of a graph's columns.

    Attributes:
        mode: of the fake tensors that Dynamo traced.
        least: the least number of iterations that are rolled up.
        scans: loops may become scans. AOTAutograd traces none in a body, as that of a checkpoint.
        order: node -> its place in the graph, of those that it had.
        used: the nodes that rolled forms stand for.
        following: the nodes that follow from states that are rolled up, and these.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, least: int, scans: bool) -> None:
        self.graph, self.mode, self.least, self.scans = graph, mode, least, scans
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        self.known: dict[Column, Rolled] = {}
        self.loops: list[RolledLoop] = []
        self.used: dict[fx.Node, None] = {}
        self.following: set[fx.Node] = set()
        self.made: dict[fx.Node, None] = {}
        self._tried: set[Column] = set()
        self._like: fx.Node | None = None
        self._end = 0

    @contextlib.contextmanager
    def before(self, node: fx.Node, like: fx.Node | None = None) -> Iterator[None]:
        """Insert calls before a node, with the source line of this or another one."""
        self._like, self._end = like or node, self.order.get(node, self._end)
        self._tried.clear()
        with self.graph.inserting_before(node):
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
            return self._varying(column, self.call(torch.flip, self.roll(column[::-1]).node, [0]))
        if not self._behind(column[-1], self.order[column[0]]).isdisjoint(column[:-1]):
            return self._states(column)
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
        where = (found.index, found.axis, found.width, found.turned)
        return self._varying(column, self.call(sliced, found.source, *where))

    def _calls(self, column: Column) -> Rolled | None:
        """Return equal calls as one under ``vmap``; None if they are not equal."""
        found = arguments_of(column)
        if found is None:
            return None
        if not may_be_called(column[0]):
            raise StaysError(column)
        form, columns = found
        arguments = [self.roll(values) for values in columns]
        if called_name(column[0]) == "getitem" and tensor_of(column[0].args[0]) is None:
            made = self.call(operator.getitem, *(x.node for x in arguments))
            return self._varying(column, made)
        if not any(x.varies for x in arguments):
            if not self.draws_nothing(column[0]):
                raise StaysError(column)
            return Rolled(column[0], varies=False)
        _check_promotion(columns, arguments)
        given = pytree.tree_unflatten([x.node for x in arguments], form)
        axes = pytree.tree_unflatten([0 if x.varies else None for x in arguments], form)
        return self._varying(column, self.call(each, name_of(column[0]), axes, *given))

    def _behind_first(self, column: Column) -> Rolled:
        """Return a column whose first value is another one than those behind it.

        Raises:
            StaysError: if it is not.
        """
        if arguments_of(column[1:]) is None or not are_alike(column):
            raise StaysError(column)
        return self._between(column, column[:1], self.roll(column[1:]).node, ())

    def _stack(self, column: Column) -> Rolled:
        if not self.following.isdisjoint(column) or not are_alike(column):
            raise StaysError(column)
        return self._varying(column, self.call(torch.stack, list(column)))

    def _between(self, column: Column, before: Column, middle: fx.Node, behind: Column) -> Rolled:
        """Return values around those of a rolled form."""
        around = before or behind
        made = self.call(between, [*before], middle, [*behind]) if around else middle
        return self._varying(column, made)

    def _varying(self, column: Column, node: fx.Node) -> Rolled:
        """Return a form of a column, which has its shape and type.

        Raises:
            StaysError: if it has another one.
        """
        for item in column[:: len(column) - 1]:
            if not has_elements(node.meta[EXAMPLE], item.meta.get(EXAMPLE), len(column)):
                raise StaysError(column)
        return Rolled(node, varies=True)

    # -- loops -------------------------------------------------------------------------------------

    def _of_known_states(self, column: Column) -> Rolled | None:
        """Return a column that has all of some states but two in front, or one behind."""
        middle = len(column) // 2
        for loop in self.loops:
            known, at = loop.places.get(column[middle], ((), 0))
            low, high = max(0, middle - at), min(len(column), len(known) - at + middle)
            rows = slice(low + at - middle, high + at - middle)
            if column[low:high] != known[rows] or low > 2 or len(column) - high > 1:
                continue
            if not are_alike(column):
                continue
            part = self.states_of(loop, known)
            if rows != slice(0, len(known)):
                part = self.call(operator.getitem, part, rows)
            return self._between(column, column[:low], part, column[high:])
        return None

    def _states(self, column: Column) -> Rolled:
        """Return values each of which follows from those before, of steps that may take turns.

        Raises:
            StaysError: if steps are not equal calls.
        """
        try:
            self._find_loop(column)
        except StaysError:
            if len(column) < 2 * self.least:
                raise
            some, others = (self.roll(column[k::2]).node for k in range(2))
            return self._varying(column, self.call(interleaved, some, others, len(column)))
        found = self._of_known_states(column)
        if found is None:
            raise StaysError(column)
        return found

    def _find_loop(self, states: Column) -> None:
        """Add the loop of states each of which follows from those before.

        Raises:
            StaysError: if steps are not equal calls.
        """
        made = tensor_of(states[0])
        if made is None or made.device.type != "cpu" or not are_alike(states):
            raise StaysError(states)
        like, self._like = self._like, states[-1]  # a loop cites its steps, not what collects them
        given, body = self._body(states)
        try:
            loop = self._recurrence(states, given, body)
        except StaysError:
            loop = self._scan(states[given:], body)
        self._like = like
        self.used.update(dict.fromkeys(item for column in body.calls for item in column))
        self.loops.append(loop)
        self.following |= loop.follows

    def _body(self, states: Column) -> tuple[int, LoopBody]:
        """Return how many of the first states are no steps from those before, and the body."""
        for given in range(2):
            with contextlib.suppress(StaysError):
                return given, LoopBody(states[given:], self)
        return 2, LoopBody(states[2:], self)

    def _recurrence(self, states: Column, given: int, body: LoopBody) -> RolledLoop:
        """Return states each of which is affine in the one before, as a recurrence.

        Raises:
            StaysError: if they are not.
        """
        coefficients = [(x.node, x.varies) for x in affine_form(body, states[given:])]
        (carry,) = body.carries.values()
        known = states[max(given - 1, 0) :]
        rows = len(states) - given
        node = self.call(recurring, carry.start, *coefficients, rows, given > 0)
        self._varying(known, node)
        places = {state: (known, k) for k, state in enumerate(known) if k > 0 or not given}
        return RolledLoop(node, frozenset(body.follows), places, {known: node})

    def _scan(self, states: Column, body: LoopBody) -> RolledLoop:
        """Return a loop of any step as a scan, without outputs but the last states."""
        if body.counts:
            count = self.call(torch.zeros, len(states))
            body.take(Rolled(count, varies=True), self.traced(lambda x: x[0], (count,)))
        given = [body.given[node] for node in body.arguments()[len(body.carries) :]]
        made = closure(
            (x.node for x in given), lambda n: n.all_input_nodes if n in self.made else ()
        )
        copies = [n for n in made if n.target is torch.stack and n in self.made]
        gathers = any(x.op == "placeholder" for n in copies for x in n.all_input_nodes)
        if gathers or not self.scans or not body.has_gradient():  # weights of layers, one by one
            raise StaysError(states)
        taken: set[int] = set()
        starts = [self._apart(carry.start, taken, True) for carry in body.carries.values()]
        rows = [rolled.node for rolled in given if rolled.varies]
        others = tuple(self._apart(x.node, taken, False) for x in given if not x.varies)
        module = self.graph.create_node("get_attr", f"loop_body_{len(self.made)}")
        self.made[module] = None
        node = self.insert(torch.ops.higher_order.scan, module, starts, rows, others)
        node.meta[EXAMPLE] = tuple(carry.meta[EXAMPLE] for carry in body.carries)
        places = {
            item: (column, k)
            for column in body.calls
            if tensor_of(column[0]) is not None
            for k, item in enumerate(column)
        }
        return RolledLoop(node, frozenset(body.follows), places, {}, body)

    def _apart(self, node: fx.Node, taken: set[int], dense: bool) -> fx.Node:
        """Return an argument of a scan that shares no memory with those before it."""
        value = tensor_of(node)
        if value is None:
            return node
        shared = memory_of(value) in taken
        taken.add(memory_of(value))
        copied = shared or (dense and not is_contiguous(value))
        return self.call(contiguous if dense else torch.clone, node) if copied else node

    def states_of(self, loop: RolledLoop, column: Column) -> fx.Node:
        """Return all values of a column of a loop."""
        if column not in loop.rolled:
            body = loop.body
            assert body is not None
            example = self.traced(stacked, (body.values[column], len(column)))
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
            made = self.insert(operator.getitem, loop.node, place)
            made.meta[EXAMPLE] = example
            given = [x for x in map(tensor_of, loop.node.all_input_nodes) if x is not None]
            needed = example.requires_grad or not any(x.requires_grad for x in given)
            if not needed and example.is_floating_point():
                made = self.call(torch.detach, made)
        return made

    def negative(self, value: Rolled) -> Rolled:
        """Return the negative of a number, or of a rolled form."""
        is_node = isinstance(value.node, fx.Node)
        return replace(value, node=self.call(torch.neg, value.node) if is_node else -value.node)

    # -- the graph ---------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, and trace its value.

        Raises:
            StaysError: if it cannot be traced.
        """
        node = self.insert(target, *args, **kwargs)
        node.meta[EXAMPLE] = self.traced(functools.partial(target, **kwargs), args)
        return node

    def insert(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call without its value."""
        node = self.graph.call_function(target, args, kwargs)
        self.made[node] = None
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

    def _behind(self, node: fx.Node, first: int) -> set[fx.Node]:
        """Return a node, and those behind a place in the graph that it follows from."""
        return closure([node], lambda n: [x for x in n.all_input_nodes if self.order[x] >= first])

    def followers(self, states: Column) -> set[fx.Node]:
        """Return the nodes that follow from states, and these, up to the insertion point."""

        def users(node: fx.Node) -> list[fx.Node]:
            return [user for user in node.users if self.order.get(user, self._end) < self._end]

        return closure(states, users)


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


# -- functions that graphs call --------------------------------------------------------------------


def sliced(x: torch.Tensor, index: Any, axis: int, width: int | None, turned: bool) -> torch.Tensor:
    """Return slices of a tensor (``Slices``) with their axis in front."""
    x = x[index] if width is None else x[index].unflatten(axis, (-1, width))
    x = x.movedim(axis, 0)
    return x.flip(0) if turned else x


def stacked(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return equal rows."""
    return contiguous(x.expand(rows, *x.shape))


def interleaved(some: torch.Tensor, others: torch.Tensor, rows: int) -> torch.Tensor:
    """Return rows that are those of two tensors in turn; the second may have one less."""
    half = rows // 2
    pairs = torch.stack((some[:half], others), 1).flatten(0, 1)
    return pairs if rows == 2 * half else torch.cat([pairs, some[half:]])


def between(
    before: Sequence[torch.Tensor], middle: torch.Tensor, behind: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return rows with others before and behind them."""
    return torch.cat([*(x[None] for x in before), middle, *(x[None] for x in behind)])
