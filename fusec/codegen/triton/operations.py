"""Table of the Triton text of each scalar operation: one row of templates an operation.

A row has a template for each kind of element type: ``{0}`` and ``{1}`` are the operands, ``{t}`` is
the operands' Triton type. There are no types narrower than f32 here: the printer widens them.

The accurate form is the default: it is IEEE where PyTorch's CUDA kernels are (``div``, ``sqrt``)
and calls the same libdevice function elsewhere. An ``approximate`` form has a relative error of
some 1e-5, or an absolute one of 1.3e-6 (erf), and is meant for values that are rounded to 16 bits;
the printer chooses it for each value (``Form.approximate``).

Functions that Triton lacks are in ``FUNCTIONS``; the printer prints those that a kernel calls
before the kernel.

Worked example: ``maximum`` of f32 is ``tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusec.codegen.triton import floats8
from fusec.errors import InternalError
from fusec.ir.dtype import BF16, BOOL, F4X2, F8, F16, F32, F64, I8, I16, I32, I64, U8, DType, Kind
from fusec.ir.scalar import COARSE_TERMS, ROUND

STAGE = "codegen.triton"
LIBDEVICE = "libdevice"
TYPES = {
    BOOL: ("tl.int1", "*i1"),
    U8: ("tl.uint8", "*u8"),
    I8: ("tl.int8", "*i8"),
    I16: ("tl.int16", "*i16"),
    I32: ("tl.int32", "*i32"),
    I64: ("tl.int64", "*i64"),
    F16: ("tl.float16", "*fp16"),
    BF16: ("tl.bfloat16", "*bf16"),
    F32: ("tl.float32", "*fp32"),
    F64: ("tl.float64", "*fp64"),
    **dict.fromkeys((*F8, F4X2), ("tl.uint8", "*u8")),
}
"""Element type -> the text of it in a kernel, and of a pointer to it in a signature."""

POINTERS = dict(TYPES.values()) | {"tl.float8e4nv": "*fp8e4nv", "tl.float8e5": "*fp8e5"}
"""Text of an element type -> that of a pointer to it; tensor cores multiply floats of 8 bits."""


@dataclass(frozen=True, slots=True)
class Row:
    """The templates of one operation; None for types that do not have the operation.

    Attributes:
        floats: f32, and f64 unless ``double`` is given.
        approximate: f32, where 16-bit accuracy is enough.
        integers: signed integers, and unsigned ones unless ``unsigned`` is given.
        long: i64, if smaller integers do not have the operation.
        bools: bool.
    """

    floats: str | None = None
    double: str | None = None
    approximate: str | None = None
    integers: str | None = None
    unsigned: str | None = None
    long: str | None = None
    bools: str | None = None


def _arithmetic(operator: str) -> Row:
    text = f"{{0}} {operator} {{1}}"
    return Row(floats=text, integers=text)


def _bitwise(operator: str) -> Row:
    text = f"{{0}} {operator} {{1}}"
    return Row(integers=text, bools=text)


def _comparison(operator: str) -> Row:
    text = f"{{0}} {operator} {{1}}"
    return Row(floats=text, integers=text, bools=text)


_LOG2_E = "1.4426950408889634"
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_SAME = "{0}"
_SIGN = "({0} > 0).to({t}) - ({0} < 0).to({t})"

ROWS: dict[str, Row] = {
    "add": _arithmetic("+"),
    "sub": _arithmetic("-"),
    **dict.fromkeys(COARSE_TERMS, Row(floats="{0} * {1}")),
    "mul": _arithmetic("*"),
    "div": Row(floats="tl.div_rn({0}, {1})", double="{0} / {1}", approximate="{0} / {1}"),
    "floordiv": Row(
        floats="_float_floor_div({0}, {1})", integers="_floor_div({0}, {1})", unsigned="{0} // {1}"
    ),
    "truncdiv": Row(
        floats="libdevice.trunc(tl.div_rn({0}, {1}))",
        double="libdevice.trunc({0} / {1})",
        integers="{0} // {1}",  # Triton's integer division rounds to zero, as C's
    ),
    "remainder": Row(
        floats="_float_remainder({0}, {1})", integers="_remainder({0}, {1})", unsigned="{0} % {1}"
    ),
    "fmod": Row("libdevice.fmod({0}, {1})", integers="{0} % {1}"),
    "nonzero": Row(integers=_SAME),  # x / 0 is a value on GPUs
    "within": Row(integers=_SAME),
    "probability": Row(_SAME),
    "pow": Row("libdevice.pow({0}, {1})", integers="_int_pow({0}, {1})"),
    "atan2": Row("libdevice.atan2({0}, {1})"),
    "minimum": Row(
        floats=f"tl.minimum({{0}}, {{1}}, {_NAN})",
        integers="tl.minimum({0}, {1})",
        bools="{0} & {1}",
    ),
    "maximum": Row(
        floats=f"tl.maximum({{0}}, {{1}}, {_NAN})",
        integers="tl.maximum({0}, {1})",
        bools="{0} | {1}",
    ),
    "copysign": Row("libdevice.copysign({0}, {1})"),
    "nextafter": Row("libdevice.nextafter({0}, {1})"),
    "hypot": Row("libdevice.hypot({0}, {1})"),
    "neg": Row("-{0}", integers="-{0}"),
    "abs": Row("tl.abs({0})", integers="tl.abs({0})", unsigned=_SAME),
    "sign": Row(_SIGN, integers=_SIGN, unsigned="({0} > 0).to({t})"),
    "floor": Row("tl.floor({0})", integers=_SAME),
    "ceil": Row("tl.ceil({0})", integers=_SAME),
    "trunc": Row("libdevice.trunc({0})", integers=_SAME),
    "round": Row("libdevice.nearbyint({0})", integers=_SAME),
    "sqrt": Row(floats="tl.sqrt_rn({0})", double="tl.sqrt({0})", approximate="tl.sqrt({0})"),
    "rsqrt": Row("tl.rsqrt({0})"),
    "reciprocal": Row(floats="tl.div_rn(1.0, {0})", double="1.0 / {0}", approximate="1.0 / {0}"),
    "exp": Row("libdevice.exp({0})", approximate=f"tl.exp2({{0}} * {_LOG2_E})"),
    "exp2": Row("tl.exp2({0})"),
    "expm1": Row("libdevice.expm1({0})"),
    "log": Row("tl.log({0})"),
    "log2": Row("tl.log2({0})"),
    "log10": Row("libdevice.log10({0})"),
    "log1p": Row("libdevice.log1p({0})"),
    "sin": Row("tl.sin({0})"),
    "cos": Row("tl.cos({0})"),
    "tan": Row("libdevice.tan({0})"),
    "asin": Row("libdevice.asin({0})"),
    "acos": Row("libdevice.acos({0})"),
    "atan": Row("libdevice.atan({0})"),
    "sinh": Row("libdevice.sinh({0})"),
    "cosh": Row("libdevice.cosh({0})"),
    "tanh": Row("libdevice.tanh({0})", approximate="_approximate_tanh({0})"),
    "asinh": Row("libdevice.asinh({0})"),
    "acosh": Row("libdevice.acosh({0})"),
    "atanh": Row("libdevice.atanh({0})"),
    "sigmoid": Row(
        floats="tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
        double="1.0 / (1.0 + libdevice.exp(-{0}))",
        approximate=f"libdevice.fast_dividef(1.0, 1.0 + libdevice.exp2({{0}} * -{_LOG2_E}))",
    ),
    "erf": Row("tl.erf({0})", approximate="_approximate_erf({0})"),
    "erfc": Row("libdevice.erfc({0})"),
    "erfinv": Row("libdevice.erfinv({0})"),
    "ndtr": Row(
        floats="(1.0 + tl.erf({0} * 0.7071067811865476)) * 0.5",
        approximate="_approximate_ndtr({0})",
    ),
    "lgamma": Row("libdevice.lgamma({0})"),
    "round_f16": Row("{0}.to(tl.float16).to({t})"),
    "round_bf16": Row("{0}.to(tl.bfloat16).to({t})"),
    **{ROUND[dtype]: Row(f"_round_{dtype}({{0}}.to(tl.float32)).to({{t}})") for dtype in F8},
    "e2m1": Row(integers="_e2m1({0})"),
    "and": _bitwise("&"),
    "or": _bitwise("|"),
    "xor": _bitwise("^"),
    "not": Row(
        integers="~{0}",
        unsigned="{0} ^ 255",  # u8 is the only unsigned type
        bools="{0} ^ True",
    ),
    "shl": Row(integers="{0} << {1}"),
    "shr": Row(integers="{0} >> {1}"),
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "hits": _comparison("=="),
    "until": _comparison("<="),
    "member": Row(integers="({1} <= {0}) & ({0} < {2})"),
    "isnan": Row("{0} != {0}"),
    "isinf": Row('tl.abs({0}) == float("inf")'),
    "random": Row(long="_random({0}, {1})"),
}

_WRONG_SIGN = "(rest != 0) & ((rest < 0) != (b < 0))"

FUNCTIONS: dict[str, str] = {
    "_e2m1": """\
