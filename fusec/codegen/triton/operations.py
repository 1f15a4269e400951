"""Table of the Triton text of each scalar operation: one row of templates an operation.

A row has a template for each kind of element type: ``{0}`` and ``{1}`` are the operands, ``{t}`` is
the operands' Triton type. There are no types narrower than f32 here: the printer widens them.

The accurate form is the default: it is IEEE where PyTorch's CUDA kernels are (``div``, ``sqrt``)
and calls the same libdevice function elsewhere. An ``approximate`` form has a relative error of
some 1e-5, or an absolute one of 1.3e-6 (erf), and is meant for values that are rounded to 16 bits;
the printer chooses it for each value (``Form.approximate``).

Functions that Triton lacks are in ``FUNCTIONS``; the printer prints those that a kernel calls, and
those that these call in turn, before the kernel.

Worked example: ``maximum`` of f32 is ``tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.errors import InternalError
from fusec.ir.dtype import BOOL, F64, I64, DType, Kind

STAGE = "codegen.triton"
LIBDEVICE = "libdevice"


@dataclass(frozen=True, slots=True)
class Template:
    """Text with placeholders for operands, and the names that it requires: keys of ``FUNCTIONS``,
    or ``LIBDEVICE``."""

    text: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Function:
    """A ``@triton.jit`` function that kernels call, and the names that it requires itself."""

    source: str
    needs: tuple[str, ...] = ()


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

    floats: Template | None = None
    double: Template | None = None
    approximate: Template | None = None
    integers: Template | None = None
    unsigned: Template | None = None
    long: Template | None = None
    bools: Template | None = None


def _text(text: str) -> Template:
    return Template(text)


def _call(function: str, arity: int = 2) -> Template:
    return Template(f"{function}({', '.join(f'{{{i}}}' for i in range(arity))})", (function,))


def _lib(text: str) -> Template:
    return Template(text, (LIBDEVICE,))


def _libdevice(name: str) -> Row:
    return Row(_lib(f"libdevice.{name}({{0}})"))


def _libdevice2(name: str) -> Row:
    return Row(_lib(f"libdevice.{name}({{0}}, {{1}})"))


def _arithmetic(operator: str) -> Row:
    text = _text(f"{{0}} {operator} {{1}}")
    return Row(floats=text, integers=text)


def _bitwise(operator: str) -> Row:
    text = _text(f"{{0}} {operator} {{1}}")
    return Row(integers=text, bools=text)


def _comparison(operator: str) -> Row:
    text = _text(f"{{0}} {operator} {{1}}")
    return Row(floats=text, integers=text, bools=text)


_LOG2_E = "1.4426950408889634"
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_SAME = _text("{0}")
_SIGN = _text("({0} > 0).to({t}) - ({0} < 0).to({t})")

ROWS: dict[str, Row] = {
    "add": _arithmetic("+"),
    "sub": _arithmetic("-"),
    "mul": _arithmetic("*"),
    "div": Row(
        floats=_text("tl.div_rn({0}, {1})"),
        double=_text("{0} / {1}"),
        approximate=_text("{0} / {1}"),
    ),
    "floordiv": Row(
        floats=_call("_float_floor_div"),
        integers=_call("_floor_div"),
        unsigned=_text("{0} // {1}"),
    ),
    "truncdiv": Row(
        floats=_lib("libdevice.trunc(tl.div_rn({0}, {1}))"),
        double=_lib("libdevice.trunc({0} / {1})"),
        integers=_text("{0} // {1}"),  # Triton's integer division rounds to zero, as C's
    ),
    "remainder": Row(
        floats=_call("_float_remainder"),
        integers=_call("_remainder"),
        unsigned=_text("{0} % {1}"),
    ),
    "fmod": Row(_lib("libdevice.fmod({0}, {1})"), integers=_text("{0} % {1}")),
    "nonzero": Row(integers=_SAME),  # x / 0 is a value on GPUs
    "within": Row(integers=_SAME),
    "probability": Row(_SAME),
    "pow": Row(_lib("libdevice.pow({0}, {1})"), integers=_call("_int_pow")),
    "atan2": _libdevice2("atan2"),
    "minimum": Row(
        floats=_text(f"tl.minimum({{0}}, {{1}}, {_NAN})"),
        integers=_text("tl.minimum({0}, {1})"),
        bools=_text("{0} & {1}"),
    ),
    "maximum": Row(
        floats=_text(f"tl.maximum({{0}}, {{1}}, {_NAN})"),
        integers=_text("tl.maximum({0}, {1})"),
        bools=_text("{0} | {1}"),
    ),
    "copysign": _libdevice2("copysign"),
    "nextafter": _libdevice2("nextafter"),
    "hypot": _libdevice2("hypot"),
    "neg": Row(_text("-{0}"), integers=_text("-{0}")),
    "abs": Row(_text("tl.abs({0})"), integers=_text("tl.abs({0})"), unsigned=_SAME),
    "sign": Row(_SIGN, integers=_SIGN, unsigned=_text("({0} > 0).to({t})")),
    "floor": Row(_text("tl.floor({0})"), integers=_SAME),
    "ceil": Row(_text("tl.ceil({0})"), integers=_SAME),
    "trunc": Row(_lib("libdevice.trunc({0})"), integers=_SAME),
    "round": Row(_lib("libdevice.nearbyint({0})"), integers=_SAME),
    "sqrt": Row(
        floats=_text("tl.sqrt_rn({0})"),
        double=_text("tl.sqrt({0})"),
        approximate=_text("tl.sqrt({0})"),
    ),
    "rsqrt": Row(_text("tl.rsqrt({0})")),
    "reciprocal": Row(
        floats=_text("tl.div_rn(1.0, {0})"),
        double=_text("1.0 / {0}"),
        approximate=_text("1.0 / {0}"),
    ),
    "exp": Row(_lib("libdevice.exp({0})"), approximate=_text(f"tl.exp2({{0}} * {_LOG2_E})")),
    "exp2": Row(_text("tl.exp2({0})")),
    "expm1": _libdevice("expm1"),
    "log": Row(_text("tl.log({0})")),
    "log2": Row(_text("tl.log2({0})")),
    "log10": _libdevice("log10"),
    "log1p": _libdevice("log1p"),
    "sin": Row(_text("tl.sin({0})")),
    "cos": Row(_text("tl.cos({0})")),
    "tan": _libdevice("tan"),
    "asin": _libdevice("asin"),
    "acos": _libdevice("acos"),
    "atan": _libdevice("atan"),
    "sinh": _libdevice("sinh"),
    "cosh": _libdevice("cosh"),
    "tanh": Row(_lib("libdevice.tanh({0})"), approximate=_call("_approximate_tanh", 1)),
    "asinh": _libdevice("asinh"),
    "acosh": _libdevice("acosh"),
    "atanh": _libdevice("atanh"),
    "sigmoid": Row(
        floats=_lib("tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))"),
        double=_lib("1.0 / (1.0 + libdevice.exp(-{0}))"),
        approximate=_lib(f"libdevice.fast_dividef(1.0, 1.0 + libdevice.exp2({{0}} * -{_LOG2_E}))"),
    ),
    "erf": Row(_text("tl.erf({0})"), approximate=_call("_approximate_erf", 1)),
    "erfc": _libdevice("erfc"),
    "erfinv": _libdevice("erfinv"),
    "lgamma": _libdevice("lgamma"),
    "round_f16": Row(_text("{0}.to(tl.float16).to({t})")),
    "round_bf16": Row(_text("{0}.to(tl.bfloat16).to({t})")),
    "and": _bitwise("&"),
    "or": _bitwise("|"),
    "xor": _bitwise("^"),
    "not": Row(
        integers=_text("~{0}"),
        unsigned=_text("{0} ^ 255"),  # u8 is the only unsigned type
        bools=_text("{0} ^ True"),
    ),
    "shl": Row(integers=_text("{0} << {1}")),
    "shr": Row(integers=_text("{0} >> {1}")),
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "isnan": Row(_text("{0} != {0}")),
    "isinf": Row(_text('tl.abs({0}) == float("inf")')),
    "random": Row(long=_call("_random")),
}

_WRONG_SIGN = "(rest != 0) & ((rest < 0) != (b < 0))"

FUNCTIONS: dict[str, Function] = {
    "_floor_div": Function(
        f"""\
