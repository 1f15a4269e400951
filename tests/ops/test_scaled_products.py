"""Products of scaled matrices of 8-bit floats: eager's numbers on CPUs, one kernel on GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusec
from fusec.driver.build import triton_source
from fusec.tools.assembly import assembly_of
from fusec.tools.report.emulation import Emulator, emulate
from fusec.tools.report.static_report import check_kernels
from fusec.tools.static_checks import inspect_kernel
from tests.codegen.test_contraction_static import staged
from tests.ops.test_block_scaled_products import traces_recipes
from tests.support import compile_with, seeded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = (torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2)


def codes(*shape: int, dtype: torch.dtype = E4M3, seed: int = 0) -> Tensor:
    with seeded(seed):
        return torch.randn(*shape).to(dtype)


def scalars() -> tuple[Tensor, Tensor]:
    return torch.tensor(0.03), torch.tensor(0.7)


def check(fn: Callable[..., Tensor], *inputs: Any, options: dict[str, Any] | None = None) -> None:
    """Assert eager's type and strides, and errors at most twice eager's, or one rounding."""
    torch._dynamo.reset()
    theirs, ours = fn(*inputs), compile_with(fn, **(options or {}))(*inputs)
    assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
    step = {torch.float32: 1e-4, E4M3: 2**-3, E5M2: 2**-2}.get(ours.dtype, 2**-7)
    least = {E4M3: 2**-9, E5M2: 2**-16}.get(ours.dtype, 1e-3)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=step, atol=least, equal_nan=True)


def left(fn: Callable[..., Any], *inputs: Any, **options: Any) -> list[str]:
    """Return the operations that run as eager kernels."""
    torch._dynamo.reset()
    (graph,) = fusec.explain(fn, *inputs, **options).graphs
    return [call.op for call in graph.externs]


# -- on CPUs, beside eager -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_scale_for_each_matrix(dtype: torch.dtype, rows: int) -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=dtype)

    check(scaled, codes(rows, 96), codes(64, 96, seed=1), *scalars())


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_scale_for_each_row_and_column_with_a_bias_and_an_activation(rows: int) -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
        y = torch._scaled_mm(x, w.t(), sx, sw, bias=bias, out_dtype=torch.bfloat16)
        return F.silu(y)

    with seeded(2):
        scales, bias = (torch.rand(rows, 1), torch.rand(1, 64)), torch.randn(64).bfloat16()
    check(scaled, codes(rows, 96), codes(64, 96, seed=1), *scales, bias)


@pytest.mark.parametrize("kinds", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_types_may_differ(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.float32)

    x, w = codes(6, 48, dtype=kinds[0]), codes(16, 48, dtype=kinds[1], seed=1)
    check(scaled, x, w, *scalars())


@pytest.mark.parametrize("dtype", [None, E5M2, torch.bfloat16], ids=str)
def test_a_result_of_8_bits_is_divided_by_its_scale_and_no_other(dtype: torch.dtype | None) -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, sy: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, scale_result=sy, out_dtype=dtype)

    check(scaled, codes(6, 48), codes(16, 48, seed=1), *scalars(), torch.tensor([4.0]))


@pytest.mark.parametrize("scale", [0.0, float("nan"), 1e30, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, E4M3], ids=str)
def test_extreme_scales_and_saturation_are_as_in_eager(scale: float, dtype: torch.dtype) -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=dtype)

    check(scaled, codes(6, 48), codes(16, 48, seed=1), torch.tensor(scale), torch.tensor(2.0))


def test_numbers_that_are_nan_reach_their_row_and_column_alone() -> None:
    x, w = codes(6, 48), codes(16, 48, seed=1)
    x[2, 3] = float("nan")
    w[5, 0] = float("nan")

    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.float32)

    check(scaled, x, w, *scalars())


@pytest.mark.parametrize("shape", [(4, 0, 8), (0, 16, 8), (4, 16, 0), (1, 1, 1), (7, 5, 3)])
def test_sizes_of_0_and_1_and_odd_ones(shape: tuple[int, int, int]) -> None:
    m, k, n = shape

    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x, w, sx, sw, out_dtype=torch.float32)

    check(scaled, codes(m, k), codes(k, n, seed=1), *scalars())


def test_rows_of_a_number_that_varies() -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16) * 2

    compiled = compile_with(scaled, dynamic=True)
    w = codes(32, 64, seed=1)
    for rows in (24, 5, 100):
        x, scales = codes(rows, 64), (torch.rand(rows, 1), torch.rand(1, 32))
        torch.testing.assert_close(compiled(x, w, *scales), scaled(x, w, *scales))


@pytest.mark.parametrize("bad", ["bias", "bias of rows", "scales of blocks", "f64"])
def test_what_eager_refuses_raises_its_error(bad: str) -> None:
    x, w = codes(128, 128), codes(128, 128, seed=1).t()
    scales, bias = scalars(), torch.zeros(128)
    if bad.startswith("bias"):
        bias = torch.zeros(1) if bad == "bias" else torch.zeros(4, 128)
    elif bad == "scales of blocks":
        scales = torch.ones(128, 1), torch.ones(1, 1)
    else:
        scales = scales[0].double(), scales[1]

    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
        return torch._scaled_mm(x, w, sx, sw, bias=bias, out_dtype=torch.float32)

    # On CPUs with AMX oneDNN takes scales in f64; torch refuses to trace them.
    with suppress(ValueError) if bad == "f64" else pytest.raises((RuntimeError, ValueError)):
        scaled(x, w, *scales, bias)
    torch._dynamo.reset()
    with pytest.raises((RuntimeError, ValueError)):
        compile_with(scaled)(x, w, *scales, bias)


def test_a_scale_of_a_result_in_another_type_raises_eager_s_error() -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, sy: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, scale_result=sy, out_dtype=E4M3)

    given = codes(4, 32), codes(16, 32, seed=1), *scalars(), torch.tensor(2.0).double()
    for fn in (scaled, compile_with(scaled)):
        with pytest.raises(RuntimeError):
            fn(*given)


def test_a_scale_of_three_axes_gives_the_result_none() -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16)

    check(scaled, codes(4, 48), codes(16, 48, seed=1), torch.full((1, 1, 1), 0.5), scalars()[1])


def test_few_rows_read_the_codes_of_the_weight_and_leave_no_call() -> None:
    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        return F.silu(torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16))

    x, w = codes(1, 512), codes(512, 512, seed=1)
    torch._dynamo.reset()
    (graph,) = fusec.explain(scaled, x, w, *scalars(), target="cpu:avx2").graphs
    assert not graph.externs and graph.bytes_moved < 2 * w.numel()


# -- on GPUs, in one kernel ------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    """A linear layer with SiLU and a quantised output."""
    y = torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16)
    return (F.silu(y).float() * 4).to(E4M3)


def fast_linear(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
    """The same with the sums that tensor cores make."""
    y = torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.bfloat16, use_fast_accum=True)
    return (F.silu(y).float() * 4).to(E4M3)


def swiglu(x: Tensor, w: Tensor, v: Tensor, sx: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
    """A gated layer with scales of rows and columns, a bias and a quantised output."""
    gate = torch._scaled_mm(x, w.t(), sx, sw, bias=bias, out_dtype=torch.bfloat16)
    up = torch._scaled_mm(x, v.t(), sx, sw, out_dtype=torch.bfloat16)
    return (F.silu(gate) * up).float().mul(4).to(E4M3)


def arguments(fn: Any, rows: int, terms: int, columns: int) -> list[Tensor]:
    x, w = codes(rows, terms), codes(columns, terms, seed=1)
    if fn is not swiglu:
        return [x, w, *scalars()]
    with seeded(2):
        scales, bias = (torch.rand(rows, 1), torch.rand(1, columns) / 8), torch.randn(columns)
    return [x, w, codes(columns, terms, seed=3), *scales, bias.bfloat16()]


LAYERS = pytest.mark.parametrize("fn", [linear, fast_linear, swiglu])


@LAYERS
def test_a_layer_with_a_quantised_result_is_one_kernel_for_hopper(fn: Any) -> None:
    given = arguments(fn, 256, 512, 256)
    assert left(fn, *given, target="sm_90", options={"race": "fused"}) == []
    torch._dynamo.reset()
    options = {"race": "fused"}
    (graph,) = fusec.explain(fn, *given, target="sm_90", options=options).graphs
    assert len(graph.kernels) == 1 and graph.bytes_moved == graph.bytes_floor


@pytest.mark.slow
@LAYERS
def test_its_machine_code_multiplies_8_bits_and_spills_nothing(fn: Any) -> None:
    (one,) = staged(fn, *arguments(fn, 4096, 4096, 4096))
    assert one.compiled is not None
    (name,) = one.compiled.distinct
    assembly = assembly_of(triton_source(one.compiled, name), "sm_90")
    found, ptx = inspect_kernel(assembly), assembly.text("ptx")
    assert found.spill_bytes == 0 and check_kernels([one]).faults == ()
    assert set(re.findall(r"mma\S*f32\.(\w+\.\w+)", ptx)) == {"e4m3.e4m3"} and "wgmma" in ptx
    assert found.threads == 384 and found.shared_bytes <= 232448  # a producer warp, by rule


@pytest.mark.slow
def test_a_gated_layer_spills_nothing_where_operands_are_registers() -> None:
    (one,) = staged(swiglu, *arguments(swiglu, 4096, 4096, 4096), target="sm_120")
    assert one.compiled is not None
    (name,) = one.compiled.distinct
    found = inspect_kernel(assembly_of(triton_source(one.compiled, name), "sm_120"))
    assert found.spill_bytes == 0


SETTINGS = [{}, {"descriptors": "always"}, {"roles": "cooperative"}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@LAYERS
def test_it_is_right_in_the_emulator(fn: Any, settings: dict[str, str]) -> None:
    rows, terms, columns = (192, 384, 128) if settings else (70, 272, 64)
    torch._dynamo.reset()
    options = {"race": "fused", **settings}
    found = emulate(fn, arguments(fn, rows, terms, columns), options=options)
    assert found.faults == (), str(found)
    assert len(found.kernels) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_sums_are_as_exact_as_they_say(fast: bool) -> None:
    """2048 terms of one sign: sums of 14 bits lose the later ones, where they may."""
    x, w = torch.full((64, 2048), 1.125).to(E4M3), torch.full((64, 2048), 0.875).to(E4M3)
    one = torch.ones(())
    made: list[Tensor] = []

    def scaled(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor) -> Tensor:
        y = torch._scaled_mm(x, w.t(), sx, sw, out_dtype=torch.float32, use_fast_accum=fast)
        return y * 2

    run = Emulator.of("sm_90", {"race": "fused"}, 0)
    torch._dynamo.reset()
    made.append(torch.compile(scaled, backend=run.backend)(x, w, one, one))
    wanted = 2 * 2048 * 1.125 * 0.875
    error = (made[0] / wanted - 1).abs().max().item()
    assert error > 1e-3 if fast else error < 2e-4


# -- scales of blocks ------------------------------------------------------------------------------


def in_blocks(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, kind: str) -> Tensor:
    """A linear layer with scales of 128 terms of a row, and of 128 x 128 or 1 x 128 weights."""
    of_rows, of_weights = (F.ScalingType.__members__[k] for k in ("BlockWise1x128", kind))
    y = F.scaled_mm(x, w.t(), sx, of_rows, sw, of_weights, output_dtype=torch.bfloat16)
    return F.silu(y)


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch has no scales of blocks")
@pytest.mark.parametrize("kind", ["BlockWise128x128", "BlockWise1x128"])
def test_scales_of_blocks_are_one_kernel_that_is_right_in_the_emulator(kind: str) -> None:
    m, k, n = 128, 512, 256
    x, w, blocks = codes(m, k), codes(n, k, seed=1), k // 128
    with seeded(2):
        sx = by_columns(torch.rand(m, blocks))
        whole = kind == "BlockWise128x128"
        sw = by_columns(torch.rand(4, n // 128) if whole else torch.rand(n, blocks))
    of_weights = sw[:blocks].t().repeat_interleave(128, 0) if whole else sw
    run = Emulator.of("sm_90", {"race": "fused"}, 0)
    torch._dynamo.reset()
    found = torch.compile(in_blocks, backend=run.backend)(x, w, sx, sw, kind)
    each = [s.double().repeat_interleave(128, 1) for s in (sx, of_weights)]
    wanted = F.silu((x.double() * each[0]) @ (w.double() * each[1]).t())
    assert len(run.kernels) == 1
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=2e-2)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch has no recipes")
def test_recipes_of_tensors_and_rows_are_as_in_eager() -> None:
    kinds = F.ScalingType

    def by_recipe(x: Tensor, w: Tensor, *scales: Tensor) -> Tensor:
        sx, sw, rx, rw = scales
        one = F.scaled_mm(x, w.t(), sx, kinds.TensorWise, sw, kinds.TensorWise)
        each = F.scaled_mm(x, w.t(), rx, kinds.RowWise, rw, kinds.RowWise)
        return one + each

    rows = torch.rand(6, 1), torch.rand(1, 16)
    check(by_recipe, codes(6, 48), codes(16, 48, seed=1), *scalars(), *rows)


# -- groups ----------------------------------------------------------------------------------------

ROWS, TERMS, COLUMNS, GROUPS = 160, 256, 128, 6


def experts(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, ends: Tensor, fast: bool) -> Tensor:
    """A layer of experts in 8 bits, with scales of rows and of each expert's columns."""
    y = torch._scaled_grouped_mm(
        *(x, w.transpose(1, 2), sx, sw, ends), out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return F.silu(y)


def test_a_grouped_product_with_its_activation_is_one_kernel() -> None:
    x, w = codes(ROWS, TERMS), codes(GROUPS, COLUMNS, TERMS, seed=1)
    ends = torch.arange(ROWS // GROUPS, ROWS, ROWS // GROUPS, dtype=torch.int32)[:GROUPS]
    scales = torch.ones(ROWS), torch.ones(GROUPS, COLUMNS)
    for target in ("sm_90", "sm_100", "sm_120"):
        torch._dynamo.reset()
        options = {"race": "fused"}
        (graph,) = fusec.explain(
            experts, x, w, *scales, ends, False, target=target, options=options
        ).graphs
        assert not graph.externs and len(graph.kernels) == 1


@pytest.mark.skipif(not traces_recipes(), reason="torch does not trace recipes of groups")
def test_a_grouped_product_with_recipes_of_rows_is_one_kernel() -> None:
    kind = F.ScalingType.RowWise

    def layer(x: Tensor, w: Tensor, sx: Tensor, sw: Tensor, ends: Tensor) -> Tensor:
        return F.silu(F.scaled_grouped_mm(x, w.transpose(1, 2), sx, kind, sw, kind, offs=ends))

    x, w = codes(ROWS, TERMS), codes(GROUPS, COLUMNS, TERMS, seed=1)
    given = torch.ones(ROWS), torch.ones(GROUPS, COLUMNS), torch.full((GROUPS,), ROWS).int()
    options = {"race": "fused"}
    (graph,) = fusec.explain(layer, x, w, *given, target="sm_90", options=options).graphs
    assert not graph.externs and len(graph.kernels) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("target", "rows", "groups"), [("sm_90", 90, 6), ("sm_90", 200, 3), ("sm_100", 90, 6)]
)
def test_fifty_random_splits_are_right_in_the_emulator(
    target: str, rows: int, groups: int, fast: bool
) -> None:
    """With 200 rows tiles of sm_90 have 64 rows, for wgmma."""
    terms, columns = 144, 80
    x, w = codes(rows, terms), codes(groups, columns, terms, seed=1)
    run = Emulator.of(target, {"race": "fused"}, 0)
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend=run.backend)
    for seed in range(50):
        with seeded(seed):
            cuts = torch.randint(0, rows + 1, (groups,)).sort().values
            cuts[seed % groups] = cuts[max(seed % groups - 1, 0)]  # an empty group
            sx, sw = torch.rand(rows), torch.rand(groups, columns) / 8
        ends = cuts.to(torch.int32)
        found = compiled(x, w, sx, sw, ends, fast)
        wanted, begin = torch.zeros(rows, columns, dtype=torch.float64), 0
        for e, end in enumerate(ends.tolist()):
            product = x[begin:end].double() @ w[e].double().t()
            wanted[begin:end] = product * sx[begin:end, None].double() * sw[e].double()
            begin = end
        torch.testing.assert_close(found.double(), F.silu(wanted), rtol=2**-6, atol=2e-2)
    assert len(run.kernels) == 1


