"""Element types, as they are stored in memory and as arithmetic uses them.

A value of a 16-bit float type is computed in f32 and rounded when it is stored; small integers are
computed in i32 and wrap when they are stored, as PyTorch's CPU and CUDA kernels do. Float types of
8 bits are converted from f32 and to it; as in eager there is no arithmetic on them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import takewhile


class Kind(enum.Enum):
    """The kind of arithmetic that an element type has."""

    BOOL = "bool"
    UNSIGNED = "unsigned"
    SIGNED = "signed"
    FLOAT = "float"
    OPAQUE = "opaque"  # no arithmetic here: quantised etc., and complex as a whole


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """How the bits of a float of up to 16 bits are read.

    A code is a sign bit, if there is one, above bits of the exponent e and the mantissa m. It is
    (1 + m / 2^mantissa) 2^(e - bias), or with e = 0 m / 2^mantissa 2^(1 - bias), with its sign.
    The formats are those of the Open Compute Project's OFP8 and MX (2023); with ``fnuz`` those of
    Noune et al., 8-bit Numerical Formats for Deep Neural Networks (2022).

    Attributes:
        exponent, mantissa: numbers of bits.
        largest: the code of the largest finite number.
        nan: the code of NaN.
        infinity: the code of infinity, if there is one.
        saturates: what is too large becomes the largest number; else infinity, or else NaN. Where
            torch does not saturate (before 2.13), the frontend says so (``ops/pointwise.py``).
        has_sign: without, numbers are powers of two: a sign is dropped, and 0 is the least power.
    """

    exponent: int
    mantissa: int
    bias: int
    largest: int
    nan: int
    infinity: int | None = None
    saturates: bool = False
    has_sign: bool = True

    @property
    def sign(self) -> int:
        """The sign bit, or 0."""
        return int(self.has_sign) << (self.exponent + self.mantissa)

    @property
    def too_large(self) -> int:
        """The code of a number above the largest, and of infinity, without their sign."""
        if self.saturates:
            return self.largest
        return self.nan if self.infinity is None else self.infinity

    @property
    def has_negative_zero(self) -> bool:
        """False where that code is NaN."""
        return self.nan != self.sign


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its printed name, kind and size in memory (bytes)."""

    name: str
    kind: Kind
    itemsize: int
    format: FloatFormat | None = field(default=None, compare=False)

    @property
    def torch_name(self) -> str:
        """Torch's name: ``bfloat16`` for ``bf16``, ``float8_e5m2`` for ``f8e5m2``."""
        word = "".join(takewhile(str.isalpha, self.name))
        bits = "".join(takewhile(str.isdigit, self.name[len(word) :]))
        form = self.name[len(word) + len(bits) :]
        return f"{_WORDS.get(word, word)}{bits}{form and f'_{form}'}"

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


_WORDS = {"bf": "bfloat", "f": "float", "c": "complex", "u": "uint", "i": "int"}

BOOL = DType("bool", Kind.BOOL, 1)
U8 = DType("u8", Kind.UNSIGNED, 1)
I8 = DType("i8", Kind.SIGNED, 1)
I16 = DType("i16", Kind.SIGNED, 2)
I32 = DType("i32", Kind.SIGNED, 4)
I64 = DType("i64", Kind.SIGNED, 8)
F16 = DType("f16", Kind.FLOAT, 2, FloatFormat(5, 10, 15, 0x7BFF, 0x7E00, 0x7C00))
BF16 = DType("bf16", Kind.FLOAT, 2, FloatFormat(8, 7, 127, 0x7F7F, 0x7FC0, 0x7F80))
HALF = (F16, BF16)
F32 = DType("f32", Kind.FLOAT, 4)
F64 = DType("f64", Kind.FLOAT, 8)
C64 = DType("c64", Kind.OPAQUE, 8)
C128 = DType("c128", Kind.OPAQUE, 16)
INT32_MAX = 2**31 - 1

F8: tuple[DType, ...] = tuple(
    DType(f"f8{name}", Kind.FLOAT, 1, layout)
    for name, layout in (
        ("e4m3fn", FloatFormat(4, 3, 7, 0x7E, 0x7F, saturates=True)),
        ("e4m3fnuz", FloatFormat(4, 3, 8, 0x7F, 0x80)),
        ("e5m2", FloatFormat(5, 2, 15, 0x7B, 0x7F, 0x7C)),
        ("e5m2fnuz", FloatFormat(5, 2, 16, 0x7F, 0x80)),
        ("e8m0fnu", FloatFormat(8, 0, 127, 0xFE, 0xFF, has_sign=False)),
    )
)
"""Float types of 8 bits: only conversions and copies have them."""
F8E4M3FN = F8[0]
F8E8M0FNU = F8[-1]
F4X2 = DType("f4e2m1fn_x2", Kind.UNSIGNED, 1)
"""Two floats of 4 bits in a byte, the first in its low bits: only scaled products read them."""
E2M1 = FloatFormat(2, 1, 1, 0x7, 0x10)
"""The format of each of them, which has neither NaN nor infinity."""

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
    for name, itemsize in (("c32", 4), ("u16", 2), ("u32", 4), ("u64", 8), ("unknown", 1))
)

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        *(BOOL, U8, I8, I16, I32, I64, F16, BF16, *F8, F4X2),
        *(F32, F64, C64, C128, *OPAQUE_TYPES),
    )
}


def compute_type(dtype: DType) -> DType:
    """Return the type that values stored as ``dtype`` are computed and summed in.

    That is f32, f64, i32, i64 or bool.
    """
    if dtype.format is not None:
        return F32
    if dtype in (U8, I8, I16, F4X2):
        return I32
    return dtype
