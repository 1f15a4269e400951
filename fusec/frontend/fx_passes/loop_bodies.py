"""Write one iteration of an unrolled loop as a function of the states before and of what varies.

The body holds the calls of one iteration. It is found from a column of states, backwards::

    states one iteration before another column     a carry, which takes that column's value
    a column that follows from no state            an argument: its rolled form, row by row
    equal calls                                    one call

Worked example, the columns of ``c = f[:, t]*c + i[:, t];  h = c.tanh() + h``, from that of h::

    body(c, h, f, i):  mul = f * c;  c' = mul + i;  tanh = c'.tanh();  h' = tanh + h

The states that follow one from another are the last values of the carries, and all of them, or any
other value of the body, are outputs of ``torch.ops.higher_order.scan``. Nothing is rearranged, so a
body computes what eager does. Where it is a factor times the only state, plus a term, the loop is a
recurrence (``affine_form``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusec.frontend.aliasing.overlap import called_name, tensor_of
from fusec.frontend.fx_passes.columns import (
    Column,
    Rolled,
    StaysError,
    are_alike,
    arguments_of,
    closure,
    function_of,
    has_elements,
    is_same,
    name_of,
)
from fusec.torch_interior import EXAMPLE, SCANS_HAVE_GRADIENTS, pytree

if TYPE_CHECKING:
    from fusec.frontend.fx_passes.rolled_columns import RolledColumns

_STEPS = {"add": "add", "mul": "mul", "multiply": "mul", "sub": "sub", "subtract": "sub"}


@dataclass(frozen=True, slots=True)
class StateBefore:
    """What a body takes of the iteration before.

    Attributes:
        start: the state before the first iteration.
        column: the values that it takes, one iteration later.
    """

    start: fx.Node
    column: Column


class LoopBody:
    """One iteration of a loop.

    Attributes:
        graph: its calls, and placeholders of its arguments, in any order.
        values: column -> what stands for it in the body.
        carries: placeholder -> its carry.
        given: placeholder -> the rolled form of an argument.
        counts: whether it takes a number for each iteration, since nothing else varies.
    """

    def __init__(self, states: Column, columns: RolledColumns) -> None:
        """Find the body of a loop.

        Raises:
            StaysError: if states do not follow from equal calls.
        """
        self.columns = columns
        self.graph = fx.Graph()
        self.values: dict[Column, Any] = {}
        self.carries: dict[fx.Node, StateBefore] = {}
        self.given: dict[fx.Node, Rolled] = {}
        self.follows = columns.followers(states)
        self._begun: dict[Any, list[Column]] = {}
        missing = [states]
        while missing:
            self._value(missing[0])
            taken = (carry.column for carry in self.carries.values())
            missing = [column for column in taken if column not in self.values]
        self.calls = [c for c, n in self.values.items() if n not in (*self.carries, *self.given)]
        self.counts = not any(rolled.varies for rolled in self.given.values())

    def _value(self, column: Column) -> Any:
        """Return the body's value for a column."""
        if is_same(column) and not isinstance(column[0], fx.Node):
            return column[0]
        if column not in self.values:
            if not all(isinstance(item, fx.Node) for item in column):
                raise StaysError(column)
            follows = not self.follows.isdisjoint(column)
            if follows and is_same(column):
                raise StaysError(column)
            found = (self._carry(column) or self._call(column)) if follows else self._given(column)
            self.values[column] = found
        return self.values[column]

    def _given(self, column: Column) -> fx.Node:
        """Return an argument that does not follow from states."""
        rolled = self.columns.roll(column)
        example = rolled.node.meta.get(EXAMPLE)
        if not isinstance(example, torch.Tensor):
            if rolled.varies or not isinstance(example, torch.SymInt):
                raise StaysError(column)
        elif rolled.varies:
            example = self.columns.traced(lambda x: x[0], (rolled.node,))
        return self.take(rolled, example)

    def take(self, rolled: Rolled, example: Any) -> fx.Node:
        """Return an argument of a body."""
        node = self._placeholder(example)
        self.given[node] = rolled
        return node

    def _carry(self, column: Column) -> fx.Node | None:
        """Return the value that a column of the body had one iteration before; None for others."""
        back = range(1, len(column) // 2)
        later = ((k, known) for k in back for known in self._begun.get(column[k], ()))
        for k, known in (*later, *((1, known) for known in self._items(column))):
            if known[:-k] != column[k:] or tensor_of(known[0]) is None:
                continue
            if not are_alike(column):
                raise StaysError(column)
            node = self._placeholder(self.columns.traced(contiguous, (known[-k],)))
            self.carries[node] = StateBefore(column[0], (*column[1:], known[-k]))
            self._begun.setdefault(column[0], []).append(column)
            return node
        return None

    def _items(self, column: Column) -> list[Column]:
        """Return the values one iteration later of items of results of known calls.

        In ``h, c = cell(x[t], (h, c))`` the last c may be read nowhere.
        """
        found = arguments_of(column[1:])
        if found is None or called_name(column[1]) != "getitem" or len(found[1]) != 2:
            return []
        source, index = found[1][:2]
        for known in self._begun.get(source[0], ()):
            if known[:-1] == source and tensor_of(source[0]) is None and is_same(index):
                later = (*column[1:], self.columns.item(known[-1], index[0]))
                return [later]
        return []

    def _call(self, column: Column) -> fx.Node:
        """Return the call that stands for equal calls."""
        first, found = column[0], arguments_of(column)
        if found is None or not self.columns.draws_nothing(column[-1]):
            raise StaysError(column)
        form, columns = found
        self._begun.setdefault(first, []).append(column)
        args, kwargs = pytree.tree_unflatten([self._value(values) for values in columns], form)
        node = self.graph.create_node(first.op, first.target, args, kwargs)
        node.meta.update(first.meta)
        function = functools.partial(function_of(name_of(first) or ""), **kwargs)
        example = node.meta[EXAMPLE] = self.columns.traced(function, args)
        if not all(has_elements(example, item.meta.get(EXAMPLE)) for item in column):
            raise StaysError(column)
        return node

    def _placeholder(self, example: Any) -> fx.Node:
        node = self.graph.placeholder(f"argument_{len(self.carries) + len(self.given)}")
        node.meta[EXAMPLE] = example
        return node

    # -- the operation -----------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """Return False if something needs a gradient that torch's scan has not."""
        starts = [tensor_of(carry.start) for carry in self.carries.values()]
        given = [tensor_of(rolled.node) for rolled in self.given.values()]
        return has_gradient(starts, given, [*map(tensor_of, self.graph.nodes)])

    def arguments(self) -> list[fx.Node]:
        """Return the carries, the arguments that vary, and the others, in this order."""
        by_kind = sorted(self.given, key=lambda node: not self.given[node].varies)
        return [*self.carries, *by_kind]

    def module(self, outputs: Sequence[Column]) -> fx.GraphModule:
        """Return a body that returns the carries' next values, and others.

        Each is a copy: AOTAutograd may return a value for the gradient, too, and no two results of
        a scan may share memory. It merges equal copies, so those of carries are another call.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.arguments():
            copies[node] = graph.placeholder(node.name)
            copies[node].meta.update(node.meta)
        for node in self.carries:
            copies[node] = graph.call_function(keep_layout, (copies[node],))
            copies[node].meta.update(node.meta)
        graph.graph_copy(self.graph, copies)
        last = [carry.column for carry in self.carries.values()]
        returned: list[fx.Node] = []
        for column in (*last, *outputs):
            value = copies[self.values[column]]
            copy = contiguous if len(returned) < len(last) else torch.clone
            returned.append(graph.call_function(copy, (value,)))
            returned[-1].meta.update(value.meta)
        graph.output(tuple(returned))
        return fx.GraphModule({}, graph)


def has_gradient(
    starts: Sequence[torch.Tensor | None],
    given: Sequence[torch.Tensor | None],
    made: Sequence[torch.Tensor | None],
) -> bool:
    """Return False if something needs a gradient that torch's scan has not.

    It has none of loops that carry integers, nor of copies of complex views, and saves no symbolic
    sizes; before torch 2.13 it has none.

    Args:
        starts, given, made: what the loop carries first, what else steps take, and what they make.
    """
    if not any(x is not None and x.requires_grad for x in (*starts, *given)):
        return True
    if not SCANS_HAVE_GRADIENTS:
        return False
    carried = all(x is not None and x.is_floating_point() for x in starts)
    tensors = [x for x in made if x is not None]
    sizes = (n for x in tensors for n in (*x.shape, *x.stride()))
    return carried and not any(x.is_complex() for x in tensors) and {*map(type, sizes)} <= {int}


def without_gradient(body: fx.GraphModule) -> list[int]:
    """Return the positions of a body's arguments that no gradient of its results reaches.

    Eager gives these none; torch's scan would give them zeros.
    """

    def slopes(node: fx.Node) -> list[fx.Node]:
        made = tensor_of(node)
        ends = called_name(node) == "detach" or (made is not None and not made.is_floating_point())
        return [] if ends else node.all_input_nodes

    reached = closure(body.graph.output_node().all_input_nodes, slopes)
    arguments = body.graph.find_nodes(op="placeholder")
    return [k for k, node in enumerate(arguments) if node not in reached]


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that is contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


def keep_layout(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose gradient is contiguous, too.

    The backward scan of torch wants the gradients of a state laid out alike in all iterations.
    """
    return x.flatten().view(x.shape)


def is_contiguous(x: torch.Tensor) -> bool:
    """Return True for a tensor that is known to be contiguous."""
    dense: Any = 1
    for extent, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not (statically_known_true(extent == 1) or statically_known_true(stride == dense)):
            return False
        dense = extent * dense
    return True


# -- affine bodies ---------------------------------------------------------------------------------


_ONE, _NOTHING = Rolled(1.0, varies=False), Rolled(-0.0, varies=False)


def affine_form(body: LoopBody, states: Column) -> tuple[Rolled, Rolled]:
    """Return factor and term of a body that is affine in its only state.

    Raises:
        StaysError: if it is not, or if coefficients are no arguments of the body. Others would be
            multiplied out: where a sum cancels, ``h*s - y*s`` has not the digits of
            ``(h - y) * s``, and ``a*b`` may overflow where h is small.
    """
    made = tensor_of(states[0])
    if [carry.column for carry in body.carries.values()] != [states]:
        raise StaysError(states)
    if made is None or not made.is_floating_point():
        raise StaysError(states)
    return _line(body.values[states], body)


def _line(node: fx.Node, body: LoopBody) -> tuple[Rolled, Rolled]:
    if node in body.carries:
        return _ONE, _NOTHING
    name = _STEPS.get(called_name(node))
    follows = [isinstance(x, fx.Node) and x not in body.given for x in node.args]
    if name is None or len(node.args) != 2 or node.kwargs or sum(follows) != 1:
        raise StaysError(node)
    value, operand = node.args if follows[0] else reversed(node.args)
    factor, term = _line(value, body)  # type: ignore[arg-type]
    if term is not _NOTHING or (name == "mul" and factor is not _ONE):
        raise StaysError(node)
    other = _operand(operand, node, body)
    match name:
        case "mul":
            return other, term
        case "add":
            return factor, other
    minus = body.columns.negative
    return (factor, minus(other)) if follows[0] else (minus(factor), other)


def _operand(operand: Any, node: fx.Node, body: LoopBody) -> Rolled:
    """Return the operand that states are added to or multiplied by, as the loop's body has it."""
    made, own = tensor_of(node), tensor_of(operand)
    assert made is not None
    if type(operand) in (int, float) and made.dtype.itemsize >= 4:  # else eager takes f32
        return Rolled(operand, varies=False)
    if own is None or (own.dtype, own.device) != (made.dtype, made.device):
        raise StaysError(node)
    return body.given[operand]


def recurring(
    start: torch.Tensor, factor: tuple[Any, bool], term: tuple[Any, bool], rows: int, begun: bool
) -> torch.Tensor:
    """Return the states ``factor[t] * before + term[t]`` of some iterations.

    Args:
        factor, term: a number, or a tensor of fewer axes; and whether it has the iterations in
            front.
        begun: whether the result has the state before the first iteration, too.
    """

    def whole(value: Any, varies: bool) -> torch.Tensor:
        made = value if isinstance(value, torch.Tensor) else start.new_full((), value)
        made = made if varies else made[None]
        missing = start.dim() + 1 - made.dim()
        made = made[(slice(None), *(None,) * missing)].expand(rows, *start.shape)
        return torch.cat([start[None], made]) if begun else made  # the first factor is not read

    first = None if begun else start
    made: torch.Tensor = torch.ops.fusec.recurrence(whole(*factor), whole(*term), first, 0, False)
    return made
