"""Compute values of all iterations of an unrolled loop at once, with an axis more.

A *column* has a value for each iteration of a loop. Its rolled form is one tensor with the axis of
iterations in front, which equals ``torch.stack(column)``. It is found by what values have in
common, from the results of a loop up to what it reads::

    one value in all iterations             that value
    x[:, 3], x[:, 5], x[:, 7]               x[:, 3:8:2], its axis moved to the front
    h[t] = a[t] * h[t-1] + b[t]             fusec::recurrence of the columns a and b
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate

from fusec.frontend.aliasing.overlap import called_name, tensor_of
from fusec.frontend.fx_passes.iterated_calls import (
    Column,
    arguments_of,
    axes_of,
    each,
    function_of,
    may_be_called,
    name_of,
)
from fusec.frontend.fx_passes.subscripts import joined, subscript_of
from fusec.frontend.ops import recurrences as _registers_the_operation  # noqa: F401
from fusec.torch_interior import EXAMPLE, FakeTensorMode

_STEPS = {"add": "add", "mul": "mul", "multiply": "mul", "sub": "sub", "subtract": "sub"}


class StaysError(Exception):
    """A column has no rolled form."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """The rolled form of a column.

    Attributes:
        node: a tensor with the iterations in front; if not ``varies`` the value of all iterations.
        since: the place in the graph of the first operation that it stands for.
        recurs: whether it follows from states.
    """

    node: Any
    varies: bool
    since: float = math.inf
    recurs: bool = False


@dataclass(frozen=True, slots=True)
class LoopStates:
    """The states of a loop.

    Attributes:
        column: the states that follow one from another.
        given: 1 if the column begins with the state before the first step, else 0.
        follows: the states that steps compute, and all nodes before ``rolled`` that depend on them.
    """

    column: Column
    given: int
    rolled: Rolled
    follows: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class _Affine:
    """What follows from a state before as ``factor * before + term``; None for 1, and for -0."""

    factor: Rolled | None = None
    term: Rolled | None = None


class Iterations:
    """The rolled forms of a graph's columns.

    Attributes:
        mode: of the fake tensors that Dynamo traced.
        order: node -> its place in the graph.
        used: the nodes that rolled forms stand for.
        following: the nodes that follow from states that are rolled up, and these.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self.order: dict[fx.Node, float] = {node: k for k, node in enumerate(graph.nodes)}
        self.known: dict[Column, Rolled] = {}
        self.states: list[LoopStates] = []
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
        if all(_is_same(item, column[0]) for item in column):
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
            return self._recurrence(column)
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
            if not _has_elements(node.meta[EXAMPLE], item.meta.get(EXAMPLE), len(column)):
                raise StaysError(column)
        since = min(self._first(column), *(x.since for x in arguments), math.inf)
        return Rolled(node, True, since, any(x.recurs for x in arguments))

    def _first(self, column: Column) -> float:
        return min(self.order[node] for node in column)

    # -- recurrences -------------------------------------------------------------------------------

    def _of_known_states(self, column: Column) -> Rolled | None:
        """Return a column that has all of some states but one at either end."""
        for states in self.states:
            known = states.column
            if column[1] not in known:
                continue
            shift = known.index(column[1]) - 1
            low, high = max(0, -shift), min(len(column), len(known) - shift)
            if column[low:high] != known[low + shift : high + shift] or high - low < 2:
                continue
            if low > 1 or len(column) - high > 1 or not are_alike(column):
                continue
            rows = slice(low + shift, high + shift)
            whole = rows == slice(0, len(known))
            node = states.rolled.node
            part = node if whole else self.call(operator.getitem, node, rows)
            middle = replace(states.rolled, node=part)
            return self._joined(column, column[:low], middle, column[high:])
        return None

    def _recurrence(self, states: Column) -> Rolled:
        """Return states each of which is affine in the one before.

        Raises:
            StaysError: if they are not.
        """
        made = tensor_of(states[0])
        if made is None or not made.is_floating_point() or not are_alike(states):
            raise StaysError(states)
        if made.device.type != "cpu":
            raise StaysError(states)
        follows = self._followers(states)
        starts: list[Any] = []
        given = 0
        try:
            line = self._line(states, states, follows, starts)
        except StaysError:  # the first state is no step from one before
            given, starts = 1, [states[0]]
            line = self._line(states[1:], states, follows, [])
        row = self._coefficient(Rolled(starts[0], varies=False), made, 1)
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
        rolled = self._varying(states, node, *(x for x in (line.factor, line.term) if x))
        rolled = replace(rolled, recurs=True)
        follows = self._followers(states[given:])
        self.states.append(LoopStates(states, given, rolled, frozenset(follows)))
        self.following |= follows
        return rolled

    def _line(
        self, column: Column, states: Column, follows: set[fx.Node], starts: list[Any]
    ) -> _Affine:
        """Return a column as a line over the states before.

        Args:
            follows: the nodes that follow from states.
            starts: takes what stands before the first state, or that.

        Raises:
            StaysError: if it is none whose coefficients are values of iterations. Others would be
                multiplied out: where a sum cancels, ``h*s - y*s`` has not the digits of
                ``(h - y) * s``, and ``a*b`` may overflow where h is small.
        """
        if column[1 - len(states) :] == states[:-1]:
            starts.append(column[0])
            return _Affine()
        found = arguments_of(column)
        if found is None or found[0] != ((0, 1), {}) or not are_alike(column):
            raise StaysError(column)
        name = _STEPS.get(called_name(column[0]))
        if name is None:
            raise StaysError(column)
        self.used.update(dict.fromkeys(column))
        varying = [values[-1] in follows for values in found[1]]
        if sum(varying) != 1:
            raise StaysError(column)
        value, operand = found[1] if varying[0] else reversed(found[1])
        line = self._line(value, states, follows, starts)
        if line.term is not None or (name == "mul" and line.factor is not None):
            raise StaysError(column)
        other = self._operand(operand, column)
        match name:
            case "mul":
                return _Affine(other)
            case "add":
                return _Affine(line.factor, other)
            case _ if varying[0]:
                return _Affine(line.factor, self._negative(other))
        return _Affine(self._negative(line.factor or Rolled(1.0, varies=False)), other)

    def _operand(self, operand: Column, column: Column) -> Rolled:
        """Return what is added to states, or multiplied by."""
        made, own = tensor_of(column[0]), tensor_of(operand[0])
        number = type(operand[0]) in (int, float)
        assert made is not None
        if number and made.dtype.itemsize < 4:  # eager multiplies by it in f32
            raise StaysError(column)
        if not number and (own is None or own.dtype is not made.dtype):
            raise StaysError(column)
        found = self.roll(operand)
        return Rolled(found.node, found.varies, min(found.since, self._first(column)))

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
        node = self.graph.call_function(target, args, kwargs)
        self.made.append(node)
        self._place += 2.0**-20
        self.order[node] = self._place
        if self._like is not None:
            node.meta.update({k: v for k, v in self._like.meta.items() if k != EXAMPLE})
        node.meta[EXAMPLE] = self._traced(functools.partial(target, **kwargs), args)
        return node

    def _traced(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
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
            self._traced(beside, (node.args, node.kwargs))
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

    def _followers(self, states: Column) -> set[fx.Node]:
        """Return the nodes that follow from states, and these, up to the insertion point."""
        found, end = set(states), math.ceil(self._place)
        pending = list(states)
        while pending:
            for user in pending.pop().users:
                if user not in found and self.order[user] < end:
                    found.add(user)
                    pending.append(user)
        return found


# -- values ----------------------------------------------------------------------------------------


def are_alike(nodes: Sequence[Any]) -> bool:
    """Return True for tensors of one shape, type and device."""
    first = tensor_of(nodes[0])
    return first is not None and all(
        x is not None
        and (x.dtype, x.device) == (first.dtype, first.device)
        and has_shape(x, first.shape)
        for x in map(tensor_of, nodes)
    )


def has_shape(x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Return True for a tensor that is known to have a shape."""
    pairs = zip(x.shape, shape, strict=False)
    return x.dim() == len(shape) and all(statically_known_true(a == b) for a, b in pairs)


def has_strides(x: torch.Tensor, like: torch.Tensor) -> bool:
    """Return True for a tensor with another one's strides, where it has several elements."""
    triples = zip(x.shape, x.stride(), like.stride(), strict=True)
    return all(
        statically_known_true(a == b) for n, a, b in triples if not statically_known_true(n == 1)
    )


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


def _has_elements(value: Any, item: Any, rows: int) -> bool:
    """Return True for rows of an item's shape and type, and for tuples of such."""
    if isinstance(item, torch.Tensor) and isinstance(value, torch.Tensor):
        alike = (value.dtype, value.device) == (item.dtype, item.device)
        return alike and has_shape(value, (rows, *item.shape))
    if isinstance(item, tuple | list) and isinstance(value, tuple | list):
        pairs = zip(value, item, strict=False)
        return len(value) == len(item) and all(_has_elements(a, b, rows) for a, b in pairs)
    return False


def _is_same(a: Any, b: Any) -> bool:
    """Return True for one node, and for equal constants."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return a is b
    return a is b or (type(a) is type(b) and repr(a) == repr(b))
