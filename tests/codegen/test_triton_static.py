"""What printed kernels compile to where no device is: widths, registers, conversions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusec.codegen.targets import find_target
from fusec.codegen.triton.operations import template
from fusec.errors import InternalError, UsageError
from fusec.ir import atoms
from fusec.ir import program as promised
from fusec.ir.dtype import BF16, BOOL, DTYPES, F32, F64, I32, I64, U8, DType
from fusec.ir.expr import Const
from fusec.ir.index import Axis, Size, index
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM
from fusec.ir.program import Program
from fusec.ir.scalar import SCALAR_OPS
from fusec.options import Options
from fusec.runtime.kernels import triton_kernel
from fusec.tools.assembly import Assembly, assembly_of
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import take_through
from fusec.tools.report.static_report import check_kernels
from fusec.tools.static_checks import StaticReport, inspect_kernel
from tests.codegen import programs
from tests.codegen.kernels import named_values, triton_source
from tests.codegen.programs import Builder, buffer


def compiled(program: Program, target: str = "sm_90", **options: object) -> Assembly:
    return assembly_of(triton_source(program, **options), target)


def report(program: Program, **options: object) -> StaticReport:
    return inspect_kernel(compiled(program, **options))


def test_layer_norm_of_1024_columns_in_one_warp_has_no_barrier() -> None:
    found = report(programs.layer_norm(4096, 1024), warps=1)
    assert (found.barriers, found.shared_bytes) == (0, 0)
    assert set(found.widths("load")) == set(found.widths("store")) == {16}


def test_pointwise_chain_of_f32_moves_16_bytes_at_once() -> None:
    found = report(programs.relu_chain(F32, 2**24, 1024, masked=False))
    assert set(found.widths("load")) == set(found.widths("store")) == {16}
    assert (found.convert_layouts, found.spill_bytes, found.barriers) == (0, 0, 0)


def test_images_of_7_by_7_are_loaded_and_stored_16_bytes_at_once() -> None:
    """BatchNorm in inference, beside a residual: row by row it had 0.39 of the floor."""
    x = torch.empty(64, 2048, 7, 7, dtype=torch.bfloat16)
    numbers = [torch.empty(2048) for _ in range(4)]

    def norm(x: torch.Tensor, r: torch.Tensor, *of_channels: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.batch_norm(x, *of_channels) + r)

    (seen,) = observe(norm, (x, x, *numbers))
    (kernel,) = check_kernels([take_through(seen, find_target("sm_90"), Options())]).kernels
    assert kernel.static is not None and kernel.expected is not None
    wide = [access for access in kernel.static.accesses if access.width == 16]
    assert [access.kind for access in wide] == ["load", "load", "store"]
    assert kernel.expected.share > 0.5


def test_mask_by_a_size_that_is_a_multiple_of_16_keeps_wide_accesses() -> None:
    found = report(programs.relu_chain(BF16, index(Size("N", 2**20)), 2048, masked=True))
    assert set(found.widths("load")) == set(found.widths("store")) == {16}
    odd = report(programs.relu_chain(BF16, index(Size("N", 2**20 + 1)), 2048, masked=True))
    assert set(odd.widths("load")) == {2}


def test_unaligned_buffer_costs_only_its_own_accesses() -> None:
    program = programs.relu_chain(BF16, 2**24, 2048, masked=False)
    found = report(program, unaligned={0})
    assert set(found.widths("load")) == {2}
    assert set(found.widths("store")) == {16}


def test_softmax_and_looped_sum_do_not_spill() -> None:
    for program in (
        programs.softmax(64, 1000, 1024, 4),
        programs.looped_row_sum(Size("M", 64), 100_000, 4096),
    ):
        assert report(program).spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
def test_windows_of_a_size_that_data_decides_have_no_fault(train: bool) -> None:
    def windows(table: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = table[keep.nonzero().flatten()]  # x[1:] begins at min(1, rows)
        return x[1:] * 2, x[1:-1].softmax(-1), torch.cat([x * 2, x[1:], x]), x[:-1].softmax(0)

    inputs = torch.empty(4096, 256), torch.ones(4096, dtype=torch.bool)
    target, options = find_target("sm_90"), Options.from_compile(None, {})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        seen = observe(windows, inputs, train=train, target=target)
    graphs = [take_through(one, target, options) for one in seen]
    assert any("min_0" in text for g in graphs for text in g.compiled.sources.values())
    assert check_kernels(graphs).faults == ()


def test_multiprocessor_of_an_unknown_target_is_reported() -> None:
    asm = compiled(programs.relu_chain(F32, 1024, 1024, masked=False), target="sm_90")
    asm = replace(asm, target="sm_61")
    with pytest.raises(UsageError, match="sm_90"):
        inspect_kernel(asm)


def padded_mask() -> Program:
    """keep[c] = inside[c] if c < 100, a guarded load and store of bool."""
    c = Axis("c", index(128))
    b = Builder("padded_mask", (), (c,))
    guard = b.op("lt", b.position(c), Const(100, I64))
    b.put(buffer("keep", BOOL, 100), c, b.load(buffer("inside", BOOL, 100), c, guard), guard)
    return b.program()


@pytest.mark.parametrize(
    "program",
    [
        padded_mask(),
        programs.embedding(3, 50_000, 1024),
        programs.bias_tile(4096, 4096, (64, 64)),
        programs.looped_row_sum(4, 2**33 + 1, 4096),
        programs.relu_chain(BF16, index(Size("N", 8)) * Size("K", 8), 1024, masked=True),
    ],
    ids=lambda p: p.name,
)
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_program_compiles(program: Program, target: str) -> None:
    compiled(program, target=target)


def test_kernels_are_promised_what_the_launcher_checks() -> None:
    assert atoms.MAX_SIZE == triton_kernel.MAX_SIZE
    assert promised.MULTIPLE == triton_kernel.MULTIPLE


def every_reduction(dtype: DType) -> Program:
    """Return the reductions of a tile along one axis and along both, and of a constant."""
    r, c = Axis("r", index(4)), Axis("c", index(32))
    b = Builder("reductions", (), (r, c))
    x = b.load(buffer("x", dtype, 4, 32), index(r) * 32 + c)
    monoids = (MAX, MIN, ANY, ALL) if dtype is BOOL else (MAX, MIN, SUM, PROD)
    for monoid in monoids:
        b.put(buffer(f"rows_{monoid}", dtype, 4), r, b.reduce(monoid, (c,), x))
        b.put(buffer(f"all_{monoid}", dtype, 1), 0, b.reduce(monoid, (r, c), x))
        b.put(buffer(f"one_{monoid}", dtype, 1), 0, b.reduce(monoid, (c,), Const(1, dtype)))
    return b.program()


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES.values() if not dtype.is_opaque], ids=str
)
def test_every_reduction_compiles(dtype: DType, target: str) -> None:
    compiled(every_reduction(dtype), target=target)


def every_operation(dtype: DType) -> Program:
    """Return y_op[i] = op(a[i], b[i]) for all operations that ``dtype`` has, in one kernel."""
    lane = Axis("i", index(128))
    b = Builder("operations", (), (lane,))
    args = [b.load(buffer(name, dtype, 128), lane) for name in "abc"]
    for name, row in SCALAR_OPS.items():
        try:
            template(name, dtype, approximate=False)
        except InternalError:
            continue
        result = b.op(name, *args[: row.arity])
        b.put(buffer(f"y_{name}", result.dtype, 128), lane, result)
    return b.program()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [F32, F64, I32, I64, U8, BOOL], ids=str)
def test_every_scalar_operation_compiles(dtype: DType, target: str) -> None:
    compiled(every_operation(dtype), target=target)


def test_every_cheap_form_compiles() -> None:
    program = every_operation(F32)
    compiled(program, approximate=named_values(program))


def test_division_and_square_root_are_ieee() -> None:
    lane = Axis("i", index(128))
    b = Builder("normalise", (), (lane,))
    x = b.load(buffer("x", F32, 128), lane)
    b.put(buffer("y", F32, 128), lane, b.op("div", x, b.op("sqrt", x)))
    accurate = compiled(b.program()).text("ptx")
    assert "div.rn.f32" in accurate
    assert "sqrt.rn.f32" in accurate
    approximate = compiled(b.program(), approximate=named_values(b.program())).text("ptx")
    assert "div.rn.f32" not in approximate
    assert "sqrt.rn.f32" not in approximate
