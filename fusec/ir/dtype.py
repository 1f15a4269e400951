"""Element types, as they are stored in memory and as arithmetic uses them.

A value of a 16-bit float type is computed in f32 and rounded when it is stored; small integers are
computed in i32 and wrap when they are stored, as PyTorch's CPU and CUDA kernels do.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """The kind of arithmetic that an element type has."""

    BOOL = "bool"
    UNSIGNED = "unsigned"
    SIGNED = "signed"
    FLOAT = "float"
    OPAQUE = "opaque"  # no arithmetic here: float8, quantised etc., and complex as a whole


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its printed name, kind and size in memory (bytes)."""

    name: str
    kind: Kind
    itemsize: int

    @property
    def is_float(self) -> bool:
        return self.kind is Kind.FLOAT

    @property
    def is_opaque(self) -> bool:
        """True for types whose values only externs compute with."""
        return self.kind is Kind.OPAQUE

    @property
    def is_integer(self) -> bool:
        """True for integers, not for bool."""
        return self.kind in (Kind.SIGNED, Kind.UNSIGNED)

    def __repr__(self) -> str:
        return self.name


BOOL = DType("bool", Kind.BOOL, 1)
U8 = DType("u8", Kind.UNSIGNED, 1)
I8 = DType("i8", Kind.SIGNED, 1)
I16 = DType("i16", Kind.SIGNED, 2)
I32 = DType("i32", Kind.SIGNED, 4)
I64 = DType("i64", Kind.SIGNED, 8)
F16 = DType("f16", Kind.FLOAT, 2)
BF16 = DType("bf16", Kind.FLOAT, 2)
F32 = DType("f32", Kind.FLOAT, 4)
F64 = DType("f64", Kind.FLOAT, 8)
C64 = DType("c64", Kind.OPAQUE, 8)
C128 = DType("c128", Kind.OPAQUE, 16)
INT32_MAX = 2**31 - 1

PART: dict[DType, DType] = {C64: F32, C128: F64}
"""Complex type -> the type of its two parts, in which memory and arithmetic have it."""
COMPLEX_OF: dict[DType, DType] = {part: whole for whole, part in PART.items()}


class NumberForm(enum.Enum):
    """How torch takes a tensor, whose memory has real numbers: ``frontend/forms.py``.

    A complex tensor's last axis in memory is that of its two parts. The negative and the conjugate
    form are those of tensors with torch's negative and conjugate bit.
    """

    PLAIN = "plain"
    NEGATIVE = "negative"
    COMPLEX = "complex"
    CONJUGATE = "conjugate"

    @property
    def is_complex(self) -> bool:
        return self in (NumberForm.COMPLEX, NumberForm.CONJUGATE)

    @property
    def has_bit(self) -> bool:
        return self in (NumberForm.NEGATIVE, NumberForm.CONJUGATE)


OPAQUE_TYPES: tuple[DType, ...] = tuple(
    DType(name, Kind.OPAQUE, itemsize)
    for name, itemsize in (
        ("c32", 4),
        ("u16", 2),
        ("u32", 4),
        ("u64", 8),
        ("f8e4m3fn", 1),
        ("f8e4m3fnuz", 1),
        ("f8e5m2", 1),
        ("f8e5m2fnuz", 1),
        ("f8e8m0fnu", 1),
        ("f4e2m1fn_x2", 1),
        ("unknown", 1),
    )
)

DTYPES: dict[str, DType] = {
    d.name: d for d in (BOOL, U8, I8, I16, I32, I64, F16, BF16, F32, F64, C64, C128, *OPAQUE_TYPES)
}


def compute_type(dtype: DType) -> DType:
    """Return the type that values stored as ``dtype`` are computed and summed in.

    That is f32, f64, i32, i64 or bool.
    """
    if dtype in (F16, BF16):
        return F32
    if dtype in (U8, I8, I16):
        return I32
    return dtype
