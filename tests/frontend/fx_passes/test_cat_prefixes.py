"""A cat that begins with what another one joins reads that one, where gradients are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from bench.workloads.vision import DenseBlock
from fusec.frontend.fx_passes.cat_prefixes import share_cat_prefixes
from tests.support import check, values


def widths(fn: Callable[..., object], *inputs: Tensor, train: bool = True) -> list[int]:
    """How many parts each cat of a function's graph has in the end."""
    found: list[int] = []

    def note(gm: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., object]:
        share_cat_prefixes(gm)
        gm.graph.lint()
        found.extend(len(n.args[0]) for n in gm.graph.nodes if "cat" in str(n.target))
        return gm.forward

    torch._dynamo.reset()
    given = [x.detach().clone().requires_grad_(train) for x in inputs]
    torch.compile(fn, backend=note)(*given)
    return found


def dense(x: Tensor, y: Tensor) -> list[Tensor]:
    parts, seen = [x, y], []
    for _ in range(3):
        seen.append(torch.cat(parts, 1))
        parts.append(seen[-1].sin()[:, :2])
    return seen


XY = (values(4, 3), values(4, 5))


def test_each_cat_reads_the_longest_one_before_it() -> None:
    assert widths(dense, *XY) == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_dense_block_no_bit_of_values_and_gradients_differs(dtype: torch.dtype) -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        parts = [x, y]
        for k in range(6):
            parts.append(torch.cat(parts, 1).sin()[:, k : k + 2] * 1.3)
        return [torch.cat(parts, 1).exp()]

    def longer(gm: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., object]:
        share_cat_prefixes(gm)
        return gm.forward

    def bits(fn: Callable[..., list[Tensor]]) -> list[Tensor]:
        given = [values(33, n).to(dtype).requires_grad_() for n in (3, 5)]
        (out,) = fn(*given)
        return [out, *torch.autograd.grad(out.float().square().sum(), given)]

    torch._dynamo.reset()
    for one, other in zip(bits(step), bits(torch.compile(step, backend=longer)), strict=True):
        assert torch.equal(one, other)


def test_without_gradients_cats_stay() -> None:
    assert widths(dense, *XY, train=False) == [2, 3, 4]


def test_the_axis_may_be_said_in_any_way() -> None:
    def named(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((x, y), dim=-1), torch.concat([x, y, x], 1)

    assert widths(named, *XY) == [2, 2]


def writes_a_part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 1
    first = torch.cat([x, y], 1).sin()
    x.mul_(2)
    return first, torch.cat([x, y, x], 1)


def writes_data(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 1
    first = torch.cat([x, y], 1).sin()
    x.data.mul_(2)
    return first, torch.cat([x, y, x], 1)


def writes_the_whole(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first = torch.cat([x, y], 1)
    first[:, 0] = 0.0
    return first, torch.cat([x, y, x], 1)


def without_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        first = torch.cat([x, y], 1)
    return first, torch.cat([x, y, x], 1)


def of_another_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x, y], 1), torch.cat([x, y, x.double()], 1)


def writes_without_counting(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 1
    first = torch.cat([x, y], 1).sin()
    with torch.no_grad():
        torch._foreach_mul_([x], 2)
    return first, torch.cat([x, y, x], 1)


def writes_by_an_operator(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 1
    first = torch.cat([x, y], 1).sin()
    with torch.no_grad():
        torch.ops.fusec_test.double_uncounted(x)
    return first, torch.cat([x, y, x], 1)


def writes_statistics(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, scale = x.detach()[:1] * 2, x[:1] * 1
    first = torch.cat([scale, mean], 1).sin()
    normalised = F.batch_norm(x + y[:, :3], mean[0], torch.ones_like(mean[0]), training=True)
    return first, normalised, torch.cat([scale, mean, scale], 1)


def detaches_a_part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 1
    first = torch.cat([x, y], 1).sin()
    x.detach_()
    return first, torch.cat([x, y, x], 1)


@pytest.fixture(scope="module", autouse=True)
def uncounted() -> Iterator[None]:
    """An operator that writes, of a library that says nothing of versions."""
    library = torch.library.Library("fusec_test", "FRAGMENT")
    library.define("double_uncounted(Tensor(a!) x) -> ()")

    def double(x: Tensor) -> None:
        x.mul_(2)

    library.impl("double_uncounted", double, "CPU")
    library.impl("double_uncounted", lambda x: None, "Meta")
    yield
    library._destroy()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "fn",
    (
        writes_a_part,
        writes_data,
        writes_the_whole,
        writes_without_counting,
        writes_by_an_operator,
        writes_statistics,
        detaches_a_part,
        without_gradient,
        of_another_type,
    ),
)
def test_what_would_compute_something_else_stays(fn: Callable[..., object]) -> None:
    assert widths(fn, *XY) == [2, 3]
    check(fn, *XY, train=True)


def test_a_graph_with_a_checkpoint_stays() -> None:
    def kept(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.cat([x, y], 1)
        again = checkpoint(lambda a: torch.cat([a, a], 1), first, use_reentrant=False)
        return torch.cat([x, y, x], 1), again

    assert widths(kept, *XY) == [2, 3]
    check(kept, *XY, train=True)


@pytest.mark.slow
def test_a_dense_block_has_the_gradients_of_eager() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 1), DenseBlock(8, 4, 3))
    assert widths(block, values(2, 3, 6, 6)) == [1, 2, 2, 2]
    check(block, values(2, 3, 6, 6), train=True)
