"""Types that eager has no kernel for are refused by compiled calls, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils import _pytree as pytree

from tests.ops.operations_page import recorded_rows
from tests.support import BACKEND, check, externs, values

TYPES = (torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32)

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "var": lambda x: x.var(),
    "std of rows": lambda x: x.std(-1),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "logaddexp": lambda x: torch.logaddexp(x, x),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, x),
    "remainder": lambda x: x % x,
    "fmod": lambda x: torch.fmod(x, x),
    "abs": lambda x: x.abs(),
    "relu": lambda x: x.relu(),
    "and": lambda x: x & x,
    "or": lambda x: x | x,
    "xor": lambda x: torch.bitwise_xor(x, x),
    "not": lambda x: torch.bitwise_not(x),
    "shift": lambda x: x << x,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "glu": F.glu,
    "hypot": lambda x: torch.hypot(x, x),
    "nextafter": lambda x: torch.nextafter(x, x),
    "ceil": lambda x: x.ceil(),
    "frac": lambda x: x.frac(),
    "clamp": lambda x: x.clamp(0, 1),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "addcdiv": lambda x: torch.addcdiv(x, x, x),
    "mm": lambda x: x @ x,
    "mv": lambda x: x @ x[0],
    "subtract": lambda x: x - x,
    "unfold": lambda x: F.unfold(x[None, None], 3),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 3),
    "avg_pool2d": lambda x: F.avg_pool2d(x[None], 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], 2),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "threshold": lambda x: F.threshold(x, 0.5, 300),
}

SMALL_TENSORS = 5000
"""Elements of the input of a sample of ``op_db``."""

TAKEN_APART_FIRST = (
    "nn.functional.hardshrink", "nn.functional.interpolate", "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss", "nn.functional.upsample",
)  # fmt: skip
"""What torch takes apart before fusec sees it: integers are computed, as in ``aot_eager``."""


def outcome(call: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    try:
        return call(*[x.clone() for x in inputs])
    except Exception as error:
        return error


def check_refusal(call: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Assert that a compiled call fails where eager does, and only there: at the call, or in torch.

    Dynamo refuses much of it first, in words of its own.
    """
    eager = outcome(call, *inputs)
    torch.compiler.reset()
    found = outcome(torch.compile(call, backend=BACKEND), *inputs)
    if not isinstance(eager, Exception):
        assert not isinstance(found, Exception), repr(found)
        return
    assert isinstance(found, Exception), f"{found} where eager raises {eager!r}"
    assert isinstance(found, RuntimeError | ValueError | TypeError | IndexError)
    assert not isinstance(found, BackendCompilerFailed), repr(found)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_type_is_refused_as_eager_refuses_it(name: str, dtype: torch.dtype) -> None:
    check_refusal(CALLS[name], torch.ones(6, 6).to(dtype))


def test_the_calls_have_both_outcomes() -> None:
    every = [outcome(c, torch.ones(6, 6).to(t)) for c in CALLS.values() for t in TYPES]
    refused = sum(isinstance(found, Exception) for found in every)
    assert refused > 40 and len(every) - refused > 60