def _floor_div(a, b):
    quotient = a // b
    rest = a - quotient * b
    return tl.where({_WRONG_SIGN}, quotient - 1, quotient)"""
    ),
    "_remainder": Function(
        f"""\
def _remainder(a, b):
    rest = a % b
    return tl.where({_WRONG_SIGN}, rest + b, rest)"""
    ),
    "_float_remainder": Function(
        f"""\
def _float_remainder(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where({_WRONG_SIGN}, rest + b, rest)""",
        (LIBDEVICE,),
    ),
    "_float_floor_div": Function(
        f"""\
def _float_floor_div(a, b):
    rest = libdevice.fmod(a, b)
    quotient = libdevice.nearbyint((a - rest) / b)
    quotient = tl.where({_WRONG_SIGN}, quotient - 1, quotient)
    return tl.where(b == 0, a / b, quotient)""",
        (LIBDEVICE,),
    ),
    # ``a + 1 == 0``: Triton 3.9 refuses to compare an unsigned number with -1.
    "_int_pow": Function(
        """\
def _int_pow(a, b):
    base = a + 0 * b
    exponent = tl.maximum(b + 0 * a, 0)
    power = 0 * base + 1
    for _ in range(64):
        power = tl.where((exponent & 1) != 0, power * base, power)
        base = base * base
        exponent = exponent >> 1
    inverse = tl.where(a == 1, 1, tl.where(a + 1 == 0, 1 - 2 * (b & 1), 0))
    return tl.where(b < 0, inverse, power)"""
    ),
    # erfc(|x|) is 2**p(|x|) with a polynomial of degree 7, fitted by Lawson's method to the least
    # max(erfc, 0.1) * |error|: |error| <= 1.3e-6, and 1.4e-5 of 1 - erf up to 3.7. A rational form
    # (Abramowitz and Stegun 7.1.26) takes four instructions more. ``libdevice.exp2`` flushes
    # subnormals, negligible beside 1, to 0; tl.exp2 takes three instructions to keep them.
    "_approximate_erf": Function(
        """\
def _approximate_erf(x):
    size = tl.abs(x)
    p = -1.45340482e-5 * size + 4.11679411e-4
    p = ((p * size - 4.85377166e-3) * size + 3.30226641e-2) * size - 0.151385328
    p = ((p * size - 0.917617626) * size - 1.62797819) * size
    return libdevice.copysign(1.0 - libdevice.exp2(p), x)""",
        (LIBDEVICE,),
    ),
    # 1 - 2/(1 + exp(2x)) cancels where x is small: a series is used there.
    "_approximate_tanh": Function(
        """\
def _approximate_tanh(x):
    far = 1.0 - libdevice.fast_dividef(2.0, 1.0 + libdevice.exp2(x * 2.8853900817779268))
    near = x - x * x * x * 0.3333333333333333
    return tl.where(tl.abs(x) < 0.03125, near, far)""",
        (LIBDEVICE,),
    ),
    # One Philox a value; LLVM merges those of a thread's adjacent values with the same counter, as
    # their indices differ only in the bits that are shifted out. A 64-bit product is one
    # instruction; computing its halves separately takes two (sm_90, Triton 3.7.1, 2026-11).
    "_random": Function(
        """\
def _random(seed, index):
    counter = index >> 2
    k, m = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a = counter.to(tl.uint32)
    b = (counter >> 32).to(tl.uint32) if counter.dtype == tl.int64 else a ^ a
    c, d = a ^ a, a ^ a
    for _ in tl.static_range(10):
        first, second = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b = (second >> 32).to(tl.uint32) ^ b ^ k, second.to(tl.uint32)
        c, d = (first >> 32).to(tl.uint32) ^ d ^ m, first.to(tl.uint32)
        k, m = k + 0x9E3779B9, m + 0xBB67AE85
    word = index & 3
    bits = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return (bits >> 8).to(tl.int32)"""
    ),
    "_prod": Function("def _prod(a, b):\n    return a * b"),
    "_max": Function(f"def _max(a, b):\n    return tl.maximum(a, b, {_NAN})"),
    "_min": Function(f"def _min(a, b):\n    return tl.minimum(a, b, {_NAN})"),
    "_any": Function("def _any(a, b):\n    return a | b"),
    "_all": Function("def _all(a, b):\n    return a & b"),
}


def template(name: str, dtype: DType, *, approximate: bool) -> Template:
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
