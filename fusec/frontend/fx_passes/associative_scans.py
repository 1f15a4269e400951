"""Keep scans by an associative function as one operation, where it is one that is known.

``torch._higher_order_ops.associative_scan`` combines all pairs of neighbours at once, scans the
results, and combines these with every second element: on CPUs a Dynamo graph has this tree, as
slices, functions under ``vmap``, and interleaved results. For 2048 elements it has 11 levels.

Such a tree is known by what it computes, whatever its form. Each tensor is read as a list of what
its slices along the first axis are: the combination of the elements *from* one *to* another of a
tensor. A function under ``vmap`` combines two neighbouring intervals; slices, ``cat``,
``stack`` and ``pad`` move them, as they do where their bounds are moved. A tensor of all intervals
from 0 to t is the scan::

    x              0-0 1-1 2-2 3-3          pairs     0-1 2-3          scanned   0-1 0-3
    every second   0-2                      0-0 and 0-2, interleaved   0-0 0-1 0-2 0-3

Functions that are known, of elements l and, behind it, r; c is another of their fields::

    l + r      l * r      maximum(l, r)      minimum(l, r)      logaddexp(l, r)
    c[r] * l + r,  where c is a product:  h[t] = c[t] * h[t-1] + x[t]  (``ops/recurrences.py``)

Other functions stay, and so does a greatest or least element whose gradient is needed: eager's
divides it among equal ones. Combinations of floats are regrouped, as eager regroups them.

A product, also that of ``cumprod``, has a gradient that is one recurrence and divides by no factor,
and so have the extremes of ``cummax`` and ``cummin`` (``ops/recurrences.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import called_name, tensor_of, written_by
from fusec.frontend.fx_passes.dynamo_graph import call_instead, graphs_in, plain_parts
from fusec.frontend.ops.recurrences import greatest_so_far, least_so_far, product_so_far

_WITH_GRADIENT: Mapping[Any, Callable[..., Any]] = {
    torch.cumprod: product_so_far,
    "cumprod": product_so_far,
    torch.cummax: greatest_so_far,
    "cummax": greatest_so_far,
    torch.cummin: least_so_far,
    "cummin": least_so_far,
}
Term: TypeAlias = tuple[Any, ...]
"""What a function computes: ``("in", position)``, or a name and the terms of its arguments."""


def keep_scans_whole(gm: fx.GraphModule) -> None:
    """Replace the associative scans of a Dynamo graph by operations that scan, in place.

    Assumes: nodes carry ``meta["example_value"]``.
    """
    call_instead(plain_parts(gm), lambda node: _WITH_GRADIENT.get(node.target))
    for part in graphs_in(gm):
        if _Scans(part.graph).replace():
            part.recompile()


# -- the operations that scan ----------------------------------------------------------------------

_SINGLE = ("add", "mul", "maximum", "minimum", "logaddexp")
_PLAIN = (*_SINGLE, "multiply")
"""Names of the functions of two tensors that are looked through; all commute."""
_AFFINE = "recurrence"


def scanned(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return the scan of a tensor's slices, contiguous as eager's, which interleaves parts."""
    x = x.contiguous()
    match how:
        case "add":
            return x.cumsum(0, dtype=x.dtype)
        case "mul":
            return product_so_far(x, 0, dtype=x.dtype)
        case "maximum":
            return x.cummax(0).values
        case "minimum":
            return x.cummin(0).values
    return x.logcumsumexp(0)


def recurring(a: torch.Tensor, b: torch.Tensor, backwards: bool) -> torch.Tensor:
    made: torch.Tensor = torch.ops.fusec.recurrence(a.expand_as(b), b, None, 0, backwards)
    return made


# -- tensors as intervals --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Function:
    """A function by which intervals are combined.

    Attributes:
        leaves: the tensors whose elements are combined, one for each field.
        terms: what each field of the result is, of those of two elements one after the other.
    """

    leaves: tuple[fx.Node, ...]
    terms: tuple[Term, ...]

    def scan(self, field: int) -> tuple[str, tuple[fx.Node, ...]] | None:
        """Return a field's scan by name, and the tensors that it takes; None if it is unknown."""
        leaf, left, right = self.leaves[field], _field(field), _field(field + len(self.leaves))
        for name in _SINGLE:
            if self.terms[field] == _term(name, left, right):
                return name, (leaf,)
        for other in range(len(self.leaves)):
            factor = _field(other + len(self.leaves))
            product = _term("mul", _field(other), factor)
            step = _term("add", _term("mul", factor, left), right)
            if self.terms[other] == product and self.terms[field] == step:
                return _AFFINE, (self.leaves[other], leaf)
        return None


