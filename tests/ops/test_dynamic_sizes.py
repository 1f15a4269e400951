"""Symbolic sizes: one compile for all of them, every index provably in range.

Each function runs as C++ and as Triton kernels that take products in, verified at each stage, with
all sizes symbolic from the first call (``dynamic=True``), and then again with other sizes, which
must not compile anything.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from bench.workload import backend_of
from tests import triton_backend  # noqa: F401  (registers its backends)
from tests.support import assert_agree, check, values

BACKENDS = ("fusec", "triton_fused")


def compiled(fn, backend, dynamic=True):
    torch._dynamo.reset()
    counters.clear()
    options = {"strict": True, "verify": True} if backend == "fusec" else None
    return torch.compile(
        fn, backend=backend_of(backend), dynamic=dynamic, fullgraph=True, options=options
    )


def agree(fn, call, *inputs):
    with torch.no_grad():
        wide = [x.double() if isinstance(x, torch.Tensor) else x for x in inputs]
        assert_agree(fn(*inputs), call(*inputs), fn(*wide), "result", strides=True)


def heads(x):
    b, t, c = x.shape
    return x.view(b, t, 4, c // 4).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(b, t, c) * 2


def groups(x, w):
    y = x.view(x.shape[0], w.shape[0], x.shape[1] // w.shape[0])
    return (y * w[None, :, None]).softmax(-1).view(x.shape) + x


def halves(x):
    return x.view(x.shape[0] // 2, 2, -1).sum(1)


def eights_of_a_flattened_pair(x):
    return x.view(-1, 8).softmax(-1).sum(1)


def rotated(x, cos):
    half = x.shape[-1] // 2
    y = x.view(*x.shape[:-1], 2, half).flip(-2).reshape(x.shape)
    turned = torch.cat((-y[..., half:], y[..., :half]), -1)
    return x[..., :half] * cos + x[..., half:] + turned.sum()


def grouped_attention(q, k, v):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return (q @ k.mT * 0.3).softmax(-1) @ v


def all_but_the_last(x, w):
    return (x @ w)[:, :-1].flatten(0, 1).log_softmax(-1).sum(-1)


def second_half(x):
    return x[:, x.shape[1] // 2 :].relu() - x.mean(1, keepdim=True)


def gate_of_the_halves_of_an_even_row(x):
    return F.glu(x[:, : x.shape[1] // 2 * 2], 1)


def groups_of_pairs(x, q, scale):
    pairs = torch.stack((q, -q), -1).flatten(1).view(q.shape[0], scale.shape[1], -1)
    return F.linear(x * 2, (pairs * scale[..., None]).flatten(1)).relu()


FUNCTIONS = {
    heads: [((2, 5, 24),), ((3, 2, 8),), ((2, 4, 40),)],
    groups: [((3, 24), (4,)), ((5, 12), (3,)), ((2, 10), (2,))],
    halves: [((8, 5),), ((4, 3),), ((12, 2),)],
    eights_of_a_flattened_pair: [((4, 6),), ((8, 6),), ((8, 9),)],
    rotated: [((3, 8), (4,)), ((2, 12), (6,))],
    grouped_attention: [
        ((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((3, 4, 2, 16), (3, 2, 9, 16), (3, 2, 9, 16)),
    ],
    all_but_the_last: [((2, 5, 8), (8, 11)), ((3, 4, 6), (6, 7))],
    second_half: [((8, 12),), ((7, 17),), ((10, 20),)],
    groups_of_pairs: [((5, 96), (7, 48), (7, 3)), ((3, 120), (9, 60), (9, 5))],
    gate_of_the_halves_of_an_even_row: [((7, 17),), ((3, 33),), ((5, 49),)],
}


@pytest.mark.sampled(17)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_sizes_that_divide_each_other_are_proven_in_range_and_compiled_once(fn, backend):
    call = compiled(fn, backend)
    for shapes in FUNCTIONS[fn]:
        agree(fn, call, *(values(*shape, seed=k) for k, shape in enumerate(shapes)))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_marked_as_dynamic_apart_have_one_length(backend):
    call = compiled(F.scaled_dot_product_attention, backend, dynamic=None)
    for length in (9, 12, 5):
        q, k, v = values(2, 3, 7, 8), *(values(2, 3, length, 8, seed=s) for s in (1, 2))
        torch._dynamo.mark_dynamic(k, 2)
        torch._dynamo.mark_dynamic(v, 2)
        agree(F.scaled_dot_product_attention, call, q, k, v)
    assert counters["stats"]["unique_graphs"] == 1


def test_an_attention_whose_operands_may_not_fit_stays_the_librarys():
    def attend(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0] * 2

    call = compiled(attend, "triton_fused", dynamic=None)
    q, k, v = values(2, 3, 7, 8), values(2, 3, 9, 8, seed=1), values(2, 3, 9, 8, seed=2)
    torch._dynamo.mark_dynamic(k, 2)
    torch._dynamo.mark_dynamic(v, 2)
    agree(attend, call, q, k, v)


def later_than(x, n):
    return torch.where(torch.arange(x.shape[0]) + n >= 0, x, 0.0)


def turned(x, n):
    return torch.roll(x, n, 0) * 2


def below_a_diagonal(x, n):
    return torch.tril(x[:, None] * x[None], n) + n


def from_a_multiple(x, n):
    return x[torch.sym_max(n, 0) :] * 2 if n // 4 * 4 == n else x


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fn", (later_than, turned, below_a_diagonal, from_a_multiple), ids=lambda fn: fn.__name__
)
def test_an_integer_argument_may_be_of_either_sign(fn):
    call = compiled(fn, "fusec", dynamic=None)
    for n in (3, 4, -2, 0, 1, -4):
        agree(fn, call, values(5), n)


def test_a_convolution_has_as_many_groups_as_a_weight_that_is_an_input() -> None:
    def fn(x, w):
        return F.conv2d(x, w, groups=w.shape[0]).sum()

    check(fn, values(2, 3, 16, 20), values(3, 1, 5, 5), dynamic=True)
