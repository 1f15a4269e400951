"""Operands of externs and outputs of the graph: strided views of buffers, sizes, constants.

A value that is a strided window of a buffer is passed as a ``View``. It is known to be one if its
traced tensor shares storage with the buffer's, or if the offset of its index map is affine in its
axes. Any other value is first copied into a buffer with the traced strides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fusec.errors import Unsupported
from fusec.frontend.call import GraphBuilder
from fusec.frontend.forms import form_of, memory_of_value, value_of_memory, without_bit
from fusec.frontend.origin import origin_of
from fusec.frontend.shapes import TensorType
from fusec.frontend.value import (
    ONE,
    ZERO,
    ComplexValue,
    Number,
    TensorValue,
    Value,
    broadcast,
    make_axes,
    positions,
)
from fusec.ir.dtype import NumberForm
from fusec.ir.expr import Buffer, Load, index_exprs, loads
from fusec.ir.graph import (
    Argument,
    Comparison,
    InputObject,
    Junction,
    NodeConstant,
    SizeValue,
    View,
)
from fusec.ir.index import Index, index


@dataclass(frozen=True, slots=True)
class Opaque:
    """An FX node whose value only an extern can take: a subgraph, an object, a symbolic float."""

    node: fx.Node
    symbolic: bool = False


class Operands:
    """Converter of the arguments of FX nodes; shares the lines and the environment of one capture.

    Attributes:
        device: the device the graph computes on.
        run_eagerly: emits the extern of a node and returns its result.
        owners: the traced tensor that each buffer holds, element for element.
        foreign: the same for buffers without memory of their own: inputs, constants, and views that
            calls return, as of another type.
    """

    def __init__(
        self,
        lines: GraphBuilder,
        env: dict[fx.Node, Any],
        device: torch.device,
        run_eagerly: Callable[[fx.Node], Any],
    ) -> None:
        self.lines = lines
        self.env = env
        self.device = device
        self.run_eagerly = run_eagerly
        self.owners: dict[Buffer, torch.Tensor] = {}
        self.foreign: dict[Buffer, torch.Tensor] = {}
        self._views: dict[int, list[Buffer]] = {}  # by memory
        self._read_late: frozenset[fx.Node] = frozenset()  # set at the first write
        self._readers: dict[Buffer, list[fx.Node]] = {}
        self._noted = 0  # how many nodes of `env`, in its order, were scanned

    def for_lowering(self, arg: Any) -> Any:
        """Return an argument in the form that lowerings take."""
        if isinstance(arg, fx.Node):
            value = self.env[arg]
            if isinstance(value, Opaque | Comparison | Junction):
                raise Unsupported("an argument that is neither tensor nor size")
            return value
        if isinstance(arg, tuple | list):
            return tuple(map(self.for_lowering, arg))
        if isinstance(arg, torch.SymInt):
            return self.lines.sizes.index(arg)
        return arg

    def for_extern(self, user: fx.Node, arg: Any, path: tuple[str | int, ...]) -> Argument:
        """Return an argument in the form that eager kernels take.

        Raises:
            Unsupported: if neither the graph nor the FX node can supply it.
        """
        if isinstance(arg, fx.Node):
            return self._node(arg, user, path)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        if isinstance(arg, tuple | list):
            return tuple(self.for_extern(user, a, (*path, k)) for k, a in enumerate(arg))
        if isinstance(arg, dict):  # its values; the call's binding has the keys
            return tuple(self.for_extern(user, a, (*path, k)) for k, a in arg.items())
        if isinstance(arg, torch.SymInt):
            return SizeValue(self.lines.sizes.index(arg))
        return NodeConstant(user.name, path)

    def _node(self, arg: fx.Node, user: fx.Node, path: tuple[str | int, ...]) -> Argument:
        value = self.env[arg]
        match value:
            case Value() | ComplexValue():
                view = self._without_copy(value, arg.meta["val"])
                if view is None or not self._may_be_read_there(view, arg, user):
                    return self.copy(arg, without_bit(form_of(arg.meta["val"])))
                return view
            case Index():
                return value.const if value.is_constant else SizeValue(value)
            case tuple():
                return tuple(self._node_item(arg, k) for k in range(len(value)))
            case Comparison() | Junction():
                return value
            case Opaque(symbolic=True) | Number():
                raise Unsupported("a symbolic float or condition")
            case Opaque() if value.node.op == "get_attr":
                return NodeConstant(user.name, path)
            case Opaque() if value.node.op == "placeholder":
                return InputObject(value.node.name)
            case Opaque():
                raise Unsupported("a value that is neither tensor nor size")
            case _:
                return value  # type: ignore[no-any-return]

    def _may_be_read_there(self, view: View, arg: fx.Node, user: fx.Node) -> bool:
        """Return False if ``user`` returns a view of a copy that has no memory yet.

        ``x * 1`` is lowered to loads of ``x``, which suffices for a user that computes with it. But
        a view of it must not alias ``x``, which may be written, or returned as well, and a window
        that is replaced counts its offset from where memory begins.
        """
        traced, made = arg.meta["val"], user.meta.get("val")
        placed = user.target is torch.ops.aten.as_strided_scatter.default
        if not placed and not (isinstance(made, torch.Tensor) and share_memory(made, traced)):
            return True
        owner = self.owners.get(view.buffer)
        return owner is None or share_memory(owner, traced)

    def _node_item(self, arg: fx.Node, position: int) -> Argument:
        item = self.env[arg][position]
        if not isinstance(item, TensorValue):
            raise Unsupported("a tuple of things that are not tensors")
        traced = arg.meta["val"][position]
        view = self._without_copy(item, traced)
        return view or self._copy(item, traced, arg, without_bit(form_of(traced)))[1]

    def _without_copy(self, value: TensorValue, traced: torch.Tensor) -> View | None:
        """Return what an eager kernel may read: with the traced bit, or the same values without."""
        view, form = self._view(value, traced), form_of(traced)
        if view is not None or not form.has_bit:
            return view
        return self._window(value, traced, without_bit(form))

    # -- windows ----------------------------------------------------------------------------------

    def window(self, node: fx.Node) -> View:
        """Return a node's tensor as a view with the traced strides, copying it if necessary."""
        traced = node.meta["val"]
        return self._view(self.env[node], traced) or self.copy(node, form_of(traced))

    def copy(self, node: fx.Node, form: NumberForm) -> View:
        """Emit a copy of a node's tensor, which replaces the node's value from here on."""
        traced = node.meta["val"]
        if traced.device != self.device and not self.env[node].reads_memory:
            self.env[node] = self.run_eagerly(node)
            return self.window(node)
        self.env[node], view = self._copy(self.env[node], traced, node, form)
        self._note_reader(node)
        return view

    def _view(self, value: TensorValue, traced: torch.Tensor) -> View | None:
        return self._shared(value, traced) or self._window(value, traced, form_of(traced))

    def _window(self, value: TensorValue, traced: torch.Tensor, form: NumberForm) -> View | None:
        return strided_window(memory_of_value(value, form), self.lines.sizes.tensor(traced), form)

    def _shared(self, value: TensorValue, traced: torch.Tensor) -> View | None:
        """Return the view if the traced tensor shares its buffer's storage, else None."""
        form = form_of(traced)
        buffer = memory_of_value(value, form).buffer
        owner = None if buffer is None else self.owners.get(buffer)
        if buffer is None or owner is None:
            return None
        home = View(buffer, buffer.shape, buffer.strides, ZERO, form)
        if owner is traced:
            return home
        if not have_one_type(owner, traced) or not share_memory(owner, traced):
            return None
        return self.window_of(home, owner, traced)

    def window_of(self, home: View, owner: torch.Tensor, traced: torch.Tensor) -> View:
        """Return the view of a tensor in the traced storage of ``owner``, which is at ``home``."""
        kind, form = self.lines.sizes.tensor(traced).memory, form_of(traced)
        offset = self._start(traced) - self._start(owner)
        return View(home.buffer, kind.shape, kind.strides, home.offset + offset, form)

    def _start(self, traced: torch.Tensor) -> Index:
        """Return the offset of a traced tensor in its storage, in real numbers."""
        offset = self.lines.sizes.index(traced.storage_offset())
        return offset * 2 if form_of(traced).is_complex else offset

    def _copy(
        self, value: TensorValue, traced: torch.Tensor, node: fx.Node, form: NumberForm
    ) -> tuple[TensorValue, View]:
        """Define a buffer with the traced strides and the value's contents, in a form.

        Where axes have stride 0 (an expand) the buffer has one element along them.
        """
        kind = self.lines.sizes.tensor(traced).memory
        shape = tuple(
            ONE if s is ZERO else e for e, s in zip(kind.shape, kind.strides, strict=True)
        )
        strides = tuple(ONE if s is ZERO else s for s in kind.strides)
        compact = replace(kind, shape=shape, strides=strides)
        buffer = self.lines.buffer(node.name, compact, form)
        stored = self.lines.define(buffer, memory_of_value(value, form).at, origin_of(node))
        axes = make_axes(kind.shape)
        at = broadcast(positions(axes), shape)
        spread = Value(kind.shape, kind.dtype, axes, stored.at(at))
        if shape == kind.shape and form is form_of(traced):
            self.owners[buffer] = traced
        return value_of_memory(spread, form), View(buffer, kind.shape, kind.strides, ZERO, form)

    # -- aliasing ---------------------------------------------------------------------------------

    def returned(self, buffer: Buffer, made: torch.Tensor, given: Iterable[torch.Tensor]) -> None:
        """Record a result of a call, which may be a view of one of its arguments."""
        self.owners[buffer] = made
        if any(share_memory(made, one) for one in given):
            self.foreign[buffer] = made
            self._views.setdefault(_memory_of(made), []).append(buffer)

    def copy_before_write(self, target: fx.Node, write: fx.Node) -> None:
        """Copy the values that are loaded from ``target``'s buffer after ``write`` overwrites it.

        Views that share its traced storage are not copied: they see the write, as in eager mode.
        """
        if not self._read_late:  # only what the first write, or a node after it, takes is read late
            late = itertools.dropwhile(lambda node: node is not write, write.graph.nodes)
            self._read_late = frozenset(arg for node in late for arg in node.all_input_nodes)
        for node in itertools.islice(self.env, self._noted, None):
            self._note_reader(node)
        self._noted = len(self.env)
        changed = {self._buffer_of(target), *self._views.get(_memory_of(target.meta["val"]), ())}
        readers = (node for b in changed if b is not None for node in self._readers.get(b, ()))
        for node in dict.fromkeys(readers):
            buffer = self._buffer_of(node)
            if node is target or buffer not in (None, *changed):
                continue  # copied since
            if buffer is None or self._shared(self.env[node], node.meta["val"]) is None:
                self.copy(node, form_of(node.meta["val"]))

    def _buffer_of(self, node: fx.Node) -> Buffer | None:
        """Return the buffer in which the memory of a node's tensor is a window, or None."""
        return memory_of_value(self.env[node], form_of(node.meta["val"])).buffer

    def _note_reader(self, node: fx.Node) -> None:
        value = self.env[node]
        if node in self._read_late and isinstance(value, TensorValue):
            for buffer in dict.fromkeys(load.buffer for load in loads(value.exprs)):
                self._readers.setdefault(buffer, []).append(node)


def _memory_of(traced: torch.Tensor) -> int:
    """Return a key of a traced tensor's storage; 0 for what has none."""
    return int(traced.untyped_storage()._cdata) if traced.layout is torch.strided else 0


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two traced tensors share one storage."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a is b
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def have_one_type(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two traced tensors have numbers of one type in memory."""
    return a.dtype.to_real() is b.dtype.to_real()


def strided_window(value: Value, traced: TensorType, form: NumberForm) -> View | None:
    """Return what is in memory as a view if its index map is affine with the traced strides.

    A complex one needs memory in which pairs of numbers are aligned.
    """
    if not isinstance(value.expr, Load) or value.expr.guard is not None or not traced.is_strided:
        return None
    load, kind = value.expr, traced.memory
    if any(True for i in load.indices for _ in index_exprs(i)):
        return None
    offset = load.buffer.offset(load.indices)
    for axis, extent, stride in zip(value.axes, kind.shape, kind.strides, strict=True):
        step = offset.coefficient(axis)
        if step is None or (step is not stride and extent is not ONE):
            return None
        offset = offset - step * index(axis)
    if offset.axes or (form.is_complex and offset // 2 * 2 is not offset):
        return None
    return View(load.buffer, kind.shape, kind.strides, offset, form)
