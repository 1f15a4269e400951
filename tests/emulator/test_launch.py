"""fusec's kernels in the emulator, at small ragged sizes, beside eager and fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.emulator.launch import Arguments, TensorMap, span
from fusec.report.emulation import Emulation, Emulator, emulate
from tests.emulator.recorded import normal, softmax

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def row(n: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    """Return one of several unlike tensors."""
    return torch.roll(normal(*shape, dtype=dtype, scale=scale), n)


def heads(*shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [row(n, *shape, dtype=dtype) for n in range(3)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def steps(*tensors: Tensor) -> list[Tensor]:
    """Update several tensors of different sizes: one launch over a table."""
    return [p * 0.9 + g.float() * 0.1 for p, g in zip(tensors[::2], tensors[1::2], strict=True)]


def extremes(x: Tensor) -> Any:
    return x.max(-1), x.argmin(-1), x.amax(0), x.float().prod(-1), x.isnan().any(-1)


def transcendental(x: Tensor) -> Any:
    y = x * 1e5  # beyond the short reduction of sin and cos
    return (
        y.sin() + y.cos(),
        x.tanh().erf(),
        x.exp().log1p(),
        x.abs().pow(2.5),
        x.sigmoid().atan2(x),
    )


def integers(i: Tensor) -> Any:
    return i // 7, i % 5, i << 2, i >> 1, i & 3, i.float().round().to(torch.int8)


Row = tuple[Callable[..., Any], list[Tensor], bool]
MEMORY: dict[str, Row] = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (100,), w, b),
        [row(0, 13, 100), row(1, 100), row(2, 100)], True),
    "a long layer norm": (lambda x, w, b: F.layer_norm(x, (9000,), w, b),
        [row(0, 3, 9000), row(1, 9000), row(2, 9000)], True),
    "rms norm": (lambda x, w: F.rms_norm(x, (768,), w), [row(0, 7, 768), row(1, 768)], True),
    "softmax": (lambda x: x.softmax(-1), [row(0, 5, 1000)], True),
    "cross-entropy": (F.cross_entropy, [row(0, 9, 5257), torch.arange(9) * 500], True),
    "gelu and bias": (lambda x, b: F.gelu(x + b), [row(0, 11, 300), row(1, 300)], True),
    "swiglu without products": (lambda x, g: F.silu(g) * x, [row(0, 7, 99), row(1, 7, 99)], True),
    "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b),
        [row(0, 2, 16, 77), row(1, 16), row(2, 16)], True),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [row(0, 3, 16, 150), row(1, 16), row(2, 16)], True),
    "embedding": (lambda t, i: F.gelu(F.embedding(i, t)), [row(0, 40, 64), torch.arange(30)], True),
    "a sum over CTAs": (lambda x: x.float().sum(0), [row(0, 3000, 40)], False),
    "extremes": (extremes, [row(0, 9, 700)], False),
    "a scan": (lambda x: x.float().cumsum(-1), [row(0, 9, 200)], False),
    "pooling": (lambda x: F.max_pool2d(x, 2), [row(0, 1, 3, 18, 18)], True),
    "transcendental functions": (transcendental, [row(0, 8, 100, dtype=F32)], False),
    "integers": (integers, [torch.arange(-300, 300)], False),
    "a bundle": (steps, [row(n, *shape, dtype=dtype) for n, shape in
        enumerate([(100, 30), (77,), (8, 8, 8)]) for dtype in (F32, BF16)], False),
}  # fmt: skip
PRODUCTS: dict[str, Row] = {
    "linear and GELU": (linear, [row(0, 200, 264), row(1, 328, 264, scale=0.06), row(2, 328)],
        True),
    "linear of odd sizes": (linear, [row(0, 129, 65), row(1, 257, 65, scale=0.1), row(2, 257)],
        True),
    "linear in f32": (linear, [row(0, 100, 72, dtype=F32), row(1, 136, 72, dtype=F32),
        row(2, 136, dtype=F32)], True),
    "linear in f16": (linear, [row(0, 100, 72, dtype=F16), row(1, 136, 72, scale=0.1, dtype=F16),
        row(2, 136, dtype=F16)], True),
    "linear of few rows": (linear, [row(0, 16, 512), row(1, 136, 512, scale=0.05), row(2, 136)],
        False),
    "GEMV": (lambda x, w: F.silu(F.linear(x, w)), [row(0, 1, 2048), row(1, 40, 2048, scale=0.03)],
        False),
    "swiglu": (lambda x, w, v: F.silu(x @ w) * (x @ v),
        [row(0, 136, 200), *(row(n, 200, 136, scale=0.07) for n in (1, 2))], True),
    "causal attention": (attention, heads(1, 3, 200, 64), True),
    "causal attention of wide heads": (attention, heads(1, 2, 150, 128), True),
    "causal attention in f32": (attention, heads(1, 2, 100, 64, dtype=F32), True),
    "attention with a bias": (biased_attention, [*heads(1, 2, 100, 64), row(0, 1, 1, 100, 100)],
        True),
    "decoding": (decode, [row(0, 2, 32, 1, 128), row(1, 2, 8, 512, 128), row(2, 2, 8, 512, 128)],
        False),
}  # fmt: skip


def check(rows: dict[str, Row], name: str, seed: int, **options: str) -> Emulation:
    torch._dynamo.reset()
    fn, inputs, train = rows[name]
    found = emulate(fn, inputs, train=train, options=options, seed=seed)
    assert found.faults == (), str(found)
    assert any(one.instructions for one in found.kernels)
    return found


QUICK = ("layer norm", "a bundle")


@pytest.mark.parametrize("name", QUICK)
def test_kernels_are_right(name: str) -> None:
    check(MEMORY, name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("name", MEMORY)
def test_kernels_are_right_in_several_orders(name: str, seed: int) -> None:
    check(MEMORY, name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", ("never", "always"))
@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_right_in_several_orders(name: str, seed: int, descriptors: str) -> None:
    check(PRODUCTS, name, seed, race="fused", descriptors=descriptors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("linear and GELU", "causal attention", "swiglu"))
def test_products_of_older_gpus_are_right(name: str) -> None:
    torch._dynamo.reset()
    fn, inputs, train = PRODUCTS[name]
    found = emulate(fn, inputs, train=train, target="sm_80", options={"race": "fused"})
    assert found.faults == (), str(found)


@pytest.mark.slow
def test_a_tile_that_a_product_and_a_sum_read_is_not_overwritten() -> None:
    """The gradients of a linear's weight and bias in one kernel: Triton 3.7 would give their tile
    two buffers, and copy the next but one over it before it waits for the product."""
    from tests.emulator import blocks  # local: it imports transformers

    torch._dynamo.reset()
    torch.manual_seed(0)
    x = row(0, 2, 24, 64)
    found = emulate(blocks.vit().bfloat16(), [x], train=True, options={"race": "fused"})
    assert found.faults == (), str(found)


def test_random_numbers_are_those_of_their_seed() -> None:
    """Eager draws others, so each kernel is compared with its graph instead."""
    torch._dynamo.reset()
    x = row(0, 11, 300)
    found = emulate(lambda x: F.dropout(F.silu(x), 0.25), [x], train=True, seed=3)
    assert [(one.fault, one.problem) for one in found.kernels] == [("", "")] * 2


def test_a_launch_is_counted() -> None:
    x = normal(4, 1024, dtype=BF16)
    emulator = Emulator.of("sm_90", {"race": "library"})
    torch._dynamo.reset()
    torch.compile(lambda x: x.softmax(-1), backend=emulator.backend)(x)
    (one,) = emulator.kernels
    counts = one.kernel.counts
    assert (counts.global_loaded, counts.global_stored) == (x.nbytes, x.nbytes)
    assert counts.instructions > 1000 and counts.products == 0


def test_a_size_of_zero_launches_nothing() -> None:
    emulator = Emulator.of("sm_90", {"race": "library"})
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x * 2 + 1, backend=emulator.backend, dynamic=True)
    for rows in (5, 7):
        torch.testing.assert_close(fn(torch.ones(rows, 3)), torch.full((rows, 3), 3.0))
    assert fn(torch.ones(0, 3)).shape == (0, 3)


def test_memory_that_was_not_passed_may_not_be_touched() -> None:
    def shorter(given: Arguments) -> Arguments:
        (first, size), *rest = given.buffers
        return replace(given, buffers=((first, size - 16), *rest))

    found = softmax().fault(given=shorter)
    assert found is not None and found.kind == "out of bounds"


def test_a_view_spans_from_its_first_to_its_last_element() -> None:
    x = torch.zeros(4, 6)
    assert span(x[1:3, ::2]) == (x.data_ptr() + 24, 4 * (6 + 4 + 1))
    assert span(x[:0])[1] == 0


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("base", 8, "the address is no multiple of 16"),
        ("strides", (2, 24), "a stride is no multiple of 16"),
        ("dims", (8, 0), "a dimension is empty"),
        ("box", (8, 300), "a box has more than 256 elements along an axis"),
        ("box", (4, 8), "a box's rows are no multiple of 16 bytes"),
        ("box", (128, 8), "a box's rows are wider than the swizzle's"),
    ],
)
def test_a_descriptor_follows_the_drivers_rules(field: str, value: Any, problem: str) -> None:
    fields = {"base": 64, "dims": (8, 8), "strides": (2, 32), "box": (8, 8), "element": 2}
    assert TensorMap(**fields, swizzle=128).problem() == ""
    assert TensorMap(**{**fields, field: value}, swizzle=128).problem() == problem
