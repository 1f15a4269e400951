"""The text in front of the kernels of one translation unit: the vocabulary they are printed in.

``prelude.h`` is in all of them. What few kernels need comes behind it: products of matrices, and
floats of 8 bits, for each type one line that instantiates ``floats8.h`` with its format.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from fusec.ir.dtype import F8, DType
from fusec.ir.expr import Op
from fusec.ir.program import Let, Program, Scratch, Update, statements
from fusec.ir.scalar import ROUND


def prelude(width: int, *, products: bool = False, floats8: Iterable[DType] = ()) -> str:
    """Return the text for ``width`` lanes.

    Args:
        products: whether any of the kernels multiplies matrices.
        floats8: the types of 8 bits that any of them has.
    """
    types = [dtype for dtype in F8 if dtype in frozenset(floats8)]
    names = ("prelude.h", *["products.h"] * products, *["floats8.h"] * bool(types))
    texts = (
        resources.files("fusec.codegen.cpp").joinpath(name).read_text("utf-8") for name in names
    )
    return "\n".join((f"#define FUSEC_W {width}", *texts, *map(_instance, types), ""))


def prelude_of(width: int, programs: Iterable[Program]) -> str:
    """Return the text that some kernels need."""
    programs = tuple(programs)
    types = {dtype for program in programs for dtype in _types(program)}
    return prelude(width, products=any(p.multiplies for p in programs), floats8=types)


def _types(program: Program) -> set[DType]:
    """Return the types of what a program reads, writes and rounds to."""
    found = {buffer.dtype for buffer in program.buffers}
    rounded = {name: dtype for dtype, name in ROUND.items()}
    for statement in statements(program.body):
        match statement:
            case Scratch(buffer=buffer):
                found.add(buffer.dtype)
            case Let(value=Op(name=name)) | Update(value=Op(name=name)) if name in rounded:
                found.add(rounded[name])
            case Let(value=value) | Update(value=value):
                found.add(value.dtype)
    return found


def _instance(dtype: DType) -> str:
    """Return the line that defines loads, stores and rounding of a type of 8 bits."""
    layout = dtype.format
    assert layout is not None
    numbers = (layout.mantissa, layout.bias, layout.largest, layout.nan, layout.too_large)
    infinite = "false" if layout.infinity is None else "true"
    return f"FUSEC_FLOAT8({dtype}, {', '.join(map(str, numbers))}, {infinite})"
