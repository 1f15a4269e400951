"""Lines and steps that are not index notation: calls of eager kernels, constants, size arithmetic.

An ``Extern`` names the kernel that it calls. Beyond its arguments, passes know its ``effect``, one
of a closed set that the frontend chooses from (``frontend/effects.py``)::

    effect ::= Unknown | Fresh | Pending      results: maybe views; new memory; asynchronous
             | Alias                          results are views of arguments; no kernel runs
             | Product                        args[0] @ args[1]
             | BiasedProduct                  args[0] + args[1] @ args[2]
             | Convolution                    a call that may apply more to its result
             | CopyInto | WriteInto           args[0] is written: all of it, or a part
             | AddProduct                     args[1] @ args[2] is added to args[0]
             | WindowUpdate | Scatter         args[0] with a part replaced, as a new tensor

No rewrite depends on the name of an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from fusec.ir.argument import (
    Argument,
    Comparison,
    Junction,
    View,
    argument_indices,
    argument_views,
    map_views,
    whole_view,
)
from fusec.ir.atoms import Minimum
from fusec.ir.definition import NOWHERE, Def, Origin, by_name, sizes_in
from fusec.ir.expr import Buffer
from fusec.ir.index import Index, Size, index, is_nonnegative

NodeOfBuffer: TypeAlias = Mapping[Buffer, tuple[str, int | None]]
"""Buffer -> the name of the node whose value it holds, and the index of the result if it has
several. An input that is written maps to the ``copy_`` that writes it at the graph's end."""

# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing more is known of the call: a result may be a view of an argument."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The results are views of arguments: no kernel runs, and no memory moves."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """The results have memory of their own."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The results are sent by other ranks: they may be read once another call has awaited them."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Another library's call of ``(a, w, bias or None, *rest)`` that returns ``a @ w.T + bias``.

    The bias must be contiguous, and the sums must have at least one term.

    Attributes:
        library: its name in reports.
        target: the call's printed name.
        rest: its arguments after the bias.
        packed: the constant that holds ``w`` in the library's own layout, and is passed instead.
        sized: packed for one number of rows; the call takes ``w``, too, and that number last.
    """

    library: str
    target: str
    rest: tuple[Argument, ...]
    packed: Constant | None = None
    sized: bool = False

    def arguments(self, a: View, w: View, bias: Argument) -> tuple[Argument, ...]:
        """Return the arguments of the call."""
        if self.packed is None:
            return (a, w, bias, *self.rest)
        if self.sized:
            return (a, self.packed.view, w, bias, *self.rest, a.shape[0].const)
        return (a, self.packed.view, bias, *self.rest)


@dataclass(frozen=True, slots=True)
class Product:
    """The result, in memory of its own, is the product of two matrices: ``args[0] @ args[1]``.

    Attributes:
        biased: the call of ``(bias, a, b)`` that returns ``bias + a @ b``.
        added: the call of ``(total, a, b)`` that adds ``a @ b`` to ``total`` in place.
        linear: calls of other libraries that return the same.
        panels: the constant that holds ``args[1]`` in panels for the decomposition, if any.
    """

    biased: str
    added: str
    linear: tuple[Linear, ...] = ()
    panels: Constant | None = None


@dataclass(frozen=True, slots=True)
class BiasedProduct:
    """The result, in memory of its own, is ``args[0] + args[1] @ args[2]``.

    Attributes:
        linear: calls of other libraries that return the same.
    """

    linear: tuple[Linear, ...] = ()


@dataclass(frozen=True, slots=True)
class Convolution:
    """The result, in memory of its own, is a convolution of ``args[0]`` with possible epilogues.

    Attributes:
        activations: by name, the last arguments of the call that make it apply the activation.
        added: the call of ``(x, other, ...)`` that adds a tensor like the result to it.
    """

    activations: tuple[tuple[str, tuple[Argument, ...]], ...]
    added: str


@dataclass(frozen=True, slots=True)
class CopyInto:
    """``args[1]`` is written over ``args[0]``."""


@dataclass(frozen=True, slots=True)
class Window:
    """A slice (the part) of a tensor (the whole) along ``axis``, from ``start`` on.

    Without ``step`` it is one position, and the part lacks that axis.
    """

    axis: int
    start: Index
    step: Index | None

    def indices(self, at: tuple[Index, ...]) -> tuple[Index, ...]:
        """Return the indices in the whole of the part's element ``at``."""
        before, after = at[: self.axis], at[self.axis :]
        if self.step is None:
            return (*before, self.start, *after)
        return (*before, self.start + after[0] * self.step, *after[1:])

    def view(self, whole: Buffer, shape: tuple[Index, ...]) -> View:
        """Return the part as a view of the whole."""
        k, strides = self.axis, whole.strides
        along = () if self.step is None else (strides[k] * self.step,)
        kept = (*strides[:k], *along, *strides[k + 1 :])
        return View(whole, shape, kept, self.start * strides[k])


