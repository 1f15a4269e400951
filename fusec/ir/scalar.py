"""The table of scalar operations: every ``Op`` node names one row.

A row has an operation's number and types of arguments, the type of its result, and its cost.
A new primitive is one row here, one in each printer's table and one in the interpreter's;
``tests/ir/test_scalar.py`` fails for a missing one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.ir.dtype import F8, HALF, DType


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """One scalar operation.

    Attributes:
        arity: number of arguments.
        takes: the compute types of its arguments: "number" (all but bool), "float", "integer",
            "bits" (bool and integers), "any", "i64", or "f32".
        result: "same" (the type of the last argument), "bool", "i32" or "f32".
        cost: modelled cost in multiply-adds (an f32 vector unit, measured 2026-11, AVX-512).
        infix: the operator it prints as, or None for a call.
    """

    name: str
    arity: int
    takes: str = "number"
    result: str = "same"
    cost: int = 1
    infix: str | None = None


_ROWS = (
    ScalarOp("add", 2, infix="+"),
    ScalarOp("sub", 2, infix="-"),
    ScalarOp("mul", 2, infix="*"),
    # The product of two f32 whose sums may be coarse: ``COARSE_TERMS``.
    ScalarOp("mul8", 2, takes="f32"),
    ScalarOp("mul8_fast", 2, takes="f32"),
    ScalarOp("div", 2, takes="float", cost=4, infix="/"),
    ScalarOp("floordiv", 2, takes="integer", cost=8, infix="//"),  # integers: rounds down
    ScalarOp("truncdiv", 2, takes="integer", cost=8),  # integers: rounds to zero
    ScalarOp("remainder", 2, cost=8, infix="%"),  # sign of the divisor, as torch.remainder
    ScalarOp("fmod", 2, cost=8),  # sign of the dividend
    ScalarOp("nonzero", 1, takes="integer"),  # identity; C++ reports 0, as eager of a divisor
    ScalarOp("within", 2, takes="integer"),  # (k, n) -> k; C++ reports k outside [0, n)
    ScalarOp("probability", 1, takes="float"),  # identity; C++ reports values outside [0, 1]
    ScalarOp("pow", 2, cost=24),
    ScalarOp("atan2", 2, takes="float", cost=32),
    ScalarOp("minimum", 2, takes="any"),  # NaN if either is
    ScalarOp("maximum", 2, takes="any"),
    ScalarOp("copysign", 2, takes="float"),
    ScalarOp("nextafter", 2, takes="float", cost=8),
    ScalarOp("hypot", 2, takes="float", cost=8),
    ScalarOp("neg", 1),
    ScalarOp("abs", 1),
    ScalarOp("sign", 1),
    ScalarOp("floor", 1),
    ScalarOp("ceil", 1),
    ScalarOp("trunc", 1),
    ScalarOp("round", 1),  # half to even
    ScalarOp("sqrt", 1, takes="float", cost=6),
    ScalarOp("rsqrt", 1, takes="float", cost=6),
    ScalarOp("reciprocal", 1, takes="float", cost=4),
    ScalarOp("exp", 1, takes="float", cost=10),
    ScalarOp("exp2", 1, takes="float", cost=10),
    ScalarOp("expm1", 1, takes="float", cost=14),
    ScalarOp("log", 1, takes="float", cost=12),
    ScalarOp("log2", 1, takes="float", cost=12),
    ScalarOp("log10", 1, takes="float", cost=12),
    ScalarOp("log1p", 1, takes="float", cost=14),
    ScalarOp("sin", 1, takes="float", cost=16),
    ScalarOp("cos", 1, takes="float", cost=16),
    ScalarOp("tan", 1, takes="float", cost=32),
    ScalarOp("asin", 1, takes="float", cost=32),
    ScalarOp("acos", 1, takes="float", cost=32),
    ScalarOp("atan", 1, takes="float", cost=32),
    ScalarOp("sinh", 1, takes="float", cost=32),
    ScalarOp("cosh", 1, takes="float", cost=32),
    ScalarOp("tanh", 1, takes="float", cost=14),
    ScalarOp("asinh", 1, takes="float", cost=32),
    ScalarOp("acosh", 1, takes="float", cost=32),
    ScalarOp("atanh", 1, takes="float", cost=32),
    ScalarOp("sigmoid", 1, takes="float", cost=14),
    ScalarOp("erf", 1, takes="float", cost=18),
    ScalarOp("erfc", 1, takes="float", cost=32),
    ScalarOp("erfinv", 1, takes="float", cost=40),
    ScalarOp("ndtr", 1, takes="float", cost=20),  # normal distribution: (1 + erf(x / 2**0.5)) / 2
    ScalarOp("lgamma", 1, takes="float", cost=64),
    # f32 -> f32, to the nearest number of a type, ties to even.
    ScalarOp("round_f16", 1, takes="f32", cost=2),
    ScalarOp("round_bf16", 1, takes="f32", cost=2),
    *(ScalarOp(f"round_{dtype}", 1, takes="f32", cost=8) for dtype in F8),
    ScalarOp("e2m1", 1, takes="i32", result="f32", cost=6),  # the float in the low 4 bits
    ScalarOp("and", 2, takes="bits", infix="&"),  # bool and integers: bitwise
    ScalarOp("or", 2, takes="bits", infix="|"),
    ScalarOp("xor", 2, takes="bits", infix="^"),
    ScalarOp("not", 1, takes="bits"),  # bool: logical; integers: bitwise
    ScalarOp("shl", 2, takes="integer", infix="<<"),
    ScalarOp("shr", 2, takes="integer", infix=">>"),  # arithmetic
    ScalarOp("eq", 2, takes="any", result="bool", infix="=="),
    ScalarOp("ne", 2, takes="any", result="bool", infix="!="),
    ScalarOp("lt", 2, takes="any", result="bool", infix="<"),
    ScalarOp("le", 2, takes="any", result="bool", infix="<="),
    ScalarOp("gt", 2, takes="any", result="bool", infix=">"),
    ScalarOp("ge", 2, takes="any", result="bool", infix=">="),
    ScalarOp("hits", 2, takes="integer", result="bool"),  # eq, of scatters (ir/serial.py)
    ScalarOp("until", 2, takes="integer", result="bool"),  # le, of scans (ir/serial.py)
    ScalarOp("member", 3, takes="integer", result="bool"),  # (s, b, e) -> b <= s < e (ir/groups.py)
    ScalarOp("isnan", 1, takes="float", result="bool"),
    ScalarOp("isinf", 1, takes="float", result="bool"),
    # (seed, index) -> 24 random bits: the upper ones of word index % 4 of Philox-4x32-10 with the
    # seed as its key and index // 4 as its counter.
    ScalarOp("random", 2, takes="i64", result="i32", cost=20),
)

SCALAR_OPS: dict[str, ScalarOp] = {row.name: row for row in _ROWS}

COARSE_TERMS: dict[str, int] = {"mul": 0, "mul8": 128, "mul8_fast": 1 << 30}
"""Product -> how many of its sum's terms in a row may be added with 14 bits, before f32 takes them.

So tensor cores of 8 bits add on Hopper: a term counts down to 2^-13 of the largest one beside it
(DeepSeek-V3 Technical Report, 2024, 3.3.2). A library's ``_scaled_mm`` promotes to f32 after 128
terms, unless its accumulation may be fast. Products of other types say ``mul``: none is coarse.
"""

CHECKED: dict[str, int] = {"nonzero": 1, "within": 0, "probability": 0}
"""Operation that may raise an error on CPUs -> a first argument for which it never does."""

ROUND: dict[DType, str] = {dtype: f"round_{dtype}" for dtype in (*HALF, *F8)}
"""Type of fewer than 32 bits -> the operation that rounds an f32 to it."""