def _field(position: int) -> Term:
    return ("in", position)


def _term(name: str, *args: Term) -> Term:
    return ("mul" if name == "multiply" else name, *sorted(args, key=repr))


@dataclass(frozen=True, slots=True, eq=False)
class _Elements:
    """What the slices of a tensor are: combinations of elements of another one, its leaf.

    Attributes:
        bounds: the first element that a slice combines, and the one behind its last; equal for
            padding. Each has an axis of one for every axis of the leaf's elements.
        leaf: the tensor whose elements were combined.
        function: by which; None if each is a single element.
        field: the leaf's position among the function's.
    """

    bounds: tuple[torch.Tensor, torch.Tensor]
    leaf: fx.Node
    function: _Function | None = None
    field: int = 0

    def fits(self, function: _Function | None, leaf: fx.Node, field: int) -> bool:
        """Return True if all is combined by a function, as one of its fields."""
        own = self.function is None or (self.function == function and self.field == field)
        return own and self.leaf is leaf

    def are_in(self, node: fx.Node) -> bool:
        """Return True if a tensor has a whole element of the leaf for each slice."""
        made, leaf = tensor_of(node), tensor_of(self.leaf)
        if made is None or leaf is None or made.dim() < leaf.dim():
            return False
        rank = made.dim() - leaf.dim() + 1
        shape = (*made.shape[:rank], *(1,) * (leaf.dim() - 1))
        return made.shape[rank:] == leaf.shape[1:] and self.bounds[0].shape == shape

    def is_scan(self) -> bool:
        """Return True for all intervals of the leaf from its first element."""
        starts, ends = (bound.flatten() for bound in self.bounds)
        whole = torch.arange(1, len(ends) + 1)
        return len(ends) == _length(self.leaf) and not starts.any() and torch.equal(ends, whole)


def _length(node: fx.Node) -> int | None:
    """Return the length of a tensor's first axis; None if it has none, or it is a symbol."""
    tensor = tensor_of(node)
    length = None if tensor is None or tensor.dim() == 0 else tensor.shape[0]
    return length if isinstance(length, int) else None


