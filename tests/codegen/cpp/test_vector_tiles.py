"""Tiles as arrays and vectors: products and attentions of fusec's own on CPUs, against eager.

Every program runs twice: as C++ that is built for this machine, and in the NumPy interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusec.codegen.cpp.vector_tiles import vector_tiles
from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, compile_to_source
from fusec.driver.trace import Trace
from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Dot, Load, Select, substitute
from fusec.ir.index import Axis, index
from fusec.ir.program import For, Let, Multiply, Program, Put, Scratch, Update, statements
from fusec.ir.verify_program import verify_program
from fusec.options import Options
from fusec.tools.interpreter.graph import run_kernel
from fusec.tools.interpreter.program import run_program
from fusec.tools.report.observe import observe
from tests.codegen.programs import Builder, buffer
from tests.support import FUSED, OPTIONS, TRAINED, check, threads

RNG = np.random.default_rng(0)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(tensor(*shape, dtype=dtype, seed=seed) for seed in range(3))  # type: ignore


def fused(fn: Callable[..., Any], *inputs: Any, **how: Any) -> None:
    """Check a program whose products are all fusec's own against eager and fp64."""
    check(fn, *inputs, backend=FUSED, **how)


def compiled(
    fn: Callable[..., Any], *inputs: Tensor, width: int = 16, train: bool = False, threads: int = 1
) -> tuple[fx.GraphModule, Compiled]:
    """Return a program's graph, and it compiled with its products in kernels of fusec's own.

    Of one that trains, the backward's.
    """
    *_, observed = observe(fn, inputs, train=train)
    options = Options.from_compile(None, OPTIONS[FUSED])
    target = find_target("cpu", width, threads=threads)
    context = CompileContext(target, options, Trace("t"))
    return observed.graph, compile_to_source(observed.graph, context)


def kernel(
    fn: Callable[..., Any], *inputs: Tensor, width: int = 16
) -> tuple[fx.GraphModule, Program]:
    """Return a program's graph and its only kernel, over vectors."""
    graph, made = compiled(fn, *inputs, width=width)
    ((_, form),) = made.forms.items()
    assert len(made.schedule.steps) == 1
    return graph, form


def products(program: Program | For) -> list[Multiply]:
    return [s for s in statements(program.body) if isinstance(s, Multiply)]


def loops(program: Program) -> list[For]:
    return [s for s in statements(program.body) if isinstance(s, For)]


# -- spellings of attention ------------------------------------------------------------------------


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~keep, float("-inf"))
    return torch.softmax(scores, -1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(20 * torch.tanh(q @ k.transpose(-1, -2) / 80), -1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    row, key = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    slope = 2.0 ** -(torch.arange(q.shape[1]) + 1.0)
    bias = (key - row[:, None]) * slope[:, None, None]
    scores = q @ k.transpose(-1, -2) / 4 + bias
    return torch.softmax(scores.masked_fill(key > row[:, None], float("-inf")), -1) @ v


def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def library_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


SPELLINGS = (written_out, causal, capped, alibi, library, library_causal)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda fn: fn.__name__)
def test_an_attention_is_one_kernel_without_scores_in_memory(spelling: Callable) -> None:
    _, program = kernel(spelling, *heads(1, 2, 200, 64))
    sizes = [math.prod(e.const for e in b.shape) for b in program.buffers]
    assert max(sizes) == 2 * 200 * 64
    assert products(program)


@pytest.mark.sampled(17)  # a diagonal
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("length", (1, 100, 320))
def test_attention_of_any_length(spelling: Callable, length: int) -> None:
    fused(spelling, *heads(1, 2, length, 16))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("depth", (8, 40, 128))
def test_attention_with_heads_of_any_width(depth: int) -> None:
    fused(causal, *heads(1, 2, 150, depth))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda fn: fn.__name__)