@dataclass(frozen=True, slots=True)
class WindowUpdate:
    """The result is a copy of ``args[0]`` with a window of it replaced by ``args[1]``.

    Attributes:
        copied: the call of ``(window, part)`` that writes the part into the window.
    """

    window: Window
    copied: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """The result is a copy of ``args[0]`` in which the other arguments change some elements.

    Attributes:
        in_place: the call that changes ``args[0]`` itself.
        moved: the number of elements that this call reads and writes.
    """

    in_place: str
    moved: Index


@dataclass(frozen=True, slots=True)
class WriteInto:
    """A part of ``args[0]`` is written: ``moved`` elements of it are read and written."""

    moved: Index


@dataclass(frozen=True, slots=True)
class AddProduct:
    """``args[1] @ args[2]`` is added to ``args[0]``, a sum in f32 where the matrices have 16 bits.

    ATen's call takes one type; ``runtime.calls.executable.add_product`` does this with two.
    """


Effect: TypeAlias = (
    Unknown
    | Alias
    | Fresh
    | Pending
    | Product
    | BiasedProduct
    | Convolution
    | CopyInto
    | WindowUpdate
    | Scatter
    | WriteInto
    | AddProduct
)

# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoundSize:
    """A data-dependent size that a call defines.

    Attributes:
        result: the index of the call's result that has it.
        axis: the axis of that result whose extent it is; None if the result is the number itself.
    """

    size: Size
    result: int
    axis: int | None


_OWN = frozenset({"aten", "mkl", "mkldnn", "prims", "_c10d_functional", "higher_order"})
"""Libraries of operations that torch itself describes."""