class _Scans:
    """The associative scans of a graph.

    Attributes:
        known: tensor -> what its slices are.
        regions: the node that ends a function under ``vmap`` -> all of its nodes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.known: dict[fx.Node, _Elements] = {}
        self.regions: dict[fx.Node, list[fx.Node]] = {}

    def replace(self) -> bool:
        """Return True if the graph changed."""
        self._read()
        found = [node for node, elements in self.known.items() if elements.is_scan()]
        changed = [self._replace(node, self.known[node]) for node in found]
        if any(changed):
            self._erase()
        return any(changed)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        region: list[fx.Node] = []
        depth = 0
        before: fx.Node | None = None
        for node in self.graph.nodes:
            name = called_name(node)
            opens, closes = (name.endswith(f"{how}crement_nesting") for how in ("in", "de"))
            if opens and depth == 0:
                lazy = before is not None and called_name(before) == "lazy_load_decompositions"
                region = [before] if lazy and before is not None else []
            depth += opens - closes
            if depth or closes:
                region.append(node)
            if closes and depth == 0:
                self._combine(region)
            elif depth == 0 and name in _MOVES and node.op == "call_function":
                self._move(node, name)
            before = node

    def _move(self, node: fx.Node, name: str) -> None:
        """Follow a call that moves slices: do the same to their bounds."""
        known: Callable[[fx.Node], Any] = self._elements if name == "slice" else self.known.get
        parts = {given: known(given) for given in node.all_input_nodes}
        if not parts or None in parts.values() or written_by(node) != [None]:
            return
        sources = [*parts.values()]
        first = next((part for part in sources if part.function is not None), sources[0])

        def moved(k: int) -> torch.Tensor:
            how = fx.map_arg((node.args, node.kwargs), lambda given: parts[given].bounds[k])
            return node.target(*how[0], **how[1])  # type: ignore[operator, no-any-return]

        if all(part.fits(first.function, first.leaf, first.field) for part in sources):
            with contextlib.suppress(RuntimeError, IndexError):  # along axes of an element
                found = replace(first, bounds=(moved(0), moved(1)))
                if found.are_in(node):
                    self.known[node] = found

    def _elements(self, node: Any) -> _Elements | None:
        """Return the elements that each slice of a tensor combines; an unknown one is a leaf."""
        tensor, length = tensor_of(node), _length(node)
        if node in self.known or tensor is None or length is None:
            return self.known.get(node)
        starts = torch.arange(length).view(-1, *(1,) * (tensor.dim() - 1))
        return _Elements((starts, starts + 1), node)

    def _combine(self, nodes: list[fx.Node]) -> None:
        """Read a function under ``vmap`` that combines neighbours."""
        inner: dict[Any, Term] = {}
        given: list[_Elements | None] = []
        results: list[fx.Node] = []
        for node in nodes:
            match called_name(node), node.args:
                case "_add_batch_dim", (source, 0, _):
                    inner[node] = _field(len(given))
                    given.append(self._elements(source))
                case "_remove_batch_dim", (made, _, _, 0):
                    inner[node] = inner[made]
                    results.append(node)
                case name, (fx.Node() as a, fx.Node() as b) if name in _PLAIN and not node.kwargs:
                    both = a in inner and b in inner
                    inner[node] = _term(name, inner[a], inner[b]) if both else _UNKNOWN
                case _:
                    inner[node] = _UNKNOWN
            if any(written is not None for written in written_by(node)):
                return
        left, right = given[: len(results)], given[len(results) :]
        if None in given or len(left) != len(right) or not results:
            return
        pairs = [(a, b) for a, b in zip(left, right, strict=True) if a and b]
        function = _Function(tuple(a.leaf for a, _ in pairs), tuple(inner[r] for r in results))
        merged = [_merged(function, field, *pair) for field, pair in enumerate(pairs)]
        if None not in merged:
            self.regions[nodes[-1]] = nodes
            self.known.update({n: one for n, one in zip(results, merged, strict=True) if one})

    # -- writing -----------------------------------------------------------------------------------

    def _replace(self, node: fx.Node, elements: _Elements) -> bool:
        """Let an operation make a scan; return False if none does."""
        assert elements.function is not None
        found = elements.function.scan(elements.field)
        if found is None or not _is_supported(node, *found):
            return False
        name, leaves = found
        ends: list[fx.Node] = [node]
        call: tuple[Any, ...] = (scanned, (*leaves, name))
        if name == _AFFINE:
            turned = all(map(_turns, (*leaves, *node.users)))
            if turned:
                ends, leaves = [*node.users], tuple(leaf.all_input_nodes[0] for leaf in leaves)
            call = (recurring, (*leaves, turned))
        with self.graph.inserting_before(node):
            made = self.graph.call_function(*call)
        made.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        for end in ends:
            end.replace_all_uses_with(made)
            if end is not node:
                self.graph.erase_node(end)
        return True

    def _erase(self) -> None:
        """Erase what no scan needs any more; a function under ``vmap`` as a whole."""
        inside = {node for nodes in self.regions.values() for node in nodes}
        for node in reversed(list(self.graph.nodes)):
            if (region := self.regions.get(node)) is not None:
                if all(user in inside for one in region for user in one.users):
                    for one in reversed(region):
                        self.graph.erase_node(one)
            elif node in self.known and node not in inside and not node.users:
                self.graph.erase_node(node)


def _merged(function: _Function, field: int, left: _Elements, right: _Elements) -> _Elements | None:
    """Return the combinations of intervals with those that follow; None if others do."""
    (start, middle), (then, end), leaf = left.bounds, right.bounds, function.leaves[field]
    if not (left.fits(function, leaf, field) and right.fits(function, leaf, field)):
        return None
    if not torch.equal(middle, then) or (start >= middle).any() or (then >= end).any():
        return None
    return _Elements((start, end), leaf, function, field)


def _is_supported(node: fx.Node, name: str, leaves: tuple[fx.Node, ...]) -> bool:
    """Return True if an operation computes a scan with the values and gradients of eager."""
    made, *given = map(tensor_of, (node, *leaves))
    if made is None or made.device.type != "cpu" or made.dtype is torch.bool or made.is_complex():
        return False
    if any(x is None or x.dtype is not made.dtype or x.dim() != made.dim() for x in given):
        return False
    if not made.is_floating_point() and name in (_AFFINE, "logaddexp"):
        return False
    last = given[-1]
    whole = last is not None and last.shape == made.shape
    return whole and not (name in ("maximum", "minimum") and made.requires_grad)


def _turns(node: fx.Node) -> bool:
    """Return True for a call that turns a tensor's first axis around."""
    return called_name(node) == "flip" and node.args[1:] in (([0],), ((0,),), (0,))


_MOVES = ("slice", "cat", "stack", "flatten", "pad")
"""Names of functions that move slices of tensors."""
_UNKNOWN: Term = ("unknown",)