def _e2m1(code):
    code = code.to(tl.int32)
    size = code & 7
    bits = tl.where(size == 1, 0x3F000000, (size << 22) + 0x3F000000)  # 0.5 is subnormal
    bits = tl.where(size == 0, 0, bits) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)""",
    "_floor_div": f"""\
def _floor_div(a, b):
    quotient = a // b
    rest = a - quotient * b
    return tl.where({_WRONG_SIGN}, quotient - 1, quotient)""",
    "_remainder": f"""\
def _remainder(a, b):
    rest = a % b
    return tl.where({_WRONG_SIGN}, rest + b, rest)""",
    "_float_remainder": f"""\
def _float_remainder(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where({_WRONG_SIGN}, rest + b, rest)""",
    "_float_floor_div": f"""\
def _float_floor_div(a, b):
    rest = libdevice.fmod(a, b)
    quotient = libdevice.nearbyint((a - rest) / b)
    quotient = tl.where({_WRONG_SIGN}, quotient - 1, quotient)
    return tl.where(b == 0, a / b, quotient)""",
    # ``a + 1 == 0``: Triton 3.9 refuses to compare an unsigned number with -1.
    "_int_pow": """\
def _int_pow(a, b):
    base = a + 0 * b
    exponent = tl.maximum(b + 0 * a, 0)
    power = 0 * base + 1
    for _ in range(64):
        power = tl.where((exponent & 1) != 0, power * base, power)
        base = base * base
        exponent = exponent >> 1
    inverse = tl.where(a == 1, 1, tl.where(a + 1 == 0, 1 - 2 * (b & 1), 0))
    return tl.where(b < 0, inverse, power)""",
    # erfc(|x|) is 2**p(|x|) with a polynomial of degree 7, fitted by Lawson's method to the least
    # max(erfc, 0.1) * |error|: |error| <= 1.3e-6, and 1.4e-5 of 1 - erf up to 3.7. A rational form
    # (Abramowitz and Stegun 7.1.26) takes four instructions more. ``libdevice.exp2`` flushes
    # subnormals, negligible beside 1, to 0; tl.exp2 takes three instructions to keep them.
    "_approximate_erf": """\
def _approximate_erf(x):
    size = tl.abs(x)
    p = -1.45340482e-5 * size + 4.11679411e-4
    p = ((p * size - 4.85377166e-3) * size + 3.30226641e-2) * size - 0.151385328
    p = ((p * size - 0.917617626) * size - 1.62797819) * size
    return libdevice.copysign(1.0 - libdevice.exp2(p), x)""",
    # The tail is 2**p(|x|), fitted as above to the least max(tail, 0.1) * |error|: |error| <= 9e-7,
    # and 1.1e-5 of the tail down to -6, where it is 1e-9, and 1 + erf has no digit left. It takes
    # three instructions less than that (sm_90, Triton 3.7.1, 2026-11).
    "_approximate_ndtr": """\
def _approximate_ndtr(x):
    size = tl.abs(x)
    p = -1.62240997e-6 * size + 5.72542194e-5
    p = ((p * size - 8.95874924e-4) * size + 8.37231241e-3) * size - 0.0536923558
    p = ((p * size - 0.458708882) * size - 1.15117133) * size - 1.0
    tail = libdevice.exp2(p)
    return tl.where(x < 0, tail, 1.0 - tail)""",
    # 1 - 2/(1 + exp(2x)) cancels where x is small: a series is used there.
    "_approximate_tanh": """\
def _approximate_tanh(x):
    far = 1.0 - libdevice.fast_dividef(2.0, 1.0 + libdevice.exp2(x * 2.8853900817779268))
    near = x - x * x * x * 0.3333333333333333
    return tl.where(tl.abs(x) < 0.03125, near, far)""",
    # One Philox a value; LLVM merges those of a thread's adjacent values with the same counter, as
    # their indices differ only in the bits that are shifted out. Of the first round's products one
    # is of 0.
    "_random": """\
def _random(seed, index):
    counter = index >> 2
    k, m = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32) if counter.dtype == tl.int64 else low ^ low
    first = _wide(low, 0xD2511F53)
    a, b, c, d = high ^ k, low ^ low, (first >> 32).to(tl.uint32) ^ m, first.to(tl.uint32)
    for _ in tl.static_range(9):
        k, m = k + 0x9E3779B9, m + 0xBB67AE85
        first, second = _wide(a, 0xD2511F53), _wide(c, 0xCD9E8D57)
        a, b = (second >> 32).to(tl.uint32) ^ b ^ k, second.to(tl.uint32)
        c, d = (first >> 32).to(tl.uint32) ^ d ^ m, first.to(tl.uint32)
    word = index & 3
    bits = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return (bits >> 8).to(tl.int32)""",
    "_wide": "def _wide(a, b: tl.constexpr):\n    return a.to(tl.uint64) * b",
    # A tile of 16 bits, combined with a 0 that is computed: ptxas follows a mere copy.
    "_again": """\
