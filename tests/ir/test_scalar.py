"""The table of scalar operations: complete, and with the meaning that torch gives it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fusec.ir.dtype import BF16, BOOL, F16, F32, F64, I32, I64, U8, DType, compute_type
from fusec.ir.expr import Expr, Op
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM
from fusec.ir.scalar import COARSE_TERMS, ROUND, SCALAR_OPS
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import to_storage
from fusec.tools.interpreter.scalar import OPERATIONS, scalar_operation
from tests.float_cases import narrowed
from tests.ir.graphs import axes, buffer, eval_expr, load
from tests.philox import KNOWN_ANSWERS, philox, random_bits

TORCH_TYPES = {
    BOOL: torch.bool,
    I32: torch.int32,
    I64: torch.int64,
    F32: torch.float32,
    F64: torch.float64,
}
TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "sub": torch.sub,
    **dict.fromkeys(COARSE_TERMS, torch.mul),
    "hits": torch.eq,
    "until": torch.le,
    "member": lambda s, begin, end: (begin <= s) & (s < end),
    "div": torch.true_divide,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "erf": torch.special.erf,
    "erfc": torch.special.erfc,
    "erfinv": torch.special.erfinv,
    "ndtr": torch.special.ndtr,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "nonzero": lambda a: a,
    "e2m1": lambda code: E2M1[(code & 15).long()],
    "within": lambda k, n: k,
    "probability": lambda a: a,
    **{name: lambda a, to=to: narrowed(a, to).to(a.dtype) for to, name in ROUND.items()},
    "random": lambda seeds, indices: torch.from_numpy(
        np.concatenate(
            [random_bits(int(s), [int(i) % 2**64]) for s, i in zip(seeds, indices, strict=True)]
        )
    ),
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FLOATS = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-20, 1e-3, -0.3, 0.999, 7.25, -13.7, 80.0]
SPECIAL = [float("inf"), -float("inf"), float("nan")]
INTEGERS = [0, 1, -1, 2, -2, 3, -7, 8, 100, -100, 2**31 - 1, -(2**31)]
DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")
ACCEPTED = {
    "any": (BOOL, I32, I64, F32, F64),
    "number": (I32, I64, F32, F64),
    "bits": (BOOL, I32, I64),
    "float": (F32, F64),
    "integer": (I32, I64),
    "f32": (F32,),
    "i32": (I32,),
    "i64": (I64,),
}


def samples(name: str, arity: int, dtype: DType) -> list[np.ndarray]:
    """Return arguments: all tuples of interesting values; no division by zero, no wild shifts."""
    if dtype.is_float:
        values: list[float] = FLOATS + SPECIAL
    else:
        values = list(INTEGERS) if dtype is not BOOL else [0, 1]
    first = np.array(values)
    if arity == 1:
        return [first]
    second = first
    if name in DIVISIONS and dtype.is_integer:
        second = np.array([1, 2, -3, 7, -100])
    if name in ("shl", "shr"):
        second = np.array([0, 1, 5, 31])
    if name == "pow" and dtype.is_integer:
        second = np.array([0, 1, 2, 3, 5])
    rows = np.array([*itertools.product(first, *[second] * (arity - 1))])
    return [*rows.T]


def cases() -> list[tuple[str, DType]]:
    return [(name, t) for name, row in SCALAR_OPS.items() for t in ACCEPTED[row.takes]]


def compute(name: str, arguments: list[np.ndarray], dtype: DType) -> np.ndarray:
    """Return the operation's value by the interpreter, over one axis."""
    env = Env()
    (i,) = axes("i", len(arguments[0]))
    operands: list[Expr] = []
    for position, values in enumerate(arguments):
        source = buffer(f"x{position}", len(values), dtype=dtype)
        to_storage(source, values, env)
        operands.append(load(source, i))
    return eval_expr(Op(name, tuple(operands)), env)


def test_every_operation_has_an_interpreter_entry_and_no_other() -> None:
    assert set(OPERATIONS) == set(SCALAR_OPS)


def test_every_operation_says_what_it_takes() -> None:
    assert {row.takes for row in SCALAR_OPS.values()} <= set(ACCEPTED)
    assert all(compute_type(t) is t for types in ACCEPTED.values() for t in types)


@pytest.mark.parametrize(("name", "dtype"), cases(), ids=str)
def test_operation_means_what_torch_means(name: str, dtype: DType) -> None:
    row = SCALAR_OPS[name]
    arguments = samples(name, row.arity, dtype)
    tensors = [torch.from_numpy(a.astype(np.float64)).to(TORCH_TYPES[dtype]) for a in arguments]
    if not dtype.is_float:
        tensors = [torch.from_numpy(a).to(TORCH_TYPES[dtype]) for a in arguments]
    expected = TORCH.get(name, getattr(torch, name, None))
    assert expected is not None
    reference = expected(*tensors).numpy()
    seen = compute(name, [t.numpy() for t in tensors], dtype)
    assert seen.dtype == reference.dtype
    # torch's own lgamma and erfinv in f32 are some ulp from the exact value.
    tolerance = 2e-5 if dtype is F32 else 1e-12
    np.testing.assert_allclose(seen, reference, rtol=tolerance, atol=tolerance * 1e-3)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_operation_on_half_types_rounds_once(dtype: DType) -> None:
    values = np.linspace(-3, 3, 50).astype(np.float32)
    half = torch.float16 if dtype is F16 else torch.bfloat16
    stored = torch.from_numpy(values).to(half)
    seen = compute("exp", [stored.float().numpy()], dtype)
    expected = stored.float().exp().to(half).float().numpy()
    close = np.abs(seen.astype(np.float32) - expected) <= np.abs(expected) * 2.0**-7
    assert close.all() and (seen == expected).mean() > 0.95


def test_the_reference_of_random_words_gives_the_published_answers() -> None:
    for counter, key, words in KNOWN_ANSWERS:
        assert philox(counter, key) == words


def test_random_bits_are_24_of_the_word_that_the_index_names() -> None:
    seen = scalar_operation("random", I32)(np.int64([0]), np.arange(4))
    assert seen.dtype == np.int32
    np.testing.assert_array_equal(seen, [w >> 8 for w in KNOWN_ANSWERS[0][2]])


def test_results_keep_the_sign_of_zero() -> None:
    minus, one = np.float32([-0.0]), np.float32([1.0])
    assert np.signbit(scalar_operation("mul", F32)(minus, one))[0]
    assert np.signbit(scalar_operation("erfinv", F32)(minus))[0]
    assert not np.signbit(scalar_operation("add", F32)(minus, -minus))[0]


def test_every_monoid_combines_by_an_operation_and_has_an_identity() -> None:
    for monoid in (SUM, PROD, MAX, MIN, ANY, ALL):
        dtype = BOOL if monoid.name in ("any", "all") else F32
        identity = np.asarray(monoid.identity(dtype))
        values = np.array([True, False]) if dtype is BOOL else np.float32([-2, 0, 3, np.inf])
        combined = OPERATIONS[monoid.combine](identity.astype(values.dtype), values)
        np.testing.assert_array_equal(combined, values)


@pytest.mark.parametrize(
    ("dtype", "least", "greatest"),
    [(BOOL, 0, 1), (U8, 0, 255), (I32, -(2**31), 2**31 - 1)],
    ids=str,
)
def test_identity_of_an_extreme_is_the_end_of_its_type(
    dtype: DType, least: int, greatest: int
) -> None:
    assert (MAX.identity(dtype), MIN.identity(dtype)) == (least, greatest)
