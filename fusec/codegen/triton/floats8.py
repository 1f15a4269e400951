"""Floats of 8 bits in Triton kernels: their codes are ``tl.uint8``, their values f32.

Conversions are written on the bits, to nearest even: they run on each GPU and in Triton's
interpreter, and are exact, where Triton's own saturate to another number than eager or refuse a
target. Where the GPU has an instruction (``CodeTuning.converts_float8``), that is used.

Worked example: ``_to_f8e5m2(x)`` of an f32 tile is its codes, ``_of_f8e5m2`` the way back.
"""

from __future__ import annotations

from collections.abc import Callable

from fusec.ir.dtype import F4X2, F8, DType, FloatFormat
from fusec.ir.expr import Cast, Dot, Expr, Load, Var
from fusec.ir.program import Let, Program, Update, reads, statements

_IMPLICIT = 1 << 23
_QUIET_NAN = 0x7FC00000
HARDWARE = {"f8e4m3fn": "tl.float8e4nv", "f8e5m2": "tl.float8e5"}
"""Type -> Triton's, of those that NVIDIA's GPUs convert and multiply from sm_89 on."""
FORMATS = {"f8e4m3fn": "e4m3", "f8e5m2": "e5m2", F4X2.name: "e2m1"}
"""Type -> its name in a product whose factors have scales."""


def multiplied(program: Program) -> frozenset[Expr]:
    """Return the loads that are tiles of floats, not of codes: tensor cores multiply them.

    Nothing else reads them but conversions. A bit cast between load and product would put the tile
    in registers.
    """
    if not program.code.converts_float8:
        return frozenset()
    body = tuple(statements(program.body))
    loads = {s.var for s in body if isinstance(s, Let) and isinstance(s.value, Load)}
    found: set[Expr] = {v for v in loads if v.dtype.name in HARDWARE}
    dots: set[Expr] = set()
    for statement in reversed(body):
        match statement:
            case Let(value=Dot() as dot) | Update(value=Dot() as dot):
                dots.update((dot.left, dot.right, *dot.scales))
            case Let(var=var, value=Var() as value):
                dots.update({value} if var in dots else ())
            case Let(value=Cast()):
                pass
            case _:
                found.difference_update(reads(statement))
    return frozenset(found & dots)


def operand(value: Expr, name: Callable[[Expr], str]) -> str:
    """Return an operand in Triton's type of floats of 8 bits; as codes where it has none."""
    kind = HARDWARE.get(value.dtype.name)
    return f"{name(value)}.to({kind}, bitcast=True)" if kind else name(value)


def scaled_product(dot: Dot, name: Callable[[Expr], str]) -> str:
    """Return a product whose factors have a scale for each block of terms."""
    texts: list[str] = []
    for side, scale in zip((dot.left, dot.right), dot.scales, strict=True):
        texts += (operand(side, name), operand(scale, name), f'"{FORMATS[side.dtype.name]}"')
    into = () if dot.into is None else (name(dot.into),)
    return f"tl.dot_scaled({', '.join((*texts, *into))})"


def functions(*, by_hardware: bool = False) -> dict[str, str]:
    """Return the functions that convert and round, by name.

    Args:
        by_hardware: use the GPU's instructions where there are any.
    """
    found: dict[str, str] = {}
    for dtype in F8:
        layout = dtype.format
        assert layout is not None
        fast = by_hardware and dtype.name in HARDWARE
        found[f"_to_{dtype}"] = (_fast_encoder if fast else _encoder)(dtype, layout)
        found[f"_of_{dtype}"] = _fast_decoder(dtype) if fast else _decoder(dtype, layout)
        found[f"_round_{dtype}"] = f"def _round_{dtype}(x):\n    return _of_{dtype}(_to_{dtype}(x))"
    return found