def _again(x):
    zero = (tl.program_id(0) // tl.num_programs(0)).to(tl.int16)
    zero = (tl.full(x.shape, 0, tl.int16) + zero).to(x.dtype, bitcast=True)
    text: tl.constexpr = "xor.b32 $0, $1, $2;"
    return tl.inline_asm_elementwise(text, "=r,r,r", [x, zero], x.dtype, is_pure=False, pack=2)""",
    "_prod": "def _prod(a, b):\n    return a * b",
    "_max": f"def _max(a, b):\n    return tl.maximum(a, b, {_NAN})",
    "_min": f"def _min(a, b):\n    return tl.minimum(a, b, {_NAN})",
    "_any": "def _any(a, b):\n    return a | b",
    "_all": "def _all(a, b):\n    return a & b",
    **floats8.functions(),
}
# LLVM computes the halves of a third of Philox's products by an instruction each, in pairs that it
# takes for vectors: 74 instructions for 16 numbers instead of 102 (sm_90, Triton 3.7.1, 2026-11).
PTX_FUNCTIONS = {
    "_wide": """\
def _wide(a, b: tl.constexpr):
    text: tl.constexpr = f"mul.wide.u32 $0, $1, {b};"
    return tl.inline_asm_elementwise(text, "=l,r", [a], tl.uint64, is_pure=True, pack=1)"""
}
"""Functions that are shorter in PTX, NVIDIA's."""


def names_in(text: str) -> tuple[str, ...]:
    """Return the names that a template or function requires: functions, and ``LIBDEVICE``."""
    names = tuple(name for name in FUNCTIONS if f"{name}(" in text)
    return (*names, LIBDEVICE) if LIBDEVICE in text else names


def text_of(dtype: DType) -> str:
    """Return a type in a kernel's text: ``tl.float32``."""
    return TYPES[dtype][0]


def number_text(value: float | int | bool) -> str:
    """Return a Python literal (an expression for infinities and NaN)."""
    if isinstance(value, float) and not math.isfinite(value):
        sign = "-" if value < 0 else ""
        return f'{sign}float("{"nan" if math.isnan(value) else "inf"}")'
    return repr(value)


def template(name: str, dtype: DType, *, approximate: bool) -> str:
    """Return the template of operation ``name`` on operands of ``dtype``.

    Raises:
        InternalError: if operands of this type do not have the operation.
    """
    row = ROWS[name]
    if dtype is BOOL:
        found = row.bools
    elif dtype is F64:
        found = row.double or row.floats
    elif dtype is I64:
        found = row.long or row.integers
    elif dtype.is_float:
        found = (row.approximate if approximate else None) or row.floats
    else:
        found = (row.unsigned if dtype.kind is Kind.UNSIGNED else None) or row.integers
    if found is None:
        raise InternalError(f"Triton has no {name} of {dtype}", stage=STAGE)
    return found
