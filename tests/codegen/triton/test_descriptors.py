"""Tiles copied by tensor descriptors: which accesses are, and values in Triton's interpreter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.targets import find_target
from fusec.codegen.triton.arguments import print_descriptors
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, compile_to_source, flat_kernels
from fusec.driver.stages import offered_plans
from fusec.driver.trace import Trace
from fusec.ir.program import For
from fusec.options import Options
from fusec.passes.schedule.plan import Plan
from fusec.tools.report.observe import observe
from tests.codegen.programs import form_of
from tests.support import check
from tests.triton_backend import gpu_pipeline

HALF = (torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", HALF, ids=str)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [tensor(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def compiled(fn, *inputs, train: bool = False, dynamic: bool = False) -> list[Compiled]:
    seen = observe(fn, inputs, train=train, target=find_target("sm_90"), dynamic=dynamic)
    return [gpu_pipeline(one.graph, one.name, race="fused", descriptors="always") for one in seen]


def copies(made: list[Compiled]) -> tuple[int, int]:
    """Return how many tiles the printed kernels load and store by descriptors."""
    text = "\n".join(source for one in made for source in one.sources.values())
    return len(re.findall(r"_tiles\w*\.load\(", text)), len(re.findall(r"_tiles\w*\.store\(", text))


def tiled(fn, *inputs, least: tuple[int, int], train: bool = False, dynamic: bool = False) -> None:
    """Check values by the rule, and that so many loads and stores are by descriptors."""
    found = copies(compiled(fn, *inputs, train=train, dynamic=dynamic))
    assert found >= least and found[1] >= least[1], found
    check(fn, *inputs, backend="triton_tiles", train=train, dynamic=dynamic)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.sampled(5)  # a diagonal
@DTYPES
@pytest.mark.parametrize("shape", ((128, 64, 128), (48, 40, 72), (136, 104, 56)), ids=str)
def test_linear_and_gelu_of_whole_and_ragged_tiles(shape, dtype):
    m, k, n = shape
    x, w, b = tensors((m, k), (n, k), (n,), dtype=dtype)
    tiled(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b, least=(2, 1))


@DTYPES
def test_operands_of_either_order(dtype):
    a, b, r = tensors((48, 64), (80, 48), (64, 80), dtype=dtype)
    tiled(lambda a, b, r: F.relu(a.t() @ b.t() + r), a, b, r, least=(2, 1))
    x, y, s = tensors((40, 72), (72, 24), (40, 24), dtype=dtype)
    tiled(lambda x, y, s: F.relu(x @ y + s), x, y, s, least=(2, 1))


def test_f32_tensors_that_are_multiplied_as_bf16_and_f32_results():
    def product(x, w, r):
        return F.relu((x.bfloat16() @ w.bfloat16()).float() + r), x.bfloat16() @ w.bfloat16()

    x, w, r = tensors((40, 72), (72, 24), (40, 24), dtype=torch.float32)
    x, w = x.sign(), w.sign()  # so that no sum is rounded
    tiled(product, x, w, r, least=(2, 2))


def test_f32_products_stay_with_pointers_unless_tensor_cores_compute_them():
    x, w, b = tensors((48, 40), (72, 40), (72,), dtype=torch.float32)
    assert not any(plan.descriptors for plan in plans("sm_90", torch.float32))
    assert any(plan.descriptors for plan in plans("sm_90", torch.float32, tf32=True))
    assert copies(compiled(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)) == (0, 0)


@pytest.mark.parametrize("rows", (64, 40), ids=("whole", "ragged"))
def test_a_tile_does_not_run_over_into_the_next_matrix(rows):
    a, b = tensors((3, rows, 32), (3, 32, rows))
    tiled(lambda a, b: torch.tanh(torch.bmm(a, b)) * 0.5, a, b, least=(2, 1))


def test_both_halves_of_swiglu_and_their_gradients():
    x, a, b = tensors((64, 64), (96, 64), (96, 64))
    tiled(lambda x, a, b: F.silu(x @ a.t()) * (x @ b.t()), x, a, b, least=(3, 1), train=True)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("shape", ((1, 2, 64, 32), (2, 1, 150, 24)), ids=str)
@DTYPES
def test_attention_and_its_gradient(shape, causal, dtype):
    q, k, v = tensors(shape, shape, shape, dtype=dtype)

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    tiled(attention, q, k, v, least=(9, 4), train=True)


@pytest.mark.parametrize("length", (64, 50))
def test_attention_of_packed_heads_reads_each_by_its_offset(length):
    def attention(x):
        q, k, v = x.view(2, length, 3, 2, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(2, length, 64)

    tiled(attention, tensor(2, length, 192).bfloat16(), least=(3, 1))


def test_grouped_heads_share_their_keys():
    q, k, v = tensors((1, 4, 40, 16), (1, 2, 36, 16), (1, 2, 36, 16))
    tiled(
        lambda *a: F.scaled_dot_product_attention(*a, enable_gqa=True),
        q, k, v, least=(10, 3), train=True,
    )  # fmt: skip


def linear_and_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def test_symbolic_sizes_that_are_multiples_of_16_and_others():
    x, w, b = tensors((48, 64), (80, 64), (80,))
    tiled(linear_and_gelu, x, w, b, least=(2, 1), dynamic=True)
    torch._dynamo.reset()
    call = torch.compile(linear_and_gelu, backend="triton_tiles", dynamic=True)
    for m, k, n in ((48, 64, 80), (32, 112, 48), (50, 30, 33)):
        x, w, b = tensors((m, k), (n, k), (n,))
        torch.testing.assert_close(call(x, w, b), linear_and_gelu(x, w, b), rtol=2**-6, atol=2**-6)


def test_places_in_a_grid_of_symbols_have_32_bits_as_descriptors_want():
    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(x[..., :64] for x in (q, k, v)))

    for one in compiled(heads, *tensors(*[(2, 3, 96, 80)] * 3), dynamic=True):
        for source in one.sources.values():
            (*places,) = re.findall(r"^ *i\d+o? = .*pid.*$", source, re.MULTILINE)
            assert places and not any("int64" in place for place in places), places


def test_an_unaligned_tensor_goes_by_pointers():
    x, w, b = tensors((48, 64), (80, 64), (80,))
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert shifted.data_ptr() % 16
    tiled(linear_and_gelu, shifted, w, b, least=(2, 1))


# -- what is described -----------------------------------------------------------------------------


def descriptors(fn, *inputs: torch.Tensor) -> dict[str, tuple]:
    (made,) = compiled(fn, *inputs)
    (program,) = made.programs.values()
    return {name: tuple(rest) for name, _, *rest in print_descriptors(form_of(program))}


def test_ends_of_tensors_are_ends_of_descriptors():
    x, w, b = tensors((200, 104), (72, 104), (72,))
    found = descriptors(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)
    shapes = [(shape, strides) for _, shape, strides in found.values()]
    assert shapes == [
        (("200", "104"), ("104", "1")),
        (("72", "104"), ("104", "1")),
        (("200", "72"), ("72", "1")),
    ]


def test_a_batch_is_an_axis_where_rows_end_within_a_tile():
    a, b = tensors((3, 40, 32), (3, 32, 64))
    found = descriptors(lambda a, b: torch.tanh(torch.bmm(a, b)), a, b)
    ragged, whole, result = found.values()
    assert ragged[1:] == (("3", "40", "32"), ("1280", "32", "1"))
    assert whole[1:] == (("96", "64"), ("64", "1"))
    assert result[1:] == (("3", "40", "64"), ("2560", "64", "1"))


def test_parts_of_a_split_loop_end_where_the_tensor_does():
    x, w = tensors((64, 2600), (2600, 72))
    (made,) = compiled(lambda x, w: torch.sin(x @ w), x, w)
    (program, *_) = made.programs.values()
    found = [box[3] for box in print_descriptors(form_of(program))]
    assert found[:2] == [("64", "2600"), ("2600", "72")]
    (loop,) = (s for s in program.body if isinstance(s, For))
    assert all(not stop.axes for stop in loop.stops)  # one that varies by part serialises wgmma


def test_rows_that_begin_between_multiples_of_16_bytes_stay_pointers():
    x, w = tensors((64, 100), (100, 72))
    found = descriptors(lambda x, w: F.gelu(x @ w), x, w)
    assert [shape for _, shape, _ in found.values()] == [("100", "72"), ("64", "72")]


def test_what_is_padded_stays_a_pointer():
    x, w = tensors((64, 48), (72, 64))
    found = descriptors(lambda x, w: F.relu(F.pad(x, (8, 8)) @ w.t()), x, w)
    assert sorted(shape for _, shape, _ in found.values()) == [("64", "72"), ("72", "64")]


def linear_and_sine(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ w)


def plans(
    target: str, dtype: torch.dtype, *, tf32: bool = False, **chosen: str
) -> tuple[Plan, ...]:
    (seen,) = observe(linear_and_sine, tensors((512, 64), (64, 512), dtype=dtype))
    options = Options.from_compile(None, {"race": "fused", **chosen})
    row = find_target(target, tf32=tf32)
    context = CompileContext(row, options, Trace("g"))
    made = compile_to_source(seen.graph, context)
    (flat,) = flat_kernels(made.schedule.steps, context).values()
    return offered_plans(flat, context)


@pytest.mark.parametrize("target", ("sm_90", "sm_100", "sm_120"))
def test_a_race_of_few_configurations_tries_descriptors(target):
    first, second, *_ = plans(target, torch.bfloat16)
    assert (first.descriptors, second.descriptors) == (False, True)
    assert replace(second, descriptors=False) == first


@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "sm_120"))
def test_launches_overlap_where_the_hardware_can_and_the_options_say(target):
    """A race tries the first plan so, last; a kernel without a product is not raced."""
    never, auto, always = (
        plans(target, torch.bfloat16, dependent_launches=chosen)
        for chosen in ("never", "auto", "always")
    )
    counted = [sum(plan.dependent for plan in found) for found in (never, auto, always)]
    assert counted == ([0, 0, 0] if target == "sm_80" else [0, 1, len(never)])
    if target != "sm_80":
        first, *_, last = auto
        assert last == replace(first, dependent=True) and len(auto) == len(never) + 1


@pytest.mark.parametrize("target", ("sm_80", "gfx942"))
def test_targets_without_the_hardware_are_offered_pointers_alone(target):
    assert not any(plan.descriptors for plan in plans(target, torch.bfloat16))


def test_options_force_one_way():
    assert all(p.descriptors for p in plans("sm_90", torch.bfloat16, descriptors="always"))
    assert not any(p.descriptors for p in plans("sm_90", torch.bfloat16, descriptors="never"))


def test_a_buffer_that_the_program_writes_stays_a_pointer():
    x, w = tensors((64, 64), (64, 64))
    (made,) = compiled(lambda x, w: torch.sin(x @ w), x, w)
    (program,) = made.programs.values()
    (*body, put) = program.body
    (left, _) = program.reads
    onto = replace(program, body=(*body, replace(put, buffer=left)), writes=(left,))
    assert len(print_descriptors(form_of(program))) == 3
    pointers = [pointer for _, pointer, *_ in print_descriptors(form_of(onto))]
    assert pointers == [program.reads[1].name]