def _encoder(dtype: DType, layout: FloatFormat) -> str:
    dropped, rebias = 23 - layout.mantissa, (127 - layout.bias) << 23
    last = f"(size >> {dropped}) & 1" if layout.mantissa else f"tl.where(size < {_IMPLICIT}, 0, 1)"
    half = (1 << (dropped - 1)) - 1
    lines = [
        f"def _to_{dtype}(x):",
        "    bits = x.to(tl.int32, bitcast=True)",
        "    size = bits & 0x7fffffff",
        f"    code = (size - {rebias} + {half} + ({last})) >> {dropped}",
    ]
    if layout.mantissa:
        # Added to 2^23 times the least number, what is below the normal ones is a multiple of it.
        shift = (127 + 24 - layout.bias - layout.mantissa) << 23
        lines += [
            f"    moved = tl.abs(x) + {2.0 ** ((shift >> 23) - 127)!r}",
            f"    small = moved.to(tl.int32, bitcast=True) - {shift}",
            f"    code = tl.where(size < {rebias + _IMPLICIT}, small, code)",
        ]
    lines += [
        f"    code = tl.where(code > {layout.largest}, {layout.too_large}, code)",
        f"    code = tl.where(size > 0x7f800000, {layout.nan}, code)",
        *_signed(layout),
        "    return code.to(tl.uint8)",
    ]
    return "\n".join(lines)


def _signed(layout: FloatFormat) -> list[str]:
    """Return the lines that give a code its sign."""
    if not layout.has_sign:
        return []
    if layout.has_negative_zero:
        return ["    code = code | ((bits >> 24) & 0x80)"]
    return ["    code = tl.where(code != 0, code | ((bits >> 24) & 0x80), code)"]


def _decoder(dtype: DType, layout: FloatFormat) -> str:
    dropped, rebias = 23 - layout.mantissa, (127 - layout.bias) << 23
    lines = [f"def _of_{dtype}(code):", "    code = code.to(tl.int32)"]
    if not layout.has_sign:
        lines += [
            f"    bits = tl.where(code == 0, {_IMPLICIT // 2}, code << 23)",
            f"    bits = tl.where(code == {layout.nan}, {_QUIET_NAN}, bits)",
            "    return bits.to(tl.float32, bitcast=True)",
        ]
        return "\n".join(lines)
    least_normal = 2.0 ** (1 - layout.bias)
    lines += [
        "    size = code & 0x7f",
        f"    bits = (size << {dropped}) + {rebias}",
        # Below the normal numbers: what exceeds the least normal one.
        f"    small = (bits + {_IMPLICIT}).to(tl.float32, bitcast=True) - {least_normal!r}",
        "    small = small.to(tl.int32, bitcast=True)",
        f"    bits = tl.where(size < {1 << layout.mantissa}, small, bits)",
    ]
    if layout.infinity is not None:
        lines.append(f"    bits = tl.where(size == {layout.infinity}, 0x7f800000, bits)")
        lines.append(f"    bits = tl.where(size > {layout.infinity}, {_QUIET_NAN}, bits)")
    else:
        lines.append(f"    bits = tl.where(code == {layout.nan}, {_QUIET_NAN}, bits)")
        if layout.has_negative_zero:
            lines.append(f"    bits = tl.where(code == {layout.nan | 0x80}, {_QUIET_NAN}, bits)")
    lines.append("    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)")
    return "\n".join(lines)


def _fast_encoder(dtype: DType, layout: FloatFormat) -> str:
    """The instruction gives the largest number for what is larger, and for infinity."""
    lines = [f"def _to_{dtype}(x):"]
    converted = f"x.to({HARDWARE[dtype.name]}).to(tl.uint8, bitcast=True)"
    if layout.saturates:
        return "\n".join((*lines, f"    return {converted}"))
    # Halfway between the largest number and the next, which has the code of infinity.
    step = 2.0 ** ((layout.largest >> layout.mantissa) - layout.bias - layout.mantissa)
    largest = step * ((1 << (layout.mantissa + 1)) - 1)
    lines += [
        "    infinity = ((x.to(tl.int32, bitcast=True) >> 24) & 0x80 | "
        f"{layout.too_large}).to(tl.uint8)",
        f"    return tl.where(tl.abs(x) >= {largest + step / 2!r}, infinity, {converted})",
    ]
    return "\n".join(lines)


def _fast_decoder(dtype: DType) -> str:
    converted = f"code.to({HARDWARE[dtype.name]}, bitcast=True).to(tl.float32)"
    return f"def _of_{dtype}(code):\n    return {converted}"
