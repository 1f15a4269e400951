"""Lower an ``fx.GraphModule`` of functional ATen, as AOTAutograd passes it, to a ``Graph``.

Each FX node becomes one of: nothing (views, constants, sizes, elements of tuples), one or several
``Def``s (its lowering in the registry), or an ``Extern`` with the reason why.

Assumes: nodes carry ``meta["val"]`` (FakeTensors, SymInts); the graph is functional but for
``copy_`` into inputs at its end. Never evaluates a condition on a SymInt, which would add a guard.

Worked example: ``permute`` of a weight, ``mm``, ``add`` become::

    mm = extern mm.default(x, w[768, 3072 : 1, 768 + 0])    # contraction: runs in the library
    add[i0, i1] = mm[i0, i1] + b[i1]
"""

from __future__ import annotations

import importlib
import operator
import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusec.errors import InvalidIR, Unsupported
from fusec.frontend import ops
from fusec.frontend.aliasing.results import PLACED, results_of
from fusec.frontend.aot.refusals import may_refuse
from fusec.frontend.call import AtenCall, GraphBuilder
from fusec.frontend.carried_loops import is_loop, lower_loop
from fusec.frontend.effects import effect_of, parts_of_inputs
from fusec.frontend.fallbacks import computes_with, is_impure, reason_for
from fusec.frontend.forms import form_of, memory_of_value, value_of_memory
from fusec.frontend.fx_passes.fx_nodes import DECISIONS, aten, is_tangent, tensor_of
from fusec.frontend.fx_passes.packing import PACKED, PANELS
from fusec.frontend.operands import Opaque, Operands, share_memory
from fusec.frontend.ops.complex_tensors import complex_lowering
from fusec.frontend.ops.literals import LIFTS, literal, numbers_of
from fusec.frontend.ops.products import by_panels
from fusec.frontend.ops.registry import Lowering, find_lowering
from fusec.frontend.origin import extern_name, op_name, origin_of
from fusec.frontend.shapes import TensorType
from fusec.frontend.value import Number, TensorValue, Value, is_whole, whole
from fusec.ir.dtype import NumberForm
from fusec.ir.expr import Buffer, Expr, Load, reach, reductions
from fusec.ir.extern import NodeOfBuffer
from fusec.ir.graph import (
    Argument,
    BoundSize,
    Comparison,
    Constant,
    Def,
    Extern,
    Graph,
    InputObject,
    Line,
    SizeMinimum,
    sizes_in,
)
from fusec.ir.index import Index, Size, index
from fusec.ir.verify import verify_expr
from fusec.torch_interior import pytree, written_arguments

for _module in pkgutil.iter_modules(ops.__path__):  # importing one registers its lowerings
    importlib.import_module(f"{ops.__name__}.{_module.name}")


def capture(gm: fx.GraphModule, name: str, lines: GraphBuilder) -> tuple[Graph, NodeOfBuffer]:
    """Return the graph of ``gm`` in index notation, and the node whose value each buffer holds.

    Args:
        lines: takes its definitions; they are for its device, and by its limits.
    Raises:
        Unsupported: if the graph as a whole cannot be captured, such as for data-dependent shapes;
            the caller runs it eagerly.
    """
    walk = _Capture(gm, lines)
    return walk.run(name), walk.held