@dataclass(frozen=True, slots=True, eq=False)
class Extern:
    """A call of the eager kernel of one FX node, with the reason why it is not lowered.

    Attributes:
        node: name of the FX node, which holds the callable.
        target: its printed name, such as ``aten.mm.default``.
        outputs: buffers that it defines, None for results that are not tensors.
        effect: what the call does to memory, and what passes may rewrite it to.
        impure: it writes its arguments or communicates with other ranks; kept, in order.
        many: the call returns a sequence.
        decomposition: definitions that compute the same outputs, where index notation can express
            them; they replace the call where a kernel of fusec's own is the better choice.
        bound_sizes: the sizes that it defines.
        library: the library that computes it, if that is not the one that the FX node names.
    """

    node: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[Buffer | None, ...]
    reason: str
    origin: Origin = NOWHERE
    effect: Effect = Unknown()
    impure: bool = False
    many: bool = False
    decomposition: tuple[Def, ...] = ()
    bound_sizes: tuple[BoundSize, ...] = ()
    library: str | None = None

    def __str__(self) -> str:
        from fusec.ir.text import print_call  # local: text imports the structures

        return print_call(self)

    @property
    def is_custom(self) -> bool:
        """Whether a user or another library has said, by a fake kernel, what it returns."""
        space, *name = self.target.split(".")
        own = space in _OWN or len(name) != 2
        return not (own or self.library or self.bound_sizes or self.is_pending)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All arguments, keyword arguments last."""
        return (*self.args, *(value for _, value in self.kwargs))

    @property
    def views(self) -> list[View]:
        """Every tensor among the arguments."""
        return argument_views(self.arguments)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The distinct buffers among the arguments, in order, including those that it writes."""
        return tuple(dict.fromkeys(view.buffer.base for view in self.views))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The buffers that it defines."""
        return tuple(buffer for buffer in self.outputs if buffer is not None)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes that it needs, by name."""
        needed = sizes_in(i for arg in self.arguments for i in argument_indices(arg))
        needed |= sizes_in(stride for buffer in self.writes for stride in buffer.strides)
        if self.is_custom:
            needed |= sizes_in(extent for buffer in self.writes for extent in buffer.shape)
        return by_name(needed - {bound.size for bound in self.bound_sizes})

    @property
    def defines_sizes(self) -> tuple[Size, ...]:
        """The sizes that it defines, or about which it asserts conditions that others rely on."""
        conditions = [arg for arg in self.args if isinstance(arg, Comparison | Junction)]
        asserted = sizes_in(i for condition in conditions for i in argument_indices(condition))
        return by_name(asserted.union(bound.size for bound in self.bound_sizes))

    @property
    def is_launch(self) -> bool:
        """Whether it may launch a kernel: False for a view, or a condition on sizes."""
        return self.effect != Alias() and bool(self.views or self.writes)

    @property
    def title(self) -> str:
        """The name of the called operation in reports."""
        return self.target.removeprefix("aten.")

    @property
    def may_alias(self) -> bool:
        """Whether results may alias arguments, or may still be written after it has returned."""
        match self.effect:
            case Unknown() | Alias() | Pending():
                return True
            case _:
                return False

    @property
    def is_pending(self) -> bool:
        """Whether results may not be read yet, not even for a copy with other strides."""
        return self.effect == Pending()

    @property
    def product(self) -> Product | None:
        """The effect of a product of matrices; None for any other call."""
        return self.effect if isinstance(self.effect, Product) else None

    @property
    def alternatives(self) -> Mapping[str, Extern]:
        """The equivalent calls of other libraries, by the library's name."""
        match self.effect, self.args:
            case Product(linear=linear), (View() as a, View() as b):
                bias: Argument = None
            case BiasedProduct(linear=linear), (View() as bias, View() as a, View() as b):
                if bias.strides != (index(1),):
                    return {}
            case _:
                return {}
        if not is_nonnegative(a.shape[1] - 1):
            return {}
        return {
            other.library: replace(
                self,
                target=other.target,
                args=other.arguments(a, b.transposed, bias),
                reason=f"contraction: runs in {other.library}",
                effect=Fresh(),
                library=other.library,
            )
            for other in linear
        }

    def packed_for(self, library: str) -> Constant | None:
        """Return the packed weight that the equivalent call of ``library`` reads, or None."""
        match self.effect:
            case Product(linear=linear) | BiasedProduct(linear=linear):
                return next((o.packed for o in linear if o.library == library), None)
            case _:
                return None

    @property
    def written(self) -> View | None:
        """The argument that it is known to write, or None."""
        match self.effect, self.args:
            case ((CopyInto() | WriteInto() | AddProduct()), (View() as target, *_)):
                return target
        return None

    def reading(self, instead: Mapping[Buffer, Buffer]) -> Extern:
        """Return the call with its arguments' buffers replaced as ``instead`` maps them."""
        if not any(view.buffer in instead for view in self.views):
            return self
        return self.map_views(lambda v: replace(v, buffer=instead.get(v.buffer, v.buffer)))

    def map_views(self, rule: Callable[[View], View]) -> Extern:
        """Return the call with ``rule`` applied to each of its views."""
        kwargs = tuple((name, map_views(value, rule)) for name, value in self.kwargs)
        return replace(self, args=tuple(map_views(a, rule) for a in self.args), kwargs=kwargs)


# -- lines without a kernel call -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor that the model holds, by the FX node that names it; no kernel runs."""

    node: str
    buffer: Buffer
    origin: Origin = NOWHERE

    target: ClassVar[str] = "get_attr"
    reason: ClassVar[str] = "constant of the model"
    impure: ClassVar[bool] = False
    is_launch: ClassVar[bool] = False
    reads: ClassVar[tuple[Buffer, ...]] = ()
    sizes: ClassVar[tuple[Size, ...]] = ()
    defines_sizes: ClassVar[tuple[Size, ...]] = ()

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The buffer that holds the tensor."""
        return (self.buffer,)

    @property
    def view(self) -> View:
        """All of the tensor."""
        return whole_view(self.buffer)


@dataclass(frozen=True, slots=True, eq=False)
class SizeMinimum:
    """A size computed from others: their minimum. No kernel runs."""

    size: Minimum

    target: ClassVar[str] = "min"
    reason: ClassVar[str] = "arithmetic on sizes"
    impure: ClassVar[bool] = False
    is_launch: ClassVar[bool] = False
    reads: ClassVar[tuple[Buffer, ...]] = ()
    writes: ClassVar[tuple[Buffer, ...]] = ()

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes that it needs, by name."""
        return by_name(sizes_in(self.size.args))

    @property
    def defines_sizes(self) -> tuple[Size, ...]:
        """The size that it defines."""
        return (self.size,)


CallStep: TypeAlias = Extern | Constant | SizeMinimum
"""A line of a graph that becomes a step of the schedule as it is, without a kernel of fusec."""