X, W, ROWS = torch.ones(4, 6), torch.ones(2, 6), torch.ones(3, 6)
PLACES = torch.tensor([0, 2, 1])
MIXED: dict[str, tuple[Callable[..., Any], Any]] = {
    "linear of bf16 and f32": (lambda x, w: F.linear(x.bfloat16(), w), (X, W)),
    "many rows of bf16 and f32": (lambda x, w: F.linear(x.bfloat16(), w), (torch.ones(40, 6), W)),
    "rows of f32 and bf16": (lambda x, w: F.linear(x, w.bfloat16()), (X, W)),
    "bias of f32 beside bf16": (
        lambda x, w, b: F.linear(x.bfloat16(), w.bfloat16(), b),
        (X, W, W[:, 0]),
    ),
    "image of bf16 and f32": (
        lambda x, w: F.conv2d(x.bfloat16(), w),
        (torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3)),
    ),
    "bias of bf16": (lambda x, w, b: F.linear(x, w, b), (X, W, W[:, 0].bfloat16())),
    "addmm of f64": (lambda b, x, w: torch.addmm(b.double(), x, w.t()), (X[0, :2], X, W)),
    "classes of i32": (lambda x, y: F.cross_entropy(x, y), (ROWS, PLACES.int())),
    "classes of i64": (lambda x, y: F.cross_entropy(x, y), (ROWS, PLACES)),
    "norm by bf16": (lambda x, w: F.layer_norm(x, (6,), w, w), (X, W[0].bfloat16())),
    "norm by f64": (lambda x, w: F.layer_norm(x, (6,), w, None), (X, W[0].double())),
    "norm of bf16 by f64": (lambda x, w: F.layer_norm(x, (6,), w), (X.bfloat16(), W[0].double())),
    "norm of bf16 by f32": (lambda x, w: F.layer_norm(x, (6,), w), (X.bfloat16(), W[0])),
    "index_put of f64": (lambda x, i, s: x.index_put((i,), s), (X, PLACES, ROWS.double())),
    "index_add of f64": (lambda x, i, s: x.index_add(0, i, s), (X, PLACES, ROWS.double())),
    "index_copy of i32": (lambda x, i, s: x.index_copy(0, i, s), (X, PLACES, ROWS.int())),
    "put of f64": (lambda x, i, s: x.put(i, s), (X, PLACES, ROWS[:, 0].double())),
}
"""Calls of several types, and their inputs."""
MIXED |= {
    f"{name} at places of {kind}": (call, (X, PLACES.to(kind), ROWS))
    for kind in (torch.uint8, torch.int16, torch.int32, torch.float32)
    for name, call in {
        "index_add": lambda x, i, s: x.index_add(0, i, s),
        "index_copy": lambda x, i, s: x.index_copy(0, i, s),
        "index_fill": lambda x, i, s: x.index_fill(0, i, 2.0),
        "index_select": lambda x, i, s: x.index_select(0, i) * 2,
        "index_reduce": lambda x, i, s: x.index_reduce(0, i, s, "prod"),
    }.items()
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MIXED)
def test_a_mixture_of_types_is_refused_as_eager_refuses_it(name: str) -> None:
    call, inputs = MIXED[name]
    check_refusal(call, *inputs)


def test_types_that_only_the_trace_mixes_are_no_refusal() -> None:
    """The trace says bf16 of a norm's mean; eager's kernel, given weights of f32, wants f32."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.layer_norm(x, (128,), w, b))

    inputs = [values(4, 128).bfloat16(), values(128), values(128)]
    check(fn, *inputs, train=True)
    assert BACKEND != "fusec" or externs(fn, *inputs, train=True) == []


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "fusec", reason="other backends compute some of them")
@pytest.mark.parametrize("name", recorded_rows())
def test_operations_refuse_the_types_that_eager_refuses(name: str) -> None:
    pytest.importorskip("expecttest", reason="the table imports it")
    from tests.ops import op_db  # local: the table takes 4 s to import

    operation = op_db.find_op(name)
    base = torch.float32
    if operation is None or base not in operation.dtypes or name.startswith(TAKEN_APART_FIRST):
        pytest.skip("no such operation, or none of floats, or taken apart first")
    samples = operation.sample_inputs("cpu", base, requires_grad=False)
    sample = next((s for s in samples if isinstance(s.input, torch.Tensor)
                   and 1 < s.input.numel() < SMALL_TENSORS), None)  # fmt: skip
    if sample is None:
        pytest.skip("no sample of a small tensor")
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))

    def call(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        whole = [next(given) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(whole, spec)
        return operation.op(*args, **kwargs)

    for dtype in (torch.bool, torch.int64, torch.float16):
        if dtype not in operation.dtypes:
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            cast = [x.detach().to(dtype) if x.is_floating_point() else x for x in tensors]
            if isinstance(outcome(call, *cast), Exception):
                check_refusal(call, *cast)