@pytest.mark.slow
def test_gradients_of_groups_have_scales_of_each_group_in_the_emulator() -> None:
    """dw[e, k, n] = sum(s: x[s, k] * dy[s, n]) of a group's rows, with scales of its rows."""
    x, dy = codes(TERMS // 2, ROWS), codes(COLUMNS, ROWS, seed=1)
    with seeded(2):
        sx, sy = torch.rand(3 * TERMS // 2), torch.rand(3 * COLUMNS)
    ends = torch.tensor([48, 48, 144], dtype=torch.int32)

    def gradient(x: Tensor, dy: Tensor, sx: Tensor, sy: Tensor, ends: Tensor) -> Tensor:
        return torch._scaled_grouped_mm(x, dy.t(), sx, sy, ends, out_dtype=torch.bfloat16) * 2

    run = Emulator.of("sm_90", {"race": "fused"}, 0)
    torch._dynamo.reset()
    found = torch.compile(gradient, backend=run.backend)(x, dy, sx, sy, ends)
    for e, (begin, end) in enumerate([(0, 48), (48, 48), (48, 144)]):
        product = x[:, begin:end].double() @ dy[:, begin:end].double().t()
        own = sx.double().view(3, -1, 1)[e] * sy.double().view(3, 1, -1)[e]
        torch.testing.assert_close(found[e].double(), 2 * product * own, rtol=2**-6, atol=2e-2)
    assert len(run.kernels) == 1
