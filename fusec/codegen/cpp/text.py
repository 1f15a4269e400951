"""C++ text of constants and comments, without a printer's state."""

from __future__ import annotations

import math

from fusec.ir.dtype import BOOL, F32, I64, compute_type
from fusec.ir.expr import Const


def literal(node: Const) -> str:
    """Return a constant as C++."""
    value, dtype = node.value, compute_type(node.dtype)
    if dtype is BOOL:
        return "true" if value else "false"
    if not dtype.is_float:
        if value == -(2**63):
            return "(-0x7fffffffffffffffLL - 1)"
        return (
            f"{int(value)}LL"
            if dtype is I64
            else f"{int(value)}"
            if value != -(2**31)
            else "(-0x7fffffff - 1)"
        )
    number = float(value)
    suffix = "f" if dtype is F32 else ""
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    if dtype is F32 and abs(number) > 3.4028235677973366e38:
        return f"{'-' if number < 0 else ''}__builtin_inff()"
    return f"{number!r}{suffix}"


def comment(line: str) -> str:
    """Return text that is safe in a ``//`` comment: printable, no line splice at the end."""
    clean = "".join(c if c.isprintable() else " " for c in line)
    return clean.rstrip("\\ ").replace("??/", "?/")
