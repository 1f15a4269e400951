"""``freeze``: constants are computed once, norms go into convolutions, and changes are seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusec
from fusec.errors import UsageError
from fusec.tools.report import explain
from tests.support import seeded


def settled(module: nn.Module) -> nn.Module:
    """Return a module at inference, its norms with statistics that say something."""
    with seeded(3):
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2.0)
                if part.affine:
                    nn.init.normal_(part.weight)
                    nn.init.normal_(part.bias)
    return module.eval()


class Scaled(nn.Module):
    """A convolution, what is affine in its channels in every order, and a function of weights."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, groups=2, bias=bias)
        self.gain, self.shift = nn.Parameter(torch.randn(6, 1, 1)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return ((2 - self.conv(x) * self.gain) / 1.5 + self.shift) * self.gain.softmax(0)


X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "norm": lambda: (nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU()), X),
    "no bias, no affine": lambda: (
        nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5, affine=False)), X,
    ),
    "1d": lambda: (nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)), X[..., 0]),
    "transposed": lambda: (nn.Sequential(nn.ConvTranspose2d(3, 5, 3), nn.BatchNorm2d(5)), X),
    "scaled": lambda: (Scaled(bias=True), X.repeat(1, 2, 1, 1)[:, :4]),
    "scaled, no bias": lambda: (Scaled(bias=False), X.repeat(1, 2, 1, 1)[:, :4]),
    "norm without convolution": lambda: (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), X),
}  # fmt: skip


def frozen(module: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(
        module, backend="fusec", options={"strict": True, "freeze": True, **options}
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_frozen_model_is_as_right_as_eager(name: str, dtype: torch.dtype) -> None:
    module, x = MODELS[name]()
    module, x = settled(module).to(dtype), x.to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
        eager, made = module(x), frozen(module)(x)
    assert made.stride() == eager.stride() and made.dtype is dtype
    worst = (eager - exact).abs().max()
    floor = torch.finfo(dtype).eps * exact.abs().max()
    assert (made - exact).abs().max() <= 4 * worst + floor


def test_a_norm_behind_a_convolution_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = settled(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)))
    monkeypatch.setenv("FUSEC_FREEZE", "1")
    with torch.no_grad():
        (graph,) = explain(module, X).graphs
    assert not graph.kernels and [call.op for call in graph.externs] == ["convolution.default"]
    assert graph.held == 4 * (5 * 3 * 9 + 5)
    assert "held" in str(graph)


def test_changes_of_weights_are_seen() -> None:
    module = settled(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)))
    compiled = frozen(module)

    def agree() -> bool:
        with torch.no_grad():
            return torch.allclose(compiled(X), module(X), atol=1e-4)

    assert agree()
    with torch.no_grad():
        module[1].running_mean.add_(1.0)
    assert agree(), "written in place"
    module[0].weight = nn.Parameter(torch.randn_like(module[0].weight))
    assert agree(), "another object"
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    assert agree(), "a checkpoint"
    module[0].weight.data = torch.randn_like(module[0].weight)
    assert agree(), "another address"


def test_what_is_written_past_torch_wants_refreeze() -> None:
    module = settled(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)))
    compiled = frozen(module)
    with torch.no_grad():
        compiled(X)
        module[0].weight.data.mul_(2.0)
        assert not torch.allclose(compiled(X), module(X), atol=1e-4)
        assert fusec.refreeze(nn.Linear(2, 2)) == 0
        assert not torch.allclose(compiled(X), module(X), atol=1e-4)
        assert fusec.refreeze(module) == 1
        assert fusec.refreeze(module) == 1, "asked for twice before a call"
        torch.testing.assert_close(compiled(X), module(X), atol=1e-4, rtol=1e-4)


def test_training_freezes_nothing() -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    other = copy.deepcopy(module)
    compiled = frozen(module)
    for _ in range(2):
        for one in (compiled, other):
            one(X).square().sum().backward()
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-4)
    for ours, theirs in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_buffer_that_the_model_writes_is_no_constant() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(3))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x * self.calls.exp() * self.scale.exp()

    module, other = Counting(), Counting()
    compiled = frozen(module)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(torch.ones(3)), other(torch.ones(3)))


