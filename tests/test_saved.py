"""What a forward saves for its backward, and the peak of a step: below Inductor's and eager's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bench.workloads.blocks import LlamaBlock, default_dtype
from tests.saved import DropoutBlock, cut, eager_bytes, inductor_bytes, products, saved_bytes

aten = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32


def block(kind: str, dtype: torch.dtype, width: int, heads: int) -> nn.Module:
    with default_dtype(dtype):
        if kind == "llama":
            return LlamaBlock(width, heads, 512)
        return DropoutBlock(width, heads, written_out=kind == "gpt2, attention written out")


BLOCKS = [
    ("gpt2", F32, 768, 12),
    ("gpt2", BF16, 768, 12),
    ("gpt2, attention written out", F32, 768, 12),
    ("gpt2, attention written out", BF16, 768, 12),
    ("llama", BF16, 2048, 16),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "dtype", "width", "heads"), BLOCKS)
def test_less_is_saved_than_by_inductor_and_far_less_than_by_eager(
    kind: str, dtype: torch.dtype, width: int, heads: int
) -> None:
    module, x = block(kind, dtype, width, heads), torch.randn(2, 512, width).to(dtype)
    eager, inductor = eager_bytes(module, x), inductor_bytes(module, x)
    for target in ("cpu", "sm_90"):
        forward, backward = cut(module, x, target=target)
        found = saved_bytes(forward, backward)
        assert found < inductor
        assert found <= 0.6 * eager
        if target == "cpu":  # scores in f32 are computed again, by kernels that store none
            again = kind.endswith("written out") and dtype is F32
            assert products(backward) == 2 * products(forward) + again


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ("gpt2", "llama"))
def test_layers_do_not_compute_each_other_s_values_again(kind: str) -> None:
    layers, x = [block(kind, BF16, 256, 4) for _ in range(4)], torch.randn(2, 512, 256).to(BF16)
    one = cut(layers[0], x)
    four = cut(nn.Sequential(*layers), x)
    between = 3 * x.numel() * x.element_size()
    assert saved_bytes(*four) <= 4 * saved_bytes(*one) + between
    assert len(four[1].nodes) <= 4 * len(one[1].nodes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "width"), [("gpt2", 256), ("gpt2, attention written out", 256), ("llama", 256)]
)
def test_a_step_s_peak_is_at_most_eager_s(kind: str, width: int) -> None:
    module = block(kind, F32, width, width // 64)
    x = torch.randn(2, 512, width, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="fusec", options={"strict": True}, dynamic=False)
    assert peak(step_of(compiled, module, x)) <= peak(step_of(module, module, x))


def step_of(call: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        call(x).sum().backward()
        module.zero_grad(set_to_none=True)
        x.grad = None

    return step


def peak(step: Callable[[], None]) -> int:
    """Return the bytes that a step has allocated at once at most, beside what was there."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


# -- what the user chooses -------------------------------------------------------------------------


class TwoBlocks(nn.Module):
    """Two blocks with dropout, checkpointed or not."""

    def __init__(self, how: str = "", *, written_out: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                DropoutBlock(64, 4, written_out=written_out) for _ in range(2)
            )
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            if self.how == "whole":
                x = checkpoint(each, x, use_reentrant=False)
            elif self.how == "products saved":
                x = checkpoint(each, x, use_reentrant=False, context_fn=products_saved)
            else:
                x = each(x)
        return x


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


products_saved = functools.partial(create_selective_checkpoint_contexts, policy)


def gradients(module: nn.Module, **options: Any) -> list[torch.Tensor]:
    """Return the gradients of a compiled step from a fixed seed."""
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="fusec", options={"strict": True, **options})
    x = torch.linspace(-1, 1, 2 * 32 * 64).sin().view(2, 32, 64).requires_grad_()
    torch.manual_seed(3)
    compiled(x).square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


INPUT = torch.zeros(2, 32, 64)
NUMBERS = 512
"""Bytes of seeds, and of the one number that masked scores have."""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("written_out", (False, True))
def test_a_checkpoint_saves_its_input_alone_and_draws_the_same_numbers(written_out: bool) -> None:
    plain = TwoBlocks(written_out=written_out)
    whole = TwoBlocks("whole", written_out=written_out)
    forward, backward = cut(whole, INPUT)
    assert saved_bytes(forward, backward) <= INPUT.nbytes + NUMBERS  # the second block's input
    # Of each block all products but the last are computed again: no gradient needs that one.
    assert products(backward) == 3 * products(forward) - 2
    for found, expected in zip(gradients(whole), gradients(plain), strict=True):
        # An attention may run in another kernel: other numbers would differ everywhere.
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_policy_that_saves_products_has_none_computed_again() -> None:
    plain, selective = TwoBlocks(), TwoBlocks("products saved")
    forward, backward = cut(selective, INPUT)
    assert products(backward) == 2 * products(forward)
    assert saved_bytes(forward, backward) <= saved_bytes(*cut(plain, INPUT))
    for found, expected in zip(gradients(selective), gradients(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "compared",
    (
        lambda x: torch.nan_to_num((x * 2).sin().exp()),
        lambda x: torch.maximum((x * 2).sin().exp(), (x * 3).cos().exp()),
    ),
    ids=("with itself", "with another"),
)
def test_values_that_are_no_maximum_of_a_row_are_computed_again(compared: Callable) -> None:
    class Compared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compared(x)

    x = torch.randn(64, 64, requires_grad=True)
    assert saved_bytes(*cut(Compared(), x)) == 0


@pytest.mark.slow
def test_a_smaller_budget_saves_less() -> None:
    module = DropoutBlock(64, 4)
    sizes = [saved_bytes(*cut(module, INPUT, memory_budget=b)) for b in (1.0, 0.5, 0.2, 0.0)]
    assert sizes[1] <= 0.7 * sizes[0] and sizes[2] <= 0.4 * sizes[0] and sizes[3] <= 0.2 * sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("budget", (0.0, 0.5))
def test_a_smaller_budget_computes_the_same(budget: float) -> None:
    plain, small = TwoBlocks(), TwoBlocks()
    found = gradients(small, memory_budget=budget)
    for mine, expected in zip(found, gradients(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_torch_s_own_budget_holds_too() -> None:
    module = DropoutBlock(64, 4)
    with torch._functorch.config.patch(activation_memory_budget=0.2):
        found = cut(module, INPUT)
    assert saved_bytes(*found) == saved_bytes(*cut(module, INPUT, memory_budget=0.2))
