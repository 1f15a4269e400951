"""What the forward saves of an expansion: gradients, or nothing, but never the expansion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fusec.codegen.targets import find_target
from fusec.tools.report.observe import observe

ROWS, C, V = 32, 8, 128


@pytest.fixture(autouse=True)
def small_expansions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", str(ROWS * V))


def loss(x, w, t, reduction="mean"):
    return F.cross_entropy(F.linear(x, w), t, reduction=reduction)


def graphs(
    fn: Any, dtype: torch.dtype = torch.float32, target: str = "cpu"
) -> tuple[fx.GraphModule, fx.GraphModule]:
    x, w = torch.randn(ROWS, C).to(dtype), torch.randn(V, C).to(dtype)
    inputs = x, w, torch.zeros(ROWS, dtype=torch.int64)
    forward, backward = observe(fn, inputs, train=True, target=find_target(target))
    return forward.graph, backward.graph


def products(graph: fx.GraphModule) -> int:
    return sum(n.target is torch.ops.aten.mm.default for n in graph.graph.nodes)


def saves_expansion(graph: fx.GraphModule) -> bool:
    (output,) = graph.graph.find_nodes(op="output")
    return any(n is not None and n.meta["val"].shape == (ROWS, V) for n in output.args[0])


def test_a_mean_s_gradients_are_made_in_the_forward() -> None:
    forward, backward = graphs(loss)
    assert (products(forward), products(backward)) == (3, 0)
    assert not saves_expansion(forward)


@pytest.mark.parametrize(
    "fn",
    (
        lambda x, w, t: loss(x, w, t, "sum") * 3 + x.sum(),
        lambda x, w, t: (loss(x, w, t, "none") * t).sum() / 7,
        lambda x, w, t: loss(x, w, t) + F.cross_entropy(F.linear(x, w.flip(0)), t),
        lambda x, w, t: F.mse_loss(F.linear(x, w), t[:, None].float().expand(ROWS, V)),
    ),
    ids=("sum", "weighted", "two losses", "squared error"),
)
def test_other_scalars_are_found(fn: Any) -> None:
    forward, backward = graphs(fn)
    assert products(backward) == 0
    assert not saves_expansion(forward)


def test_a_loss_of_each_row_is_computed_again() -> None:
    forward, backward = graphs(lambda x, w, t: loss(x, w, t, "none"))
    assert (products(forward), products(backward)) == (1, 3)
    assert not saves_expansion(forward)


def test_half_floats_are_computed_again() -> None:
    forward, backward = graphs(loss, torch.float16)
    assert (products(forward), products(backward)) == (1, 3)
    assert not saves_expansion(forward)


def test_two_scalars_are_computed_again() -> None:
    def two(x, w, t):
        rows = loss(x, w, t, "none")
        return rows.mean(), rows.square().sum()

    forward, backward = graphs(two)
    assert (products(forward), products(backward)) == (1, 3)
    assert not saves_expansion(forward)


@pytest.mark.parametrize("result", (lambda x: x, torch.relu), ids=("itself", "its ReLU"))
def test_an_expansion_that_is_returned_is_saved(result: Any) -> None:
    def both(x, w, t):
        logits = F.linear(x, w)
        return F.cross_entropy(logits, t), result(logits)

    forward, backward = graphs(both)
    assert (products(forward), products(backward)) == (1, 2)


def test_gradients_larger_than_the_expansion_are_not_saved_in_its_place() -> None:
    x, w, t = torch.randn(4, 64), torch.randn(1000, 64), torch.zeros(4, dtype=torch.int64)
    forward, backward = observe(loss, (x, w, t), train=True)
    assert (products(forward.graph), products(backward.graph)) == (1, 2)


def test_one_product_more_is_for_large_expansions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", str(ROWS * V * 4 // 2 + 1))
    forward, backward = graphs(lambda x, w, t: loss(x, w, t, "none"))
    assert (products(forward), products(backward)) == (1, 2)


@pytest.mark.parametrize(("times", "again"), ((31, 0), (32, 1)))
def test_one_product_more_is_for_far_larger_expansions_on_a_gpu(
    times: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it is a fourth of the step, of which all else takes little."""
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", str(ROWS * V * 4 // times))
    forward, backward = graphs(lambda x, w, t: loss(x, w, t, "none"), target="sm_90")
    assert (products(forward), products(backward)) == (1, 2 + again)
    assert saves_expansion(forward) is not bool(again)


def test_below_the_threshold_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", str(ROWS * V * 4 + 1))
    forward, backward = graphs(loss)
    assert (products(forward), products(backward)) == (1, 2)
    assert saves_expansion(forward)


def test_a_bias_without_axes_is_no_operand_with_rows() -> None:
    """``addbmm`` of complex tensors is a product that AOTAutograd does not take apart."""
    bias, x, y = (torch.ones(s, dtype=torch.complex64) for s in ((), (3, 4, 5), (3, 5, 6)))
    torch._dynamo.reset()
    compiled = torch.compile(torch.addbmm, backend="fusec", options={"strict": True})
    result = compiled(bias.requires_grad_(), x.requires_grad_(), y)
    torch.testing.assert_close(result, torch.addbmm(bias, x, y))
    result.real.sum().backward()
    assert bias.grad is not None and bias.grad == 24
