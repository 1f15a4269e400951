"""The option ``batch_invariant``: the same bits at each size of a batch, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusec
from fusec.driver.backend import chosen_options
from fusec.driver.invariance import check_invariance
from fusec.errors import InternalError, UsageError
from fusec.ir.graph import all_launches
from fusec.ir.index import Axis, Size, index
from fusec.ir.program import For, Program
from fusec.tools.report import stage_call
from tests.support import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="asks for an option of fusec's")

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33)


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    made = {"strict": True, "batch_invariant": True, **options}
    return torch.compile(f, backend="fusec", fullgraph=True, options=made)


def rows_of(
    f: Callable[..., Any], given: list[torch.Tensor], first: int, train: bool = False
) -> list[list[torch.Tensor]]:
    """Return the results for the first 1, 2, ... 33 rows, compiled for ``first`` rows, and one
    after another on one thread and on two; in training the gradients of the inputs, too."""
    call, found = compiled(f), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for size in (first, *SIZES):
                inputs = [fusec.name_size(t[:size].clone(), 0) for t in given]
                for t in inputs:
                    t.requires_grad_(train and t.is_floating_point())
                with torch.set_grad_enabled(train):
                    made = call(*inputs)
                results = list(made) if isinstance(made, tuple) else [made]
                if train:
                    torch.autograd.backward(results, [torch.full_like(r, 1.5) for r in results])
                    results += [t.grad for t in inputs if t.grad is not None]
                found.append([r.detach().clone() for r in results])
    finally:
        torch.set_num_threads(threads)
    return found


def assert_same_bits(f: Callable[..., Any], given: list[torch.Tensor], train: bool = False) -> None:
    both = [call for first in (7, 33) for call in rows_of(f, given, first, train)]
    whole = next(call for call in both if len(call[0]) == 33)
    for call in both:
        for part, all_rows in zip(call, whole, strict=True):
            bits = [t.contiguous().view(torch.uint8) for t in (part, all_rows[: len(part)])]
            assert torch.equal(*bits), f"{tuple(part.shape)} differs"


class Block(nn.Module):
    """A layer of GPT-2: 64 features, 4 heads."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).split(x.shape[-1], -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Llama(nn.Module):
    """A layer of Llama: RMSNorm, rotary positions, grouped heads, SwiGLU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 320)
        self.down = nn.Linear(160, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = rms(x)
        at = torch.arange(x.shape[1])[:, None] * 10 ** -torch.arange(0, 2, 0.25).repeat(2)
        sin, cos = at.sin().to(x.dtype), at.cos().to(x.dtype)
        heads = self.q(h).unflatten(-1, (4, 16)), *self.kv(h).unflatten(-1, (4, 16)).chunk(2, 2)
        q, k, v = (t.transpose(1, 2) for t in heads)
        q, k = (t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        gate, up = self.up(rms(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def tensors(*shape: int, count: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + count)
    return [torch.randn(33, *shape, generator=generator).to(dtype) for _ in range(count)]


torch.manual_seed(0)
LINEAR, SECOND, NARROW = nn.Linear(768, 256), nn.Linear(256, 768), nn.Linear(256, 1)
NORM, CONV, GROUPS = nn.LayerNorm(768), nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
BATCH, CELL = nn.BatchNorm2d(8).eval(), nn.GRUCell(32, 48)
WIDE = torch.randn(768, 256)
CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "linear": (LINEAR, tensors(768)),
    "product": (lambda x: x @ WIDE, tensors(768)),
    "one column": (lambda x: NARROW(torch.tanh(LINEAR(x))), tensors(768)),
    "dot": (lambda x, y: (x * y).sum(1), tensors(777, count=2)),
    "products of a batch": (lambda x, y: x @ y.mT, tensors(12, 40, count=2)),
    "norm and mlp": (lambda x: SECOND(F.gelu(LINEAR(NORM(x)))) + x, tensors(768)),
    "columns": (lambda x: x.sum(1), tensors(24, 100)),
    "a long row": (lambda x: x.sum(1), tensors(100_000)),
    "softmax": (lambda x: F.log_softmax(LINEAR(x), -1), tensors(768)),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), tensors(1003)),
    "one query": (lambda x: F.scaled_dot_product_attention(x[:, :, :1], x, x), tensors(4, 64, 32)),
    "convolution": (lambda x: F.silu(GROUPS(CONV(x))), tensors(3, 10, 10)),
    "pooling": (lambda x: F.max_pool2d(F.relu(BATCH(CONV(x))), 2), tensors(3, 10, 10)),
    "gru cell": (lambda x: CELL(x, x.repeat(1, 2)[:, :48]), tensors(32)),
    "scan": (lambda x: torch.cumsum(x, 1) * 2, tensors(70)),
    "choice": (lambda x: torch.topk(F.softmax(LINEAR(x), -1), 3)[0], tensors(768)),
    "product in bf16": (lambda x: x @ WIDE.bfloat16(), tensors(768, dtype=torch.bfloat16)),
}
QUICK = ("linear", "norm and mlp", "columns", "choice")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_rows_have_the_same_bits_in_each_batch(name: str) -> None:
    assert_same_bits(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", [Block, Llama], ids=lambda model: model.__name__)
def test_layers_have_the_same_bits_in_each_batch(
    model: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    assert_same_bits(model().to(dtype), tensors(16, 64, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "norm and mlp", "softmax", "gru cell"])
def test_gradients_of_inputs_have_the_same_bits_in_each_batch(name: str) -> None:
    assert_same_bits(*CASES[name], train=True)


@pytest.mark.slow
def test_a_layer_s_gradients_have_the_same_bits_in_each_batch() -> None:
    assert_same_bits(Block(), tensors(16, 64), train=True)


@pytest.mark.slow
def test_a_named_length_has_no_history() -> None:
    """Without a name Dynamo makes it symbolic at its second value, and plans for the first one."""
    (x,) = tensors(16, 64)

    def last_of(lengths: tuple[int, ...]) -> torch.Tensor:
        call = compiled(lambda x: F.scaled_dot_product_attention(x, x, x) @ x.mT)
        with torch.no_grad():
            for length in lengths:
                part = x[:, :length].clone(memory_format=torch.contiguous_format)
                made = call(fusec.name_size(fusec.name_size(part, 0), 1, "length"))
        return made

    assert torch.equal(last_of((13,)), last_of((9, 11, 13)))


@pytest.mark.slow
def test_frozen_weights_give_the_same_bits_in_each_batch() -> None:
    model = nn.Sequential(CONV, BATCH, nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)).eval()
    call = compiled(model, freeze=True)
    (x,) = tensors(3, 10, 10)
    with torch.no_grad():
        whole, *parts = (call(fusec.name_size(x[:n].clone(), 0)) for n in (33, *SIZES))
    for part in parts:
        assert torch.equal(part, whole[: len(part)])


def test_results_are_right() -> None:
    (x,) = tensors(16, 64)
    block = Block()
    with torch.no_grad():
        made, exact = compiled(block)(fusec.name_size(x, 0)), block.double()(x.double())
    assert (made - exact).abs().max() < 1e-5


def refused(f: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> str:
    with pytest.raises(Exception, match="batch_invariant") as caught:  # Dynamo's, around ours
        compiled(f, **options)(*inputs)
    return str(caught.value)


def test_a_call_that_adds_in_an_unknown_order_is_refused() -> None:
    (x,) = tensors(64)
    said = refused(lambda x: torch.fft.rfft(x).abs(), fusec.name_size(x, 0))
    assert "_fft_r2c" in said and "fusec.register_decomposition" in said


def test_a_call_that_adds_is_refused_without_strict() -> None:
    (x,) = tensors(64)
    assert "_fft_r2c" in refused(
        lambda x: torch.fft.rfft(x).abs(), fusec.name_size(x, 0), strict=False
    )


def test_a_decomposition_s_calls_are_refused() -> None:
    (x,) = tensors(64)
    said = refused(lambda x: torch.linalg.eigvalsh(x.mT @ x), fusec.name_size(x, 0))
    assert "eigh" in said


def test_a_graph_without_a_named_size_is_refused() -> None:
    (x,) = tensors(64)
    said = refused(lambda x: x.sum(1), x)
    assert "fusec.name_size(x, 0)" in said


@pytest.mark.parametrize(
    "layout",
    [lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(33, -1)],
    ids=["columns first", "one row again"],
)
def test_rows_that_do_not_stand_in_order_are_refused(layout: Callable[..., Any]) -> None:
    """Of these layouts a single row is another graph, with another order of sums."""
    (x,) = tensors(100)
    said = refused(lambda x: x.exp().sum(1), fusec.name_size(layout(x), 0))
    assert "memory_format=torch.contiguous_format" in said


def test_rows_with_gaps_stand_in_order() -> None:
    (x,) = tensors(100)
    call = compiled(lambda x: x.exp().sum(1))
    whole = call(fusec.name_size(x[:, :60], 0))
    for size in (1, 2, 17):
        assert torch.equal(call(fusec.name_size(x[:size, :60], 0)), whole[:size])


def test_an_axis_inside_of_others_may_be_named() -> None:
    (x,) = tensors(16, 64)
    call = compiled(lambda x: x.softmax(0))
    with torch.no_grad():
        whole, *parts = (call(fusec.name_size(x[:, :n].contiguous(), 1)) for n in (16, 1, 2, 5))
    for part in parts:
        assert torch.equal(part, whole[:, : part.shape[1]])


@pytest.mark.parametrize(
    "more", [{"fusion": False}, {"race": "library"}, {"precision": "eager"}], ids=str
)
def test_options_that_leave_products_to_libraries_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(more))):
        chosen_options(None, {"batch_invariant": True, **more})


def test_a_named_size_is_the_same_code_for_a_batch_of_one() -> None:
    (x,) = tensors(64)
    call = compiled(lambda x: F.softmax(x, 1))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for size in (5, 1, 2):
        call(fusec.name_size(x[:size].clone(), 0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_a_loop_over_another_size_is_found() -> None:
    """The proof is no tautology: a program whose sum loops over the batch is refused."""
    (x,) = tensors(64)
    (staged,) = stage_call(
        lambda x: x.sum(1), [x], {}, False, "cpu", True, None, {"deterministic": True}
    )
    made = staged.compiled
    assert made is not None
    gm = staged.observed.graph
    check_invariance(gm, made.schedule, made.programs)
    batch = Size("batch", 4)

    def looped(program: Program) -> Program:
        inner = For(Axis("again", index(batch)), index(0), (index(batch),), program.body[1:])
        return replace(program, body=(program.body[0], inner))

    (launch,) = all_launches(made.schedule)
    planted = {launch.name: looped(made.programs[launch.name])}
    with pytest.raises(InternalError, match="in loops over batch"):
        check_invariance(gm, made.schedule, planted)