class _Capture:
    """The state of one capture: the value that each FX node was lowered to."""

    def __init__(self, gm: fx.GraphModule, lines: GraphBuilder) -> None:
        self.gm = gm
        self.lines = lines
        self.env: dict[fx.Node, Any] = {}
        self.types: dict[fx.Node, tuple[TensorType, ...]] = {}
        self.inputs: list[Buffer | Size | InputObject | None] = []
        self.outputs: tuple[Argument, ...] = ()
        self.given: set[str] = set()
        self.extents: set[Index] = set()
        self.held: dict[Buffer, tuple[str, int | None]] = {}
        self.device = main_device(gm)
        self.parts = parts_of_inputs(gm, lines.fusion.part_ratio)
        self.operands = Operands(self.lines, self.env, self.device, self._run_eagerly)

    def run(self, name: str) -> Graph:
        self._lower_nodes()
        self.outputs = results_of(self.operands, self.gm.graph.output_node())
        lines = self._with_minima()
        if missing := sorted(self.lines.sizes.needed() - self.given):
            raise Unsupported(f"the size {missing[0]} is not given by any input or call")
        decisions = tuple(d for n in self.gm.graph.nodes for d in n.meta.get(DECISIONS, ()))
        given = zip(self.gm.graph.find_nodes(op="placeholder"), self.inputs, strict=True)
        tangents = tuple(b for n, b in given if is_tangent(n) and isinstance(b, Buffer))
        return Graph(name, tuple(self.inputs), tuple(lines), self.outputs, decisions, tangents)

    def _lower_nodes(self) -> None:
        for node in self.gm.graph.nodes:
            match node.op:
                case "placeholder":  # a loop gives its body values
                    if node not in self.env:
                        self.inputs.append(self._placeholder(node))
                case "get_attr":
                    self.env[node] = self._attribute(node)
                case "call_function":
                    self.env[node] = self._call(node)
                case "output":
                    pass
                case _:
                    raise Unsupported(f"an FX node of kind {node.op}")

    def _lower_body(
        self, part: fx.GraphModule, lines: GraphBuilder, given: Iterable[Any]
    ) -> tuple[Any, ...]:
        """Lower a loop's body at given values, and return its results; lines go into ``lines``."""
        body = _Capture(part, lines)
        body.given, body.extents = self.given, self.extents
        body.env.update(zip(part.graph.find_nodes(op="placeholder"), given, strict=True))
        body._lower_nodes()
        (returned,) = part.graph.output_node().args
        made = returned if isinstance(returned, tuple | list) else (returned,)
        return tuple(map(body.operands.for_lowering, made))

    # -- leaves -----------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Buffer | Size | InputObject | None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and not self.lines.sizes.is_ragged(value):
            self.env[node] = self.lines.sizes.index(value)
            size = self.lines.sizes.symbol(value)
            self.given.update(() if size is None else (size.name,))
            return size
        if not isinstance(value, torch.Tensor):
            known = isinstance(value, int | float | str)
            self.env[node] = value if known else Opaque(node)
            return InputObject(node.name) if node.users and not known else None
        buffer = self._foreign(node, value)
        self.extents.update(buffer.shape)
        if not node.users:
            return None
        self.given.update(size.name for e in buffer.shape if (size := e.as_size()) is not None)
        return buffer

    def _attribute(self, node: fx.Node) -> Any:
        value = self._held_by(node)
        if not isinstance(value, torch.Tensor):
            return Opaque(node)
        numbers = numbers_of(node, self.gm)
        if numbers is not None:
            return literal(self.lines.sizes.tensor(value), numbers)
        return self._constant(node)

    def _foreign(self, node: fx.Node, value: torch.Tensor) -> Buffer:
        """Return the buffer of a tensor that the graph is given, which becomes its node's value."""
        form = form_of(node.meta["val"])
        buffer = self.lines.buffer(node.name, self._memory(node.meta["val"]), form)
        self.env[node] = value_of_memory(whole(buffer), form)
        self.operands.owners[buffer] = self.operands.foreign[buffer] = value
        return buffer

    def _memory(self, traced: torch.Tensor) -> TensorType:
        return self.lines.sizes.tensor(traced).memory

    def _held_by(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        return operator.attrgetter(str(node.target))(self.gm) if value is None else value

    def _constant(self, node: fx.Node) -> TensorValue:
        buffer = self._foreign(node, self._held_by(node))
        self.lines.nodes.append(Constant(node.name, buffer, origin_of(node)))
        value: TensorValue = self.env[node]
        return value

    # -- calls ------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            if node.meta.get("unbacked_bindings") or self._is_new(value):
                return self._extern(node, value)
            return self.lines.sizes.index(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            try:
                if isinstance(value, torch.SymBool):
                    return self.lines.sizes.condition(value)
                return Number(self.lines.sizes.number(value))
            except Unsupported:
                return Opaque(node, symbolic=True)
        if node.target is aten._assert_scalar.default and self._holds(node.args[0]):
            return None
        if node.target is operator.getitem:
            source, position = node.args
            return self.env[source][position]  # type: ignore[index]
        if "val" not in node.meta and node.users:
            raise Unsupported(f"{op_name(node.target)}: results that were not traced")
        results = self._types_of(node)
        lowering = find_lowering(node.target, alone=self.lines.alone)
        if self._is_complex(node, results):
            lowering = complex_lowering(node.target, lowering, results)
        if is_loop(node):
            return self._loop(node, value)
        reason = self._obstacle(node, results)
        if reason is None and lowering is not None:
            reason = may_refuse(node.target, node.args, node.kwargs)
            if reason is None and any(index(0) in k.shape for k in results):
                reason = "an empty tensor"
            if reason is None and lowering.choice and self.lines.eager_choices:
                reason = "a choice that torch leaves open: eager's"
        if reason is not None or lowering is None or not results:
            return self._extern(node, value, reason)
        parts = tuple(kind.part for kind in results)
        call = AtenCall(self.lines, node.name, parts, origin_of(node))
        operands = (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node))
        kinds = [kind for one in operands for kind in self._types_of(one)]
        preferred = lowering.library and lowering.library(call, *kinds)
        if preferred is not None:
            return self._extern(node, value, preferred, lowering)
        mark = len(self.lines.nodes)
        try:
            return self._lower(node, call, lowering)
        except Unsupported as problem:
            del self.lines.nodes[mark:]
            return self._extern(node, value, problem.reason)

    def _loop(self, node: fx.Node, value: Any) -> Any:
        """Lower a loop that carries state; what cannot be lowered stays torch's operation."""
        try:
            parts = [self._held_by(arg) for arg in node.args if _is_part(arg)]
            made = lower_loop(node, parts, self.operands, self._lower_body)
        except Unsupported as problem:
            return self._extern(node, value, f"{reason_for(node)}: {problem.reason}")
        self._own(made, value, (node.name, None))
        return made

    def _is_new(self, number: torch.SymInt) -> bool:
        """Return True for a symbol that is not bound yet: the start of a slice (torch 2.11)."""
        size = self.lines.sizes.symbol(number)
        return size is not None and size.name not in self.given

    def _holds(self, asserted: Any) -> bool:
        """Return True for an assertion that always holds: an extent is not negative."""
        condition = self.env[asserted] if isinstance(asserted, fx.Node) else asserted
        if isinstance(condition, Comparison) and condition.sign == ">=":
            return condition.left in self.extents and condition.right is index(0)
        return condition is True

    def _lower(self, node: fx.Node, call: AtenCall, lowering: Lowering) -> Any:
        args = [self.operands.for_lowering(a) for a in node.args]
        kwargs = {k: self.operands.for_lowering(a) for k, a in node.kwargs.items()}
        made = lowering.rule(call, *args, **kwargs)
        if not call.outputs and not any(kind.overlaps for kind in call.results):
            self._own(made, node.meta["val"], (node.name, None))
        return made

    def _own(self, made: Any, traced: Any, held: tuple[str, int | None]) -> None:
        """Record the traced tensor that each newly defined buffer holds."""
        if isinstance(made, tuple):
            for position, (item, part) in enumerate(zip(made, traced, strict=True)):
                self._own(item, part, (held[0], position))
            return
        if made is None:
            return  # a gradient that is not wanted
        memory = memory_of_value(made, form_of(traced))
        buffer = memory.buffer
        if buffer is not None and is_whole(memory):
            self.operands.owners.setdefault(buffer, traced)
            self.held.setdefault(buffer, held)

    def _run_eagerly(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._constant(node)
        return self._extern(node, node.meta["val"], "a number on another device")

    def _is_complex(self, node: fx.Node, results: tuple[TensorType, ...]) -> bool:
        """Return True if an operand or a result is complex."""
        kinds = (kind for source in node.all_input_nodes for kind in self._types_of(source))
        if any(kind.is_complex for kind in (*results, *kinds)):
            return True
        return any(isinstance(arg, complex) for arg in (*node.args, *node.kwargs.values()))

    def _obstacle(self, node: fx.Node, results: tuple[TensorType, ...]) -> str | None:
        """Return why a call cannot be lowered, whatever its operation, or None."""
        if not results:
            return None
        if node.meta.get("unbacked_bindings"):
            return "a result that depends on data"
        if node in self.parts:
            return "writes a part of an input"
        if node.target is aten.as_strided.default:
            if free_unbacked_symbols(node.meta["val"]):
                return "a strided window that depends on data: eager checks that it lies in memory"
            if self._starts_late(node.args[0]) or self._is_placed(node):
                return "a strided window into memory around the tensor"
        if node.target in PLACED and self._may_start_late(node) and self._is_returned(node):
            return "a result that is found by its place in memory"
        kinds = list(results)
        for source in node.all_input_nodes:
            value = self.env.get(source)
            if isinstance(value, TensorValue) and value.reads_memory:
                kinds.extend(self._types_of(source))
        if any(k.is_opaque or not computes_with(node.target, k.dtype) for k in kinds):
            return "a type that only eager kernels compute with"
        if node.target in LIFTS and len(kinds) == len(results):
            return None  # a lifted literal belongs to no device
        if node.all_input_nodes and any(k.device != self.device for k in kinds):
            return "tensors on another device"
        return None

    def _starts_late(self, node: Any) -> bool:
        """Return True if a tensor's storage offset is not known to be 0."""
        offset = self.lines.sizes.index(node.meta["val"].storage_offset())
        return offset is not index(0)

    def _may_start_late(self, node: fx.Node) -> bool:
        """Return True unless a tensor's storage offset is 0 in each call: no guard covers it."""
        symbolic = any(isinstance(n, torch.SymInt) for n in node.meta["val"].shape)
        return symbolic or self._starts_late(node)

    def _is_placed(self, window: fx.Node) -> bool:
        """Return True for a window with an offset of its own, into memory that the graph is given.

        The offset is from the memory's first element, and no guard covers where an input begins.
        """
        of = window.args[0].meta["val"]  # type: ignore[union-attr]
        given = (n for n in self.gm.graph.nodes if n.op in ("placeholder", "get_attr"))
        held = filter(lambda v: isinstance(v, torch.Tensor), map(self._held_by, given))
        explicit = window.args[3:] or window.kwargs.get("storage_offset") is not None
        return bool(explicit) and any(share_memory(value, of) for value in held)

    def _is_returned(self, node: fx.Node) -> bool:
        """Return True if an output of the graph shares its storage with a node's tensor."""
        found = [item.meta.get("val") for item in node.graph.output_node().all_input_nodes]
        own = node.meta["val"]
        return any(isinstance(v, torch.Tensor) and share_memory(v, own) for v in found)

    def _types_of(self, node: fx.Node) -> tuple[TensorType, ...]:
        """Return the types of the tensors that a node returns."""
        if node not in self.types:
            value = node.meta.get("val")
            items = list(value.values()) if isinstance(value, dict) else value
            items = items if isinstance(items, tuple | list) else (items,)
            tensors = (item for item in items if isinstance(item, torch.Tensor))
            self.types[node] = tuple(map(self.lines.sizes.tensor, tensors))
        return self.types[node]

    def _extern(
        self, node: fx.Node, value: Any, reason: str | None = None, lowering: Lowering | None = None
    ) -> Any:
        """Emit a call of the eager kernel and return its results.

        Args:
            reason: why the call is kept, if not for its operation's default reason.
            lowering: the rule that gives the call's decomposition.
        """
        for written in written_arguments(node):
            self.operands.copy_before_write(written, node)
        args: Any = self.operands.for_extern(node, node.args, ("args",))
        named: Any = self.operands.for_extern(node, node.kwargs, ("kwargs",))
        kwargs = tuple(zip(node.kwargs, named, strict=True))
        if node.target is aten.copy_.default:
            outputs: tuple[Buffer | None, ...] = ()
            result, many = self.env[node.args[0]], False  # type: ignore[index]
            memory = memory_of_value(result, form_of(node.meta["val"]))
            if memory.buffer is not None and is_whole(memory):
                self.held[memory.buffer] = node.name, None
        else:
            keys = tuple(value) if isinstance(value, dict) else ()
            many = isinstance(value, tuple | list | dict)
            values = [value[k] for k in keys] or (list(value) if many else [value])
            outputs = tuple(self._output(node, v, k, len(values)) for k, v in enumerate(values))
            for position, buffer in enumerate(outputs):
                if buffer is not None:
                    self.held[buffer] = node.name, position if many else None
            wrapped = tuple(
                None if b is None else value_of_memory(whole(b), b.form) for b in outputs
            )
            result = dict(zip(keys, wrapped, strict=True)) if keys else wrapped
            result = result if many else wrapped[0]
            if isinstance(value, torch.SymInt):
                result = self.lines.sizes.index(value)
            if value is None:
                outputs = ()
        self.lines.nodes.append(
            Extern(
                node.name,
                extern_name(node.target),
                args,
                kwargs,
                outputs,
                reason_for(node) if reason is None else reason,
                origin_of(node),
                effect_of(node.target, args, kwargs, self.lines.sizes, self._packed(node)),
                is_impure(node),
                many,
                () if lowering is None else self._decomposition(node, outputs, lowering),
                self._bound_sizes(values if outputs else [value]),
            )
        )
        return result

    def _packed(self, node: fx.Node) -> dict[str, Constant]:
        """Return a product's packed weights as constants, by the library that takes each."""
        return {
            library: Constant(held.name, self.env[held].buffer, origin_of(node))
            for library, held in node.meta.get(PACKED, {}).items()
        }

    def _decomposition(
        self, node: fx.Node, outputs: tuple[Buffer | None, ...], lowering: Lowering
    ) -> tuple[Def, ...]:
        """Return the decomposition of a kept call.

        Empty where operand sizes are not known to be as the operation requires: the eager kernel
        checks them when it runs.
        """
        call = AtenCall(self.lines, "", self.types[node], origin_of(node), outputs)
        mark = len(self.lines.nodes)
        panels = node.meta.get(PACKED, {}).get(PANELS)
        if panels is not None:
            lowering = replace(lowering, rule=partial(by_panels, panels=self.env[panels]))
        try:
            self._lower(node, call, lowering)
            decomposition = tuple(line for line in self.lines.nodes[mark:] if isinstance(line, Def))
            for line in decomposition:
                verify_expr(line.expr, frozenset(line.axes), line.buffer.name)
        except (Unsupported, InvalidIR):
            return ()
        finally:
            del self.lines.nodes[mark:]
        return decomposition

    def _bound_sizes(self, values: list[Any]) -> tuple[BoundSize, ...]:
        """Return the sizes that a call's results bind: no input or earlier call gives them."""
        found: list[BoundSize] = []
        for position, value in enumerate(values):
            axes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
            for axis, number in axes:
                size = None
                if isinstance(number, torch.SymInt):
                    size = self.lines.sizes.symbol(number)
                if size is not None and size.name not in self.given:
                    self.given.add(size.name)
                    if axis is not None:
                        self.extents.add(index(size))
                    found.append(BoundSize(size, position, axis))
        return tuple(found)

    def _output(self, node: fx.Node, value: Any, position: int, count: int) -> Buffer | None:
        if isinstance(value, tuple | list):
            raise Unsupported(f"nested results of {op_name(node.target)}")
        if not isinstance(value, torch.Tensor):
            return None
        name = node.name if count == 1 else f"{node.name}_{position}"
        buffer = self.lines.buffer(name, self._memory(value), form_of(value))
        given = (tensor_of(argument) for argument in node.all_input_nodes)
        self.operands.returned(buffer, value, (one for one in given if one is not None))
        return buffer

    def _with_minima(self) -> list[Line]:
        """Return the lines, with each ``SizeMinimum`` inserted once its arguments are known."""
        waiting = list(self.lines.sizes.minima.values())
        unknown = {size for line in self.lines.nodes for size in _given(line)} | set(waiting)
        nodes: list[Line] = []
        for line in (None, *self.lines.nodes):
            if line is not None:
                nodes.append(line)
                unknown.difference_update(_given(line))
            while ready := [e for e in waiting if unknown.isdisjoint(sizes_in(e.args))]:
                nodes.extend(map(SizeMinimum, ready))
                unknown.difference_update(ready)
                waiting = [e for e in waiting if e not in ready]
        return nodes


class NodeDefinitions(_Capture):
    """What single nodes of a graph compute, each lowered alone when it is asked for.

    A node reads one buffer for each tensor that it takes. A tensor that is computed from at most
    one other, and reads no memory, such as one of zeros, is written in the expressions instead.

    Attributes:
        node_of: buffer -> the node whose tensor it holds.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, GraphBuilder(alone=True))
        self.node_of: dict[Buffer, fx.Node] = {}
        self._known: dict[fx.Node, tuple[Def, ...]] = {}

    def of(self, node: fx.Node) -> tuple[Def, ...]:
        """Return the definitions of a node, the last of its result; () if it is opaque."""

        def lowers(one: fx.Node) -> bool:
            return one not in self._known and (one is node or len(one.all_input_nodes) < 2)

        for one in reach((node,), lambda one: one.all_input_nodes if lowers(one) else ()):
            if one not in self.env:
                self.env[one] = self._assumed(one)
            if lowers(one):
                self._known[one] = self._defined(one)
        return self._known[node]

    def value(self, node: fx.Node) -> Any:
        """Return a node's value as others take it: a tensor is all of a buffer, or constant."""
        self.of(node)
        return self.env[node]

    def inside(self, load: Load) -> Expr:
        """Return the expression of a loaded element; the load itself if that is not pointwise."""
        node = None if load.guard is not None else self.node_of.get(load.buffer)
        lines = () if node is None else self.of(node)
        if len(lines) != 1 or reductions(lines[0].expr):
            return load
        return lines[0].expr.substitute(dict(zip(lines[0].axes, load.indices, strict=True)))

    def _assumed(self, node: fx.Node) -> Any:
        """Return a node's value as an argument: a tensor is all of a buffer of its own."""
        value = node.meta.get("val")
        try:
            if isinstance(value, torch.SymInt):
                return self.lines.sizes.index(value)
            if isinstance(value, torch.Tensor):
                form = NumberForm.COMPLEX if form_of(value).is_complex else NumberForm.PLAIN
                buffer = self.lines.buffer(node.name, self._memory(value), form)
                self.node_of[buffer] = node
                return value_of_memory(whole(buffer), form)
        except Unsupported:
            pass
        return Opaque(node)

    def _defined(self, node: fx.Node) -> tuple[Def, ...]:
        own, mark = self.env[node], len(self.lines.nodes)
        called = node.op == "call_function" and node.target is not operator.getitem
        if not called or not isinstance(own, Value) or own.buffer is None:
            return ()
        try:
            made = self._call(node)
        except Unsupported:
            return ()
        found: list[Def] = []
        for line in self.lines.nodes[mark:]:
            match line:
                case Extern(decomposition=()):
                    return ()
                case Extern():
                    found.extend(line.decomposition)
                case Def():
                    found.append(line)
        if found and made.buffer is found[-1].buffer:
            return (*found[:-1], replace(found[-1], buffer=own.buffer))
        if not made.reads_memory:
            self.env[node] = made
        return (*found, Def(own.buffer, made.axes, made.expr))


def _is_part(argument: Any) -> TypeGuard[fx.Node]:
    """Return True for a subgraph that an operation calls."""
    return isinstance(argument, fx.Node) and argument.op == "get_attr"


def _given(line: Line) -> set[Size]:
    return {bound.size for bound in line.bound_sizes} if isinstance(line, Extern) else set()


def main_device(gm: fx.GraphModule) -> torch.device:
    """Return the device the graph computes on: the first that is not the CPU, else the CPU."""
    for node in gm.graph.nodes:
        for item in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(item, torch.Tensor) and item.device.type not in ("cpu", "meta"):
                return item.device
    return torch.device("cpu")