def test_a_result_is_never_a_constant_of_the_graph() -> None:
    layer = nn.Linear(3, 3)
    compiled = frozen(lambda x: (layer(x), layer.weight * 2))
    with torch.no_grad():
        x = torch.randn(2, 3)
        compiled(x)[1].zero_()
        torch.testing.assert_close(compiled(x)[1], layer.weight * 2)


def test_random_numbers_of_a_weight_s_shape_are_drawn_each_time() -> None:
    layer = nn.Linear(300, 300)
    compiled = frozen(lambda x: F.linear(x, F.dropout(layer.weight, 0.5)))
    with torch.no_grad():
        x = torch.ones(1, 300)
        assert not torch.equal(compiled(x), compiled(x))


def test_tied_weights_and_a_cache_between_processes_are_right() -> None:
    with seeded(0):
        layer = nn.Linear(8, 8)
        model = nn.Sequential(layer, nn.ReLU(), layer)
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(2):  # the second compile loads what the first one built
            torch.testing.assert_close(frozen(model)(x), model(x))


def test_what_is_expanded_stays_a_view_of_a_constant() -> None:
    layer = nn.Linear(8, 1)
    compiled = frozen(lambda x: torch.cat([x, layer.weight.exp().expand(2, 8)]))
    with torch.no_grad():
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x), torch.cat([x, layer.weight.exp().expand(2, 8)]))


class Codes(nn.Module):
    """A linear whose weights are codes of a byte, one or two in each, and a scale of each group."""

    def __init__(self, *, two: bool) -> None:
        super().__init__()
        self.two = two
        columns = 32 if two else 64
        self.register_buffer("codes", torch.randint(-8, 8, (48, columns), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(48, 2, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes
        if self.two:
            codes = torch.stack([codes & 15, codes >> 4], -1)
        w = codes.reshape(48, 2, 32).to(x.dtype) * self.scale[..., None]
        return F.linear(x, w.reshape(48, 64))


@pytest.mark.parametrize("two", [False, True])
def test_codes_of_weights_are_not_decoded_beforehand(*, two: bool) -> None:
    """Eight times the bytes would be read in each call, and held."""
    module, x = Codes(two=two), torch.randn(1, 64).bfloat16()
    with torch.no_grad():
        report = explain(module, x, options={"freeze": True})
        assert torch.allclose(frozen(module)(x), module(x), rtol=0.05, atol=0.1)
    assert "held" not in str(report)


def test_what_an_index_gathers_of_weights_is_a_constant() -> None:
    """The bias of an attention in windows: its index is of integers, its values are not."""
    table, index = torch.randn(9, 4), torch.randint(0, 9, (6, 6))

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", table)
            self.register_buffer("index", index)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table[self.index].permute(2, 0, 1)

    with torch.no_grad():
        assert "held" in str(explain(Bias(), torch.randn(4, 6, 6), options={"freeze": True}))


def test_weights_made_in_inference_mode_are_no_constants() -> None:
    with torch.inference_mode():
        layer = nn.Linear(8, 8)
        compiled = frozen(lambda x: x @ layer.weight.exp())
        x = torch.randn(2, 8)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), x @ layer.weight.exp())
            layer.weight.add_(1.0)


def test_a_fused_optimizer_wants_refreeze() -> None:
    layer = nn.Linear(8, 8)
    compiled, x = frozen(lambda x: x @ layer.weight.exp()), torch.randn(2, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=True)
    with torch.no_grad():
        compiled(x)
    layer(x).sum().backward()
    optimizer.step()
    fusec.refreeze(layer)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), x @ layer.weight.exp())


def test_a_branch_reads_constants_too() -> None:
    layer = nn.Linear(8, 8)

    def f(x: Tensor) -> Tensor:
        w = layer.weight.exp()
        return torch.cond(x.sum() > 0, lambda x: x @ w, lambda x: x - w.sum(0), (x,))

    compiled = frozen(f)
    with torch.no_grad():
        for x in (torch.ones(3, 8), -torch.ones(3, 8)):
            torch.testing.assert_close(compiled(x), f(x))
            layer.weight.mul_(0.5)
            torch.testing.assert_close(compiled(x), f(x))


def test_refreeze_wants_the_module() -> None:
    with pytest.raises(UsageError, match="not function"):
        fusec.refreeze(lambda x: x)
