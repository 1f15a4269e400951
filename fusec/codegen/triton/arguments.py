"""The interface of a printed Triton kernel: its parameters, their types, its launch grid.

Parameters are a pointer for each of ``program.buffers``, an integer for each of ``program.sizes``,
then a tensor descriptor for each box of a buffer that is copied by tiles (``descriptors.py``). A
launch makes descriptors from addresses and sizes.

Worked example: ``(x: *bf16, w: *bf16, y: *bf16, M: i32, x_tiles: tensordesc<bf16[128,64]>, ...)``.
"""

from __future__ import annotations

import keyword
from typing import TypeAlias

from fusec.codegen.host.wrapper import print_size
from fusec.codegen.triton.descriptors import Descriptor
from fusec.codegen.triton.form import Form
from fusec.codegen.triton.operations import FUNCTIONS, LIBDEVICE, POINTERS, TYPES
from fusec.ir.index import Axis, Index, index, product
from fusec.ir.magnitude import magnitude
from fusec.ir.names import Named, Names
from fusec.ir.program import MULTIPLE, Program

GLUON = (
    *("gl", "gluon", "mbarrier", "tma", "load_tile", "store_tile"),
    *("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"),
)
"""Names that a warp-specialized kernel imports (``gluon.py``)."""
GRID_CONTROL = ("gdc_wait", "gdc_launch_dependents")
"""Functions that a dependent kernel imports, and calls before all else, in this order.

With the wait before the first access to memory no hazard is left: the launch before has ended, and
had waited for the one before it. Behind the wait, at most two launches are under way."""
_RESERVED = {
    "tl",
    "triton",
    "range",
    "float",
    "min",
    "pid",
    "slot",
    "who",
    "left",
    *GLUON,
    *GRID_CONTROL,
    "first",
    "size",
    "addresses",
    "sizes",
    "places",
    "place",
    "row",
    LIBDEVICE,
    *FUNCTIONS,
    *keyword.kwlist,
}
TABLE = {"addresses": "*i64", "sizes": "*i32", "places": "*i32"}
"""The parameters of a foreach kernel: parameter -> Triton type (``runtime/kernels/table.py``)."""
COUNT = "_count"
"""A launch's name for its number of blocks."""
_GRID_YZ_LIMIT = 65535
_PROGRAMS_LIMIT = 2**31 - 1
DescriptorFields: TypeAlias = tuple[str, str, tuple[int, ...], tuple[str, ...], tuple[str, ...]]
"""Names of the parameter and of its buffer, the tile, and shape and strides as printed sizes."""


def signature(form: Form) -> dict[str, str]:
    """Return the Triton type of each parameter, in order: "*bf16", "i32", "tensordesc<...>"."""
    program, boxes = form.program, form.descriptors
    if program.table:
        return dict(TABLE)
    names = name_arguments(program, boxes)
    return {
        **{names(b): TYPES[b.dtype][1] for b in program.buffers},
        **{names(s): "i32" for s in program.sizes},
        **{names(box): _descriptor_type(box) for box in boxes},
    }


def _descriptor_type(box: Descriptor) -> str:
    element = POINTERS[box.kind].removeprefix("*")
    return f"tensordesc<{element}[{','.join(map(str, box.tile))}]>"


def print_descriptors(form: Form) -> tuple[DescriptorFields, ...]:
    """Return the fields from which a launch makes each descriptor, in parameter order."""
    program, boxes = form.program, form.descriptors
    names = name_arguments(program, boxes)
    buffers = {b.base: names(b) for b in program.buffers}
    return tuple(
        (
            names(box),
            buffers[box.buffer],
            box.tile,
            tuple(print_size(extent, names) for extent in box.shape),
            tuple(print_size(stride, names) for stride in box.strides),
        )
        for box in boxes
    )


def divisible_by_16(program: Program) -> tuple[int, ...]:
    """Return the positions of arguments that a launch declares as multiples of 16.

    These are addresses, and sizes whose hint is one.
    """
    if program.table:
        return tuple(range(len(TABLE)))
    facts = [*(True for _ in program.buffers), *(s.hint % MULTIPLE == 0 for s in program.sizes)]
    return tuple(position for position, fact in enumerate(facts) if fact)


def grid_exprs(program: Program) -> tuple[Index, Index, Index]:
    """Return the launch grid; the innermost grid axis is the first, which runs fastest.

    A persistent kernel launches at most ``Program.programs`` programs, which loop over this grid.
    """
    extents = [axis.extent for axis in reversed(program.grid)]
    if program.group or program.programs or not is_direct(program.grid):
        extents = [product(extents)]
    x, y, z, *_ = (*extents, index(1), index(1), index(1))
    return x, y, z


def print_grid(program: Program) -> tuple[str, str, str]:
    """Return the launch grid as Python expressions over the names of the size arguments."""
    if program.table:
        return COUNT, "1", "1"
    names = name_arguments(program)
    x, y, z = (print_size(extent, names) for extent in grid_exprs(program))
    return f"min({program.programs}, {x})" if program.programs else x, y, z


def is_direct(grid: tuple[Axis, ...]) -> bool:
    """Return True if each grid axis can be a program id: at most 3, the outer ones known small.

    Triton's launcher multiplies them in 32 bits, and silently launches nothing on overflow. One
    extent that does not fit is an error.
    """
    outer, programs = grid[:-1], product(a.extent for a in grid)
    if len(grid) > 3 or (programs.is_constant and programs.const > _PROGRAMS_LIMIT):
        return False
    return all(magnitude(axis.extent) <= _GRID_YZ_LIMIT for axis in outer)


def name_arguments(program: Program, boxes: tuple[Descriptor, ...] = ()) -> Names:
    """Return the names of buffers, sizes and descriptors, assigned in that order."""
    names = Names(_RESERVED)
    things: tuple[Named, ...] = (*program.buffers, *program.sizes, *boxes)
    for thing in things:
        names(thing)
    return names
