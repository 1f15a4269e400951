"""Arguments of calls of eager kernels: views, sizes, conditions, objects, numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from fusec.errors import InternalError
from fusec.ir.dtype import NumberForm
from fusec.ir.expr import Buffer
from fusec.ir.index import Index, index
from fusec.ir.strides import contiguous_strides


@dataclass(frozen=True, slots=True)
class View:
    """A strided window into a buffer, as eager kernels take it; sizes and strides in elements.

    In a complex form its last axis is that of the parts, which are adjacent.
    """

    buffer: Buffer
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index
    form: NumberForm = NumberForm.PLAIN

    def __post_init__(self) -> None:
        if any(step.is_constant and step.const < 0 for step in self.strides):
            raise InternalError(f"torch has no view with strides {self.strides}")

    @property
    def rank(self) -> int:
        """How many axes torch has: that of the parts is not one of them."""
        return len(self.shape) - self.form.is_complex

    @property
    def is_whole(self) -> bool:
        """Whether the view covers its whole buffer, with the buffer's own strides and form."""
        same = self.shape == self.buffer.shape and self.strides == self.buffer.strides
        return same and self.offset is index(0) and self.form is self.buffer.form

    @property
    def is_buffer(self) -> bool:
        """Whether the view is its whole buffer, ignoring strides of axes of extent 1."""
        return (
            self.shape == self.buffer.shape
            and self.form is self.buffer.form
            and self.offset is index(0)
            and all(
                a is b or extent is index(1)
                for extent, a, b in zip(self.shape, self.strides, self.buffer.strides, strict=True)
            )
        )

    @property
    def is_dense(self) -> bool:
        """Whether it is contiguous in row-major or column-major order, ignoring extents of 1."""
        pairs = zip(self.shape, self.strides, strict=True)
        walked = [(extent, step) for extent, step in pairs if extent is not index(1)]
        extents, steps = (tuple(pair[k] for pair in walked) for k in (0, 1))
        by_columns = contiguous_strides(extents[::-1])[::-1]
        return steps in (contiguous_strides(extents), by_columns)

    @property
    def transposed(self) -> View:
        """The same elements with the axes in reverse order."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])


def whole_view(buffer: Buffer) -> View:
    """Return the view of a whole buffer, with the buffer's own strides."""
    return View(buffer, buffer.shape, buffer.strides, index(0), buffer.form)


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A graph output that is a separate tensor object over memory shared with other outputs.

    Equal outputs are one tensor object. A plain ``View`` of a whole buffer is the buffer's tensor.

    Attributes:
        detached: autograd sees no view of the buffer's tensor; both have one version counter.
        number: distinguishes outputs over the same window.
    """

    view: View
    detached: bool
    number: int


@dataclass(frozen=True, slots=True)
class SizeValue:
    """A symbolic integer among an extern's arguments."""

    index: Index


@dataclass(frozen=True, slots=True)
class Comparison:
    """A condition on sizes among an extern's arguments; ``sign`` is Python's."""

    sign: str
    left: Index
    right: Index


@dataclass(frozen=True, slots=True)
class Junction:
    """A conjunction or disjunction of conditions; ``sign`` is ``and`` or ``or``."""

    sign: str
    parts: tuple[Condition, ...]


Condition: TypeAlias = "Comparison | Junction | bool"


@dataclass(frozen=True, slots=True)
class NodeConstant:
    """An argument that only the FX graph holds, at ``path`` in the arguments of ``node``."""

    node: str
    path: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class InputObject:
    """An input that is neither tensor nor size, such as a process group; passed on unchanged."""

    name: str


Argument: TypeAlias = (
    "View | OwnTensor | SizeValue | Condition | NodeConstant | InputObject "
    "| int | float | bool | str | tuple[Argument, ...] | None"
)


def argument_views(args: Iterable[Argument]) -> list[View]:
    """Return every tensor view among (nested) arguments."""
    found: list[View] = []
    for arg in args:
        match arg:
            case View():
                found.append(arg)
            case OwnTensor():
                found.append(arg.view)
            case tuple():
                found.extend(argument_views(arg))
    return found


def argument_indices(arg: Argument) -> Iterator[Index]:
    """Yield every index in an argument."""
    match arg:
        case View():
            yield from (*arg.shape, *arg.strides, arg.offset)
        case OwnTensor():
            yield from argument_indices(arg.view)
        case SizeValue():
            yield arg.index
        case Comparison():
            yield from (arg.left, arg.right)
        case Junction(parts=items) | (tuple() as items):
            for item in items:
                yield from argument_indices(item)


def map_views(arg: Argument, rule: Callable[[View], View]) -> Argument:
    """Return an argument with ``rule`` applied to each view in it."""
    match arg:
        case View():
            return rule(arg)
        case OwnTensor():
            return replace(arg, view=rule(arg.view))
        case tuple():
            return tuple(map_views(part, rule) for part in arg)
        case _:
            return arg
