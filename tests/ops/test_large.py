"""More than 2**31 elements: index arithmetic in 64 bits where extents ask for it, nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusec
from tests.support import compile_with

SMALL, LARGE = (4096, 4096), (70000, 70000)
BEYOND = 2**31 + 64


def shifted(x):
    return x * 2 + 1


def rows(x):
    return x.softmax(-1)


def columns(x):
    return x.sum(0)


def turned(x):
    return (x * 2).mT.contiguous()


def sources(fn, shape, target):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(shape)
    return "\n".join(k.source for k in fusec.kernels(fn, x, target=target))


@pytest.mark.parametrize("fn", (shifted, rows, columns, turned), ids=lambda fn: fn.__name__)
def test_triton_kernels_count_in_64_bits_where_a_tensor_is_larger_than_32(fn):
    assert "int64" in sources(fn, LARGE, "sm_90")
    assert "int64" not in sources(fn, SMALL, "sm_90")


def test_triton_kernels_of_symbolic_sizes_count_rows_in_64_bits():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(64, 64)
    (kernel,) = fusec.kernels(rows, x, target="sm_90", dynamic=True)
    assert "int64" in kernel.source


def numbered(n):
    return ((torch.arange(n) * 7) % 251).to(torch.uint8)


@pytest.mark.slow
def test_points_beyond_32_bits_are_stored_read_and_summed_on_a_cpu():
    torch._dynamo.reset()
    made = compile_with(numbered)(BEYOND)
    places = torch.tensor([0, 5, 2**31 - 1, 2**31, 2**31 + 7, BEYOND - 1])
    wanted = ((places * 7) % 251).to(torch.uint8)
    assert torch.equal(made[places], wanted)
    assert torch.equal(compile_with(lambda x, i: x[i] + 1)(made, places), wanted + 1)
    total = compile_with(lambda x: x.sum(dtype=torch.int64))
    assert total(torch.ones(1, dtype=torch.uint8).expand(BEYOND)) == BEYOND
    last = compile_with(lambda x: (x[-64:] + 1, x.view(2, -1)[1, :3] * 2))
    assert torch.equal(last(made)[0], made[-64:] + 1)
    assert torch.equal(last(made)[1], made[BEYOND // 2 : BEYOND // 2 + 3] * 2)