def test_the_gradient_of_attention(spelling: Callable) -> None:
    fused(spelling, *heads(1, 2, 150, 16), train=True)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_operands_of_other_types(dtype: torch.dtype) -> None:
    fused(causal, *heads(1, 2, 150, 32, dtype=dtype))
    fused(library_causal, *heads(1, 2, 150, 32, dtype=dtype), train=True)


@pytest.mark.sampled(7)  # a diagonal
def test_a_tile_is_a_left_operand_by_rows_and_a_right_one_in_panels() -> None:
    """The gradient of the result is both, of f16 a copy of each kind."""
    fused(written_out, *heads(1, 2, 97, 32, dtype=torch.float16), train=True)


@pytest.mark.sampled(7)  # a diagonal
@pytest.mark.parametrize("width", (16, 8, 4))
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda fn: fn.__name__)
def test_programs_over_vectors_mean_in_numpy_what_torch_computes(
    spelling: Callable, width: int
) -> None:
    """Keys fill more than a tile, and neither a tile nor vectors of queries are full."""
    queries, (keys, features) = tensor(1, 1, 34, 8), heads(1, 1, 130, 8)[1:]
    graph, program = kernel(spelling, queries, keys, features, width=width)
    values = [s.value for s in statements(program.body) if isinstance(s, Let | Update)]
    assert not any(isinstance(value, Dot) for value in values)
    assert [lane.extent.const for lane in program.lanes] == [width]
    placeholders = graph.graph.find_nodes(op="placeholder")
    shapes = {n.name: n.meta["val"].shape for n in placeholders}
    named = {name: tensor(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    (expected, *_) = graph(*named.values())
    storage = {b.base: named[b.name].numpy().ravel().copy() for b in program.reads}
    with np.errstate(all="ignore"):
        run_program(program, storage, {})
    found = storage[program.writes[0].base].reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("width", (16, 8, 4))
def test_the_weights_of_a_byte_are_two_vectors_stored_side_by_side(width: int) -> None:
    """Neither is chosen, and bytes are read one after another; zeros multiply sums of rows."""

    def linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        codes = torch.stack([packed & 15, packed >> 4], -1).to(torch.int8) - 8
        return F.linear(x, codes.flatten(1).to(x.dtype)) * scale

    packed = torch.randint(0, 256, (40, 96), dtype=torch.uint8)
    inputs = tensor(33, 192), packed, tensor(40)
    graph, program = kernel(linear, *inputs, width=width)
    (lane,) = program.lanes
    places = [s.offset for s in statements(program.body) if isinstance(s, Put)]
    twos = [place % 2 for place in places if place.coefficient(lane) is index(2)]
    assert twos == [index(0), index(1)]
    values = [s.value for s in statements(program.body) if isinstance(s, Let)]
    assert not any(isinstance(value, Select) for value in values)
    assert all(v.indices[0].coefficient(lane) is not None for v in values if isinstance(v, Load))
    placeholders = graph.graph.find_nodes(op="placeholder")
    sized = {x.shape: x for x in inputs}
    named = {node.name: sized[node.meta["val"].shape] for node in placeholders}
    storage = {b.base: named[b.name].numpy().ravel().copy() for b in program.reads}
    run_program(program, storage, {})
    (expected, *_) = graph(*named.values())
    found = storage[program.writes[0].base].reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)


def test_an_attention_copies_its_queries_alone() -> None:
    """Keys and values are read where they lie; vectors run along queries, then along features."""
    _, program = kernel(library, *heads(1, 2, 256, 64))
    arguments = {b.base for b in program.buffers}
    scores, sums = products(program)
    assert scores.left.buffer.base in arguments and scores.right.buffer.base not in arguments
    assert sums.right.buffer.base in arguments and sums.left.buffer.base not in arguments
    copies = [s for s in program.body if isinstance(s, For) and s.axis.name.startswith("d")]
    assert not copies


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_exponentials_of_weights_in_16_bits_are_shorter(dtype: torch.dtype) -> None:
    _, made = compiled(written_out, *heads(1, 1, 200, 64, dtype=dtype))
    shorter = "f_exp_rounded_flushed(v" in "".join(made.sources.values())
    assert shorter is (dtype is torch.bfloat16)


def test_weights_relative_to_a_running_maximum_may_be_flushed() -> None:
    _, made = compiled(written_out, *heads(1, 1, 200, 64))
    assert "f_exp_flushed(v" in "".join(made.sources.values())


def test_a_tile_ends_where_its_axis_does() -> None:
    """Of 200 keys tiles have 112 and 88; of 200 queries 80, 80 and 40."""
    _, program = kernel(written_out, *heads(1, 2, 200, 64))
    (whole, _, last, _) = products(program)
    assert [whole.rows[0].const, last.rows[0].const] == [112, 88]
    panels, tile = whole.panels, program.grid[-1]
    assert panels[0].const == 5
    assert [substitute(panels[1], {tile: index(n)}).const for n in range(3)] == [13, 8, 3]


def test_vectors_that_are_written_in_part_are_zero_elsewhere() -> None:
    """What memory held before may be subnormal, and each product of it a microcode assist."""
    _, program = kernel(library, *heads(1, 2, 49, 32))
    body = list(statements(program.body))
    rows = {s.buffer.base for s in body if isinstance(s, Scratch) and s.length == index(64)}
    loops = [s for s in body if isinstance(s, For) and s.stops == (index(4),)]
    puts = [s.body[0] for s in loops if isinstance(s.body[0], Put)]
    zeroed = {put.buffer.base for put in puts if put.value == Const(0.0, F32)}
    assert rows and rows <= zeroed


def test_rows_of_a_tile_that_a_product_does_not_reach_are_zero() -> None:
    """Eleven of a tile's 16 rows are in memory, and all are stored."""
    r, c, k = (Axis(name, index(16)) for name in "rck")
    b = Builder("k", (), (r, c, k))
    inside = b.op("lt", b.position(r), b.position(11))
    left = b.load(buffer("a", F32, 11, 16), index(r) * 16 + index(k), inside)
    right = b.load(buffer("b", F32, 16, 16), index(k) * 16 + index(c))
    product = b.let(Dot(left, right, (k,), None, False))
    b.put(buffer("y", F32, 16, 16), index(r) * 16 + index(c), product)
    program = vector_tiles(b.program(), 16)
    given = RNG.standard_normal((27, 16)).astype(np.float32)
    storage = {"a": given[:11].ravel(), "b": given[11:].ravel(), "y": np.full(256, np.nan, "f")}
    run_program(program, {buffer.base: storage[buffer.name] for buffer in program.buffers}, {})
    wanted = np.zeros((16, 16), np.float32)
    wanted[:11] = given[:11] @ given[11:]
    np.testing.assert_allclose(storage["y"].reshape(16, 16), wanted, rtol=1e-5, atol=1e-5)


def test_the_first_terms_of_a_sum_overwrite_its_tile() -> None:
    """A tile that is filled with 0 before is a pass over it, as long as a product of 16 terms."""
    _, program = kernel(lambda x, w: F.relu(x @ w), tensor(96, 600), tensor(600, 64))
    whole, rest = (s for s in program.body if isinstance(s, For) and products(s))
    assert (whole.start, rest.start) == (index(0), index(2))
    assert [p.adds for p in products(program)] == [index(whole.axis), index(rest.axis)]
    zero = Const(0.0, F32)
    assert not [s for s in statements(program.body) if isinstance(s, Put) and s.value is zero]


def test_rows_that_a_load_leaves_out_of_a_sum_are_zero() -> None:
    r, c, k, step = (Axis(name, index(16)) for name in "rckn")
    b = Builder("k", (), (r, c, k))
    inside = b.op("lt", b.position(r), b.position(11))
    total = b.carry(Const(0.0, F32), r, c)
    with b.loop(step, 2):
        left = b.load(buffer("a", F32, 11, 32), index(r) * 32 + index(step) * 16 + index(k), inside)
        right = b.load(buffer("b", F32, 32, 16), index(step) * 256 + index(k) * 16 + index(c))
        b.update(total, Dot(left, right, (k,), None, False))
    b.put(buffer("y", F32, 16, 16), index(r) * 16 + index(c), total)
    program = vector_tiles(b.program(), 16)
    a, right = RNG.standard_normal((11, 32)), RNG.standard_normal((32, 16))
    storage = {"a": a.ravel(), "b": right.ravel(), "y": np.full(256, np.nan)}
    given = {x.base: storage[x.name].astype(np.float32) for x in program.buffers}
    run_program(program, given, {})
    (made,) = (given[x.base] for x in program.buffers if x.name == "y")
    wanted = np.zeros((16, 16))
    wanted[:11] = a @ right
    np.testing.assert_allclose(made.reshape(16, 16), wanted, rtol=1e-5, atol=1e-5)


def test_lanes_are_channels_where_weights_are_copied_once() -> None:
    """Else the results of a 1 x 1 convolution of channels-last images were stored one by one."""
    x = tensor(2, 16, 24, 24).to(memory_format=torch.channels_last)
    weights = tensor(24, 16, 1, 1), tensor(72, 24, 1, 1)
    _, made = compiled(lambda x, a, b: F.conv2d(F.conv2d(x, a) + 1, b), x, *weights)
    forms = [form for form in made.forms.values() if products(form)]
    assert max(len(products(form)) for form in forms) == 2
    for form in forms:
        puts = [s for s in statements(form.body) if isinstance(s, Put)]
        stores = [s for s in puts if s.buffer.base in {b.base for b in form.writes}]
        assert stores and all(put.offset.steps_by_one(form.lanes[0]) for put in stores)


def test_the_gradient_of_attention_is_one_kernel_of_five_products() -> None:
    _, made = compiled(library, *heads(1, 2, 256, 64), train=True)
    (program,) = (form for form in made.forms.values() if products(form))
    assert len(products(program)) == 5


def test_the_gradient_of_attention_is_two_kernels_where_heads_are_fewer_than_threads() -> None:
    _, made = compiled(library, *heads(1, 2, 256, 64), train=True, threads=64)
    assert sorted(len(found) for form in made.forms.values() if (found := products(form))) == [3, 4]


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("spelling", (library_causal, library), ids=lambda fn: fn.__name__)
def test_the_program_of_a_gradient_means_in_numpy_what_its_kernel_does(spelling: Callable) -> None:
    _, made = compiled(spelling, *heads(1, 1, 260, 8), train=True)
    (kernel,) = (k for k in made.schedule.kernels if products(made.forms[k.name]))
    random = np.random.default_rng(0)
    read = {b.base: math.prod(e.const for e in b.base.shape) for b in kernel.reads}
    memory = {b: random.standard_normal(length, np.float32) for b, length in read.items()}
    expected, found = dict(memory), dict(memory)
    run_kernel(kernel, expected, {})
    run_program(made.forms[kernel.name], found, {})
    for store in kernel.stores:
        wanted = expected[store.buffer.base]
        np.testing.assert_allclose(found[store.buffer.base], wanted, rtol=1e-4, atol=1e-4)


def test_a_mask_of_keys_that_is_read_along_them_is_turned_in_blocks() -> None:
    q, k, v = heads(1, 2, 256, 64)
    bias = tensor(2, 256, 256, seed=3)
    _, made = compiled(
        lambda q, k, v, b: torch.softmax(q @ k.transpose(-1, -2) / 8 + b, -1) @ v, q, k, v, bias
    )
    assert "ldt_f32" in "".join(made.sources.values())


def test_a_mask_that_is_an_input() -> None:
    q, k, v = tensor(1, 2, 100, 16), tensor(1, 2, 136, 16, seed=1), tensor(1, 2, 136, 16, seed=2)
    mask = torch.rand(100, 136, generator=torch.Generator().manual_seed(0)) > 0.5
    masked = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m)  # noqa: E731
    fused(masked, q, k, v, mask)


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("additive", (False, True))
@pytest.mark.parametrize("train", (False, True))
def test_masks_that_hide_whole_rows(additive: bool, train: bool) -> None:
    q, k, v = tensor(1, 2, 100, 16), tensor(1, 2, 136, 16, seed=1), tensor(1, 2, 136, 16, seed=2)
    mask = torch.rand(100, 136, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[3] = False
    if additive:
        mask = torch.zeros(100, 136).masked_fill(~mask, float("-inf"))
    masked = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    fused(masked, q, k, v, train=train)


def test_a_row_that_is_masked_as_a_whole_is_nan_where_eagers_is() -> None:
    def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row = torch.arange(q.shape[-2])
        scores = (q @ k.transpose(-1, -2)).masked_fill(row[:, None] == 5, float("-inf"))
        return torch.softmax(scores, -1) @ v

    fused(hidden, *heads(1, 2, 100, 16))


@pytest.mark.parametrize("where", (lambda q: torch.tensor(-1e9), lambda q: q[..., :1]))
def test_what_a_mask_puts_in_a_row_may_be_one_number_of_the_row(where: Callable) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row = torch.arange(q.shape[-2])
        scores = torch.where(row > row[:, None], where(q), q @ k.transpose(-1, -2))
        return torch.softmax(scores, -1) @ v

    fused(masked, *heads(1, 2, 64, 16))


@pytest.mark.first
@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_infinite_and_missing_numbers_go_where_they_go_in_eager(value: float) -> None:
    q, k, v = heads(1, 1, 100, 16)
    v = v.clone()
    v[0, 0, 17, 3] = value
    fused(written_out, q, k, v)
    q = q.clone()
    q[0, 0, 9, 2] = float("nan")
    fused(written_out, q, k, v.nan_to_num(0, 0, 0))


@TRAINED
def test_grouped_heads(train: bool) -> None:
    q, k, v = tensor(1, 4, 100, 16), tensor(1, 2, 100, 16, seed=1), tensor(1, 2, 100, 16, seed=2)
    grouped = lambda *a: F.scaled_dot_product_attention(*a, enable_gqa=True)  # noqa: E731
    fused(grouped, q, k, v, train=train)


def test_a_mask_of_gathered_positions_ends_the_loop_over_keys() -> None:
    """Transformers gathers them, as documents of a batch may have positions of their own."""

    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        places, documents = torch.arange(len(starts)) + 0, starts.cumsum(0)
        row, key = (torch.arange(len(starts)) + 0)[:, None], torch.arange(len(starts)) + 0
        sees = (documents[row] == documents[key]) & (places[key] <= places[row])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)

    inputs = *heads(1, 2, 384, 16), torch.arange(384) % 140 == 0
    _, made = compiled(packed, *inputs)
    ends = [s.stops for form in made.forms.values() for s in loops(form)]
    assert any(len(stops) == 2 for stops in ends)  # where the keys end, and where the mask does
    fused(packed, *inputs)


