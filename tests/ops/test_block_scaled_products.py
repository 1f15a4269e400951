"""Products with a scale for each block of 16 or 32 terms: one kernel on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusec
from fusec.codegen import targets
from fusec.driver.build import triton_source
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.passes.schedule.plan import Plan
from fusec.tools.assembly import assembly_of
from fusec.tools.report.emulation import Emulator
from fusec.tools.report.static_report import check_kernels
from fusec.tools.static_checks import inspect_kernel
from tests.codegen.test_contraction_static import staged
from tests.planted import recode
from tests.support import compile_with, seeded

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Matrix: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""A matrix as it lies in memory, its scales row by row, and its scaled values in f64."""

requires_recipes = pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch has no recipes")


def powers(rows: int, blocks: int) -> Tensor:
    return torch.randint(120, 134, (rows, blocks), dtype=torch.uint8).view(E8M0)


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    block = values.shape[1] // scales.shape[1]
    return values.double() * scales.float().double().repeat_interleave(block, 1)


def of_8_bits(rows: int, terms: int, seed: int) -> Matrix:
    with seeded(seed):
        x, s = torch.randn(rows, terms).to(E4M3), powers(rows, terms // 32)
    return x, s, scaled(x.double(), s)


def of_4_bits(rows: int, terms: int, seed: int, *, fine: bool) -> Matrix:
    with seeded(seed):
        codes = torch.randint(0, 16, (rows, terms), dtype=torch.uint8)
        s = (torch.rand(rows, terms // 16) * 2).to(E4M3) if fine else powers(rows, terms // 32)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
    values = torch.where(codes > 7, -1, 1) * SIZES[(codes & 7).long()]
    return pairs, s, scaled(values, s)


def in_tiles(scales: Tensor) -> Tensor:
    """Return scales in tiles of 128 rows and 4 blocks, as cuBLAS reads them."""
    rows, blocks = (-(-n // of) * of for n, of in zip(scales.shape, (128, 4), strict=True))
    whole = torch.zeros(rows, blocks, dtype=torch.uint8)
    whole[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = whole.view(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def linear(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    """A linear layer with SiLU and a quantised output."""
    y = torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16)
    return (F.silu(y).float() * 4).to(E4M3)


def recipe(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, gx: Tensor, gw: Tensor) -> Tensor:
    """The same with scales of both matrices in f32."""
    levels = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    y = F.scaled_mm(
        *(x, w.t(), [sx, gx], levels, [sw, gw], levels, order, order),
        output_dtype=torch.bfloat16,
    )
    return (F.silu(y).float() * 4).to(E4M3)


def dequantised(x: Tensor, s: Tensor, kind: torch.dtype) -> Tensor:
    return (x.to(kind).unflatten(1, (-1, 32)) * s.to(kind)[..., None]).flatten(1)


def spelled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, kind: torch.dtype) -> Tensor:
    """The layer in plain torch: both matrices are dequantised."""
    y = dequantised(x, sx, kind) @ dequantised(w, sw, kind).t()
    return (F.silu(y.bfloat16()).float() * 4).to(E4M3)


def swiglu(x: Tensor, w: Tensor, v: Tensor, sx: Tensor, sw: Tensor, sv: Tensor) -> Tensor:
    gate = torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16)
    up = torch._scaled_mm(x, v.t(), sx, sv, out_dtype=torch.bfloat16)
    return (F.silu(gate) * up).float().mul(4).to(E4M3)


def quantised(y: Tensor) -> Tensor:
    return (F.silu(y) * 4).clamp(-448, 448)


FORMS = ["mxfp8", "mxfp4", pytest.param("nvfp4", marks=requires_recipes), "plain", "plain bf16"]


def layer(form: str, m: int, k: int, n: int) -> tuple[Callable[..., Tensor], list[Any], Tensor]:
    """Return a layer, its arguments, and its result in f64."""
    if form in ("mxfp8", "plain", "plain bf16"):
        (x, sx, left), (w, sw, right) = of_8_bits(m, k, 0), of_8_bits(n, k, 1)
    else:
        fine = form == "nvfp4"
        x, sx, left = of_4_bits(m, k, 0, fine=fine)
        w, sw, right = of_4_bits(n, k, 1, fine=fine)
    wanted = left @ right.t()
    if form.startswith("plain"):
        kind = torch.bfloat16 if form == "plain bf16" else torch.float32
        return spelled, [x, w, sx, sw, kind], quantised(wanted)
    given = [x, w, in_tiles(sx), in_tiles(sw)]
    if form != "nvfp4":
        return linear, given, quantised(wanted)
    return recipe, [*given, torch.tensor([0.5]), torch.tensor([0.25])], quantised(wanted / 8)


def check_one_kernel(fn: Callable[..., Tensor], given: list[Any], target: str) -> None:
    torch._dynamo.reset()
    (graph,) = fusec.explain(fn, *given, target=target, options={"race": "fused"}).graphs
    assert not graph.externs and len(graph.kernels) == 1
    assert graph.bytes_moved == graph.bytes_floor


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_a_layer_with_a_quantised_result_is_one_kernel(form: str, target: str) -> None:
    fn, given, _ = layer(form, 256, 512, 256)
    check_one_kernel(fn, given, target)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("target", "instruction"), [("sm_100", "tcgen05.mma"), ("sm_120", "mma.sync")]
)
def test_its_machine_code_multiplies_by_block_scale_and_spills_nothing(
    form: str, target: str, instruction: str
) -> None:
    fn, given, _ = layer(form, 2048, 2048, 2048)
    (one,) = staged(fn, *given, target=target)
    assert one.compiled is not None
    (name,) = one.compiled.distinct
    assembly = assembly_of(triton_source(one.compiled, name), target)
    products = re.findall(rf"{re.escape(instruction)}\S*", assembly.text("ptx"))
    assert products and all("block_scale" in product for product in products)
    assert inspect_kernel(assembly).spill_bytes == 0 and check_kernels([one]).faults == ()


SHAPES = [(70, 288, 64), (128, 256, 128)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_it_is_right_in_the_emulator(form: str, target: str, shape: tuple[int, int, int]) -> None:
    fn, given, wanted = layer(form, *shape)
    run = Emulator.of(target, {"race": "fused"}, 0)
    torch._dynamo.reset()
    found = torch.compile(fn, backend=run.backend)(*given)
    assert len(run.kernels) == 1
    torch.testing.assert_close(found.double(), wanted, rtol=2**-3.5, atol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_a_gated_layer_has_wide_tiles_and_spills_nothing(target: str) -> None:
    (x, sx, _), (w, sw, _) = of_8_bits(2048, 2048, 0), of_8_bits(2048, 2048, 1)
    given = [x, w, w.clone(), *map(in_tiles, (sx, sw, sw))]
    (one,) = staged(swiglu, *given, target=target)
    assert one.compiled is not None
    (name,) = one.compiled.distinct
    source = triton_source(one.compiled, name)
    assert re.search(r"tl\.full\(\(128, (64|128)\)", source.source)
    assert inspect_kernel(assembly_of(source, target)).spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_a_gated_layer_is_one_kernel_that_is_right_in_the_emulator(target: str) -> None:
    (x, sx, left), *weights = of_8_bits(128, 256, 0), of_8_bits(128, 256, 1), of_8_bits(128, 256, 2)
    (w, sw, gate), (v, sv, up) = weights
    run = Emulator.of(target, {"race": "fused"}, 0)
    torch._dynamo.reset()
    compiled = torch.compile(swiglu, backend=run.backend)
    found = compiled(x, w, v, *map(in_tiles, (sx, sw, sv)))
    wanted = (F.silu(left @ gate.t()) * (left @ up.t()) * 4).clamp(-448, 448)
    assert len(run.kernels) == 1
    torch.testing.assert_close(found.double(), wanted, rtol=2**-3.5, atol=2**-6)


# -- groups of rows --------------------------------------------------------------------------------


def experts(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, ends: Tensor) -> Tensor:
    y = torch._scaled_grouped_mm(x, w.transpose(1, 2), sx, sw, ends, out_dtype=torch.bfloat16)
    return F.silu(y)


def experts_by_recipe(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, ends: Tensor) -> Tensor:
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    y = F.scaled_grouped_mm(*(x, w.transpose(1, 2), sx, kind, sw, kind, order, order), offs=ends)
    return F.silu(y)


def in_tiles_of_groups(scales: Tensor, ends: list[int], rows: int) -> Tensor:
    """Return scales of which those of each group begin a tile, in a table of so many rows."""
    parts = [in_tiles(scales[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True) if b > a]
    found, wide = torch.cat([p.view(torch.uint8) for p in parts]), -(-scales.shape[1] // 4) * 4
    whole = torch.zeros(rows * wide, dtype=torch.uint8)
    whole[: len(found)] = found
    return whole.view(E8M0).view(rows, wide)


def traces_recipes() -> bool:
    """Return whether torch traces grouped products with recipes, as 2.15 does."""
    op = getattr(torch.ops.aten, "_scaled_grouped_mm_v2", None)
    return op is not None and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.default.name(), "Meta"
    )


GROUPED = [
    experts,
    pytest.param(
        experts_by_recipe,
        marks=pytest.mark.skipif(not traces_recipes(), reason="torch does not trace recipes"),
    ),
]


@pytest.mark.parametrize("fn", GROUPED)
@pytest.mark.parametrize(
    ("target", "rows", "columns", "groups", "instruction", "splits"),
    [
        ("sm_90", 60, 32, 4, False, 2),
        pytest.param("sm_90", 60, 32, 4, False, 50, marks=pytest.mark.slow),
        pytest.param("sm_100", 60, 32, 4, False, 50, marks=pytest.mark.slow),
        pytest.param("sm_100", 560, 128, 2, True, 50, marks=pytest.mark.slow),
        pytest.param("sm_100", 280, 128, 2, True, 2, marks=pytest.mark.slow),
        pytest.param("sm_120", 280, 128, 2, True, 2, marks=pytest.mark.slow),
    ],
)
def test_experts_are_one_kernel_that_is_right_for_random_splits(
    fn: Callable[..., Tensor],
    target: str,
    rows: int,
    columns: int,
    groups: int,
    instruction: bool,
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many rows tiles are wide enough for instructions that take scales."""
    terms = 160
    codegen = targets.TARGETS[target].codegen

    def widest(flat: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
        plans = codegen.plans(flat, machine)
        return tuple(plan for plan in plans if plan.scaled) or plans

    recode(monkeypatch, target, plans=widest)
    (x, sx, left), (w, sw, right) = of_8_bits(rows, terms, 0), of_8_bits(groups * columns, terms, 1)
    scales = torch.stack([in_tiles(part).view(torch.uint8) for part in sw.chunk(groups)])
    weights = w.view(groups, columns, terms)
    run = Emulator.of(target, {"race": "fused"}, 0)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=run.backend)
    for seed in range(splits):
        with seeded(seed):
            ends = torch.randint(0, rows + 1, (groups,)).sort().values.to(torch.int32)
        ends[seed % groups] = ends[max(seed % groups - 1, 0)]
        own = in_tiles_of_groups(sx, ends.tolist(), 128 * (groups + rows // 128 + 1))
        found = compiled(x, weights, own, scales.view(E8M0), ends)
        wanted, begin = torch.zeros(rows, columns, dtype=torch.float64), 0
        for end, part in zip(ends.tolist(), right.chunk(groups), strict=True):
            wanted[begin:end], begin = left[begin:end] @ part.t(), end
        torch.testing.assert_close(found.double(), F.silu(wanted), rtol=2**-6, atol=2**-6)
    tiles, product = run.kernels  # the first counts tiles of scales
    assert (tiles.launches, product.launches) == (splits, splits)
    assert ("dot_scaled" in product.kernel.kernel.source) is instruction
    wrong = torch.tensor([2**31 - 1, -7, 3, 50], dtype=torch.int32)[:groups]
    compiled(x, weights, own, scales.view(E8M0), wrong)  # reads nothing out of bounds


def test_a_scale_that_is_nan_reaches_its_row_alone_in_the_interpreter() -> None:
    """As the graph says; the emulator runs what is printed for it."""
    fn, given, _ = layer("plain", 32, 64, 32)
    given[2].view(torch.uint8)[3, 1] = 0xFF
    found = compile_with(fn)(*given)
    assert found[3].float().isnan().all() and not found[4:].float().isnan().any()


@pytest.mark.parametrize("bad", ["size", "type"])
def test_scales_of_other_sizes_and_types_are_left_to_eager(bad: str) -> None:
    fn, given, _ = layer("mxfp8", 128, 128, 128)
    given[2] = given[2][:256] if bad == "size" else given[2].view(torch.uint8)
    with pytest.raises(Exception, match=r"scale|Scale"):
        compile_with(fn)(*given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "shape"),
    [("sm_100", (48, 160, 40)), ("sm_100", (128, 32, 128)), ("sm_120", (17, 32, 9))],
    ids=str,
)
def test_what_no_instruction_has_keeps_small_scales_and_infinities(
    target: str, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    (x, _, _), (w, _, _) = of_8_bits(m, k, 0), of_8_bits(n, k, 1)
    x = x.float().to(torch.float8_e5m2)
    x.view(torch.uint8)[5, 7] = 0x7C
    least, most = torch.zeros(m, k // 32), torch.full((n, k // 32), 250.0)
    scales = [s.to(torch.uint8).view(torch.float8_e8m0fnu) for s in (least, most)]

    def product(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        kind = torch.float32
        return (dequantised(x, sx, kind) @ dequantised(w, sw, kind).t()).bfloat16()

    run = Emulator.of(target, {"race": "fused"}, 0)
    torch._dynamo.reset()
    found = torch.compile(product, backend=run.backend)(x, w, *scales)
    assert len(run.kernels) == 1
    torch.testing.assert_close(found, product(x, w, *scales), rtol=2**-7, atol=2**-7)
