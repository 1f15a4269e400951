"""Lines and steps that are not index notation: calls of eager kernels, constants, size arithmetic.

An ``Extern`` names the kernel that it calls. What passes may know of that beyond its arguments is
its ``effect``, one of a closed set that the frontend fills in (``frontend/effects.py``)::

    effect ::= Unknown | Fresh | Pending      results: perhaps views; new memory; not there yet
             | Alias                          results are views of arguments; no kernel runs
             | Product                        args[0] @ args[1]
             | BiasedProduct                  args[0] + args[1] @ args[2]
             | Convolution                    a call that may apply more to its result
             | Copy | Write                   args[0] is written: all of it, or a part
             | WindowUpdate | Update          args[0] with a part replaced, as a new tensor

No pass asks for the name of an operation.
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
)
from fusec.ir.atoms import Minimum
from fusec.ir.definition import NOWHERE, Def, Origin, by_name, sizes_in
from fusec.ir.expr import Buffer
from fusec.ir.index import Index, Size, index, is_nonnegative

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
    """The results, what other ranks send, may be read once another call has waited for them."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Another library's call of ``(a, w, bias or None, *rest)`` that returns ``a @ w.T + bias``.

    It takes a bias whose elements are neighbours in memory, and sums of one term or more.

    Attributes:
        library: as reports call it.
        target: the call's printed name.
        rest: its arguments behind the bias.
        packed: what holds ``w`` in the library's own layout, which it takes in its place.
        sized: it is packed for one number of rows; the call takes ``w``, too, and at last that.
    """

    library: str
    target: str
    rest: tuple[Argument, ...]
    packed: Constant | None = None
    sized: bool = False

    def arguments(self, a: View, w: View, bias: Argument) -> tuple[Argument, ...]:
        """Return what the call takes."""
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
        panels: what holds ``args[1]`` as the call's meaning reads it, if that is another layout.
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
    """The result, in memory of its own, is a convolution of ``args[0]`` that may be followed.

    Attributes:
        activations: by name, what stands in the place of the call's last arguments that applies it.
        added: the call of ``(x, other, ...)`` that adds a tensor like the result to it.
    """

    activations: tuple[tuple[str, tuple[Argument, ...]], ...]
    added: str


@dataclass(frozen=True, slots=True)
class CopyInto:
    """``args[1]`` is written over ``args[0]``."""


@dataclass(frozen=True, slots=True)
class Window:
    """Where a part lies in a whole: along ``axis``, from ``start`` on.

    Without ``step`` it is one position, and the part has not that axis.
    """

    axis: int
    start: Index
    step: Index | None

    def indices(self, at: tuple[Index, ...]) -> tuple[Index, ...]:
        """Return the whole's indices of the part's element at ``at``."""
        before, after = at[: self.axis], at[self.axis :]
        if self.step is None:
            return (*before, self.start, *after)
        return (*before, self.start + after[0] * self.step, *after[1:])

    def view(self, whole: Buffer, shape: tuple[Index, ...]) -> View:
        """Return the part as a window into the whole."""
        k, strides = self.axis, whole.strides
        along = () if self.step is None else (strides[k] * self.step,)
        kept = (*strides[:k], *along, *strides[k + 1 :])
        return View(whole, shape, kept, self.start * strides[k])


@dataclass(frozen=True, slots=True)
class WindowUpdate:
    """The result is a copy of ``args[0]`` with ``args[1]`` in a window of it.

    Attributes:
        copied: the call of ``(window, part)`` that writes the part where the window lies.
    """

    window: Window
    copied: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """The result is a copy of ``args[0]`` in which the other arguments change some elements.

    Attributes:
        in_place: the call that changes ``args[0]`` itself.
        moved: how many elements of it that reads and writes.
    """

    in_place: str
    moved: Index


@dataclass(frozen=True, slots=True)
class WriteInto:
    """A part of ``args[0]`` is written: ``moved`` elements of it are read and written."""

    moved: Index


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
)

# -- calls -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoundSize:
    """A size that depends on data, where a call gives it.

    Attributes:
        result: which of the call's results.
        axis: of that, which extent; None if the result is the number itself.
    """

    size: Size
    result: int
    axis: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Extern:
    """A call of the eager kernel of one FX node, with the reason why it is not lowered.

    Attributes:
        node: name of the FX node, which holds the callable.
        target: its printed name, such as ``aten.mm.default``.
        outputs: buffers it makes, None for results that are not tensors.
        effect: what passes may know of it.
        impure: it writes its arguments or talks to other ranks; kept, in order.
        many: the call returns a sequence.
        meaning: definitions that compute the same outputs, where index notation can say them: what
            stands in the call's place where a kernel of fusec's own is the better choice.
        gives: sizes that are known once it has run.
        library: which one computes it, if that is not the one that the FX node names.
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
    gives: tuple[BoundSize, ...] = ()
    library: str | None = None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All arguments, those by name last."""
        return (*self.args, *(value for _, value in self.kwargs))

    @property
    def views(self) -> list[View]:
        """Every tensor among the arguments."""
        return argument_views(self.arguments)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The distinct buffers among the arguments, in order: also those that it writes."""
        return tuple(dict.fromkeys(view.buffer.base for view in self.views))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The buffers that it makes."""
        return tuple(buffer for buffer in self.outputs if buffer is not None)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes that it needs, by name."""
        needed = sizes_in(i for arg in self.arguments for i in argument_indices(arg))
        needed |= sizes_in(stride for buffer in self.writes for stride in buffer.strides)
        return by_name(needed - {bound.size for bound in self.gives})

    @property
    def defines_sizes(self) -> tuple[Size, ...]:
        """The sizes that it gives, or about which it asserts what others rely on."""
        conditions = [arg for arg in self.args if isinstance(arg, Comparison | Junction)]
        asserted = sizes_in(i for condition in conditions for i in argument_indices(condition))
        return by_name(asserted.union(bound.size for bound in self.gives))

    @property
    def is_launch(self) -> bool:
        """Whether a kernel may run: not for a view, or a condition on sizes."""
        return self.effect != Alias() and bool(self.views or self.writes)

    @property
    def result(self) -> Buffer | None:
        """The tensor that it makes, if there is one alone."""
        return self.outputs[0] if len(self.outputs) == 1 else None

    @property
    def title(self) -> str:
        """The name of what it calls, as reports say it."""
        return self.target.removeprefix("aten.")

    @property
    def may_alias(self) -> bool:
        """Whether results may share memory with arguments, or be written when it has returned."""
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
        """What is known of it as a product of matrices; None if it is none."""
        return self.effect if isinstance(self.effect, Product) else None

    @property
    def others(self) -> Mapping[str, Extern]:
        """Calls of other libraries that return the same, by the library's name."""
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
        """Return what holds the packed weight that its call in a library reads, if one does."""
        match self.effect:
            case Product(linear=linear) | BiasedProduct(linear=linear):
                return next((o.packed for o in linear if o.library == library), None)
            case _:
                return None

    @property
    def written(self) -> View | None:
        """The argument that it is known to write."""
        match self.effect, self.args:
            case ((CopyInto() | WriteInto()), (View() as target, *_)):
                return target
        return None

    def reading(self, instead: Mapping[Buffer, Buffer]) -> Extern:
        """Return the call with other buffers in the place of some of its arguments'."""
        if not any(view.buffer in instead for view in self.views):
            return self
        return self.map_views(lambda v: replace(v, buffer=instead.get(v.buffer, v.buffer)))

    def map_views(self, rule: Callable[[View], View]) -> Extern:
        """Return the call with ``rule`` applied to each of its views."""
        kwargs = tuple((name, map_views(value, rule)) for name, value in self.kwargs)
        return replace(self, args=tuple(map_views(a, rule) for a in self.args), kwargs=kwargs)


# -- what is no call of a kernel -------------------------------------------------------------------


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
        return View(self.buffer, self.buffer.shape, self.buffer.strides, index(0))


@dataclass(frozen=True, slots=True, eq=False)
class SizeMinimum:
    """A size computed from others: the least of them. No kernel runs."""

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
        """The size that it gives."""
        return (self.size,)


CallStep: TypeAlias = Extern | Constant | SizeMinimum
"""What stands in a graph and in a schedule as it is: no pass takes it apart."""