def sinking(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """As GPT-OSS writes it: a softmax over the keys and a sink, shifted twice by its maximum."""
    m, n = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    scores = q @ k.mT * 0.25 + torch.where(n <= m, 0.0, torch.finfo(torch.float32).min)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, column], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


def test_an_attention_with_a_sink_visits_the_keys_that_its_mask_lets_through_once() -> None:
    inputs = *heads(1, 2, 512, 16), tensor(2)
    _, program = kernel(sinking, *inputs)
    over_keys = [loop for loop in loops(program) if products(loop)]
    assert [len(products(loop)) for loop in over_keys] == [2, 2]  # before the diagonal, and on it
    assert {len(loop.stops) for loop in over_keys} == {2, 3}
    fused(sinking, *inputs)


@TRAINED
@pytest.mark.parametrize("sink", (0.0, 50.0, -math.inf))
def test_a_sink_of_any_size(sink: float, train: bool) -> None:
    inputs = *heads(1, 2, 96, 16), torch.full((2,), sink)
    fused(sinking, *inputs, train=train and sink == 0)
    check(sinking, *inputs, train=train and sink == 0)


def test_an_attention_and_its_projection_visit_keys_once() -> None:
    """Columns of values that one tile holds are no loop around the keys, each turn of which
    would compute the scores again."""

    def block(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(values.transpose(1, 2).flatten(2), weight)

    inputs = *heads(1, 1, 512, 64), tensor(128, 64)
    _, program = kernel(block, *inputs)
    over_keys = [loop for loop in loops(program) if loop.axis.name == "no"]
    assert [len(products(loop)) for loop in over_keys] == [
        2,
        2,
    ]  # tiles below the diagonal, and on it
    fused(block, *inputs)
    fused(block, *inputs, train=True)


def test_lengths_that_change_from_call_to_call() -> None:
    more = [heads(1, 2, length, 16) for length in (7, 129, 300)]
    fused(causal, *heads(1, 2, 100, 16), dynamic=True, more=more)


def test_a_product_with_what_stands_around_it() -> None:
    x, w, b, r = tensor(100, 300), tensor(70, 300, seed=1), tensor(70, seed=2), tensor(100, 70)
    fused(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, x, w, b, r)
    fused(lambda x, w, r: F.relu(F.silu(x).t() @ w.t() + r), tensor(300, 100), w, r)
    fused(lambda x, w, v: F.silu(x @ w.t()) * (x @ v.t()), x, w, w.flip(0))


def test_two_threads() -> None:
    with threads(2):
        fused(library_causal, *heads(2, 2, 200, 32), train=True)


def test_what_pads_a_panel_of_flipped_weights_lies_in_them() -> None:
    """Of 48 columns, 15 pad the last panel: their rows would end 15 before the first weight."""
    x, w = tensor(13, 7, dtype=torch.bfloat16), tensor(33, 7, dtype=torch.bfloat16)
    _, program = kernel(lambda x, w: (x @ w.flip(0).mT, x @ w.mT), x, w)
    assert len(products(program)) == 2
    verify_program(program)


@pytest.mark.parametrize("dynamic", (False, True))
def test_a_product_without_terms_is_zero(dynamic: bool) -> None:
    x, w = torch.randn(33, 0), torch.randn(0, 8)
    torch._dynamo.reset()
    options = {"strict": True, "race": "fused"}
    made, sums = torch.compile(
        lambda x, w: ((x @ w) * 2 + 1, (x @ w).sum(-1)),
        backend="fusec",
        options=options,
        dynamic=dynamic,
    )(x, w)
    assert torch.equal(made, torch.ones(33, 8)) and torch.equal(sums, torch.zeros(33))


def test_a_product_that_nothing_reads_goes_with_its_array() -> None:
    r, c, k = (Axis(name, index(16)) for name in "rck")
    b = Builder("k", (), (r, c, k))
    left = b.load(buffer("a", F32, 16, 16), index(r) * 16 + index(k))
    right = b.load(buffer("b", F32, 16, 16), index(k) * 16 + index(c))
    unread = b.carry(Const(0.0, F32), r, c)
    b.update(unread, Dot(left, right, (k,), None, False))
    b.put(buffer("y", F32, 16, 16), index(r) * 16 + index(k), left)
    program = vector_tiles(b.program(), 16)
    assert not products(program)
    assert not [s for s in statements(program.body) if isinstance(s, Scratch)]
