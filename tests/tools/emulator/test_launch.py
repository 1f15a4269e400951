"""Launches in the emulator: descriptors, buffers, counts, and what a launch leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusec.errors import BuildError
from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.dtype import F8, DType
from fusec.tools.emulator.launch import Arguments, Compiled, TensorMap, span
from fusec.tools.report.emulation import Emulator, emulate
from tests.float_cases import floats_near
from tests.tools.emulator.recorded import linear, normal, softmax


@pytest.mark.slow
def test_a_tile_that_a_product_and_a_sum_read_is_not_overwritten() -> None:
    """The gradients of a linear's weight and bias in one kernel: Triton 3.7 would give their tile
    two buffers, and copy the next but one over it before it waits for the product."""
    from tests.tools.emulator import blocks  # local: it imports transformers

    torch._dynamo.reset()
    torch.manual_seed(0)
    x = normal(2, 24, 64)
    found = emulate(blocks.vit().bfloat16(), [x], train=True, options={"race": "fused"})
    assert found.faults == (), str(found)


def test_random_numbers_are_those_of_their_seed() -> None:
    """Eager draws others, so each kernel is compared with its graph instead."""
    torch._dynamo.reset()
    x = normal(11, 300)
    found = emulate(lambda x: F.dropout(F.silu(x), 0.25), [x], train=True, seed=3)
    assert [(one.fault, one.problem) for one in found.kernels] == [("", "")] * 2
    assert found.faults == () and "not compared, for the model draws" in str(found)


def test_a_launch_is_counted() -> None:
    x = normal(4, 1024, dtype=torch.bfloat16)
    emulator = Emulator.of("sm_90", {"race": "library"})
    torch._dynamo.reset()
    torch.compile(lambda x: x.softmax(-1), backend=emulator.backend)(x)
    (one,) = emulator.kernels
    counts = one.kernel.counts
    assert (counts.global_loaded, counts.global_stored) == (x.nbytes, x.nbytes)
    assert counts.instructions > 1000 and counts.multiplied == counts.products == 0


def test_kernels_that_differ_in_a_number_run_one_code() -> None:
    """A block of a DenseNet: each layer has more channels, and nothing else is different."""

    def grown(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.cat((x, torch.relu(F.conv2d(x, weight))), 1)
            x = x - x.mean((0, 2, 3), keepdim=True)
        return x

    torch._dynamo.reset()
    weights = [normal(16, channels, 1, 1) for channels in (16, 32, 48, 64)]
    emulator = Emulator.of("sm_90", {"race": "library"})
    inputs = [t.requires_grad_() for t in (normal(4, 16, 4, 4), *weights)]
    torch.compile(grown, backend=emulator.backend)(*inputs).sum().backward()
    passed = [one.kernel.kernel.number for one in emulator.kernels]
    assert passed[:4] == [1, 2, 3, 4] and {4, 3, 2} < set(passed[4:])
    assert len({one.kernel.kernel.source for one in emulator.kernels[:4]}) == 1
    found = emulate(grown, [t.detach() for t in inputs], train=True, options={"race": "library"})
    assert found.faults == (), str(found)


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


@pytest.mark.slow
def test_a_block_with_more_shared_memory_than_the_gpu_has_is_no_launch() -> None:
    kernel = linear("never").compiled.kernel
    with pytest.raises(BuildError, match=r"\d+ bytes of shared memory; sm_120 has 101376"):
        Compiled.of(replace(kernel, num_stages=8), "sm_120")


@pytest.mark.parametrize("dtype", F8, ids=str)
def test_eight_bit_floats_are_converted_as_torch_does(dtype: DType) -> None:
    """Every code is read; what may round otherwise is written, bit by bit, but for signs of NaN."""
    kind = to_torch_dtype(dtype)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kind)
    x = torch.from_numpy(floats_near(every.float().numpy()))
    torch._dynamo.reset()
    emulator = Emulator.of("sm_90", {"race": "library", "strict": True})
    backend = {"backend": emulator.backend}
    read = torch.compile(lambda q: q.to(torch.float32), **backend)(every)
    torch.testing.assert_close(read, every.float(), rtol=0, atol=0, equal_nan=True)
    got = torch.compile(lambda x: x.to(kind), **backend)(x).view(torch.uint8)
    wanted = x.to(kind).view(torch.uint8)
    differ = got != wanted
    assert x[differ].isnan().all() and ((got ^ wanted)[differ] == 0x80).all()
    assert len(emulator.kernels) == 2
