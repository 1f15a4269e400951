"""Printed Triton kernels, run by Triton's interpreter, against the meaning of their programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from fusec.codegen.triton.arguments import divisible_by_16, grid_exprs, signature
from fusec.codegen.triton.gluon import print_kernel
from fusec.codegen.triton.operations import ROWS, template
from fusec.errors import InternalError
from fusec.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8, DType
from fusec.ir.expr import Const, Op, Reduce
from fusec.ir.index import Axis, Index, Size, index
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM
from fusec.ir.program import Program, Scratch
from fusec.ir.scalar import COARSE_TERMS, ROUND, SCALAR_OPS
from fusec.tools.interpreter.expression import Env, eval_scalar
from fusec.tools.interpreter.program import run_program
from tests.codegen import programs
from tests.codegen.kernels import named_values
from tests.codegen.programs import Builder, buffer, f32, form_of, tiled
from tests.float_cases import narrowed
from tests.philox import random_bits
from tests.triton_interpreter import interpret

TORCH_TYPES = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}


def run(
    program: Program, inputs: Mapping[str, torch.Tensor], sizes: Mapping[Size, int] | None = None
) -> dict[str, torch.Tensor]:
    """Run a program both ways, assert that they agree, and return what the kernel wrote (flat)."""
    env = Env(sizes=dict(sizes or {}))
    tensors = {}
    for b in program.buffers:
        count = eval_scalar(_length(program, b.name), env)
        given = inputs.get(b.name)
        tensors[b] = (
            torch.zeros(count, dtype=TORCH_TYPES[b.dtype.name])
            if given is None
            else given.reshape(-1).clone()
        )
        assert tensors[b].numel() == count
    storage = {b: _numpy(tensors[b]) for b in program.buffers}
    run_program(program, storage, env.sizes)
    grid = tuple(eval_scalar(extent, env) for extent in grid_exprs(program))
    args = [*tensors.values(), *(env.sizes[s] for s in program.sizes)]
    interpret(print_kernel(form_of(program)), program.name, grid, args)
    for b in program.writes:
        expected = torch.from_numpy(storage[b])
        tolerance = {"f32": 2e-6, "f64": 1e-12}.get(
            b.dtype.name, 0 if not b.dtype.is_float else 8e-3
        )
        torch.testing.assert_close(
            tensors[b].to(expected.dtype), expected, rtol=tolerance, atol=tolerance, equal_nan=True
        )
    return {b.name: tensors[b] for b in program.writes}


def _length(program: Program, name: str) -> Index:
    target = next(b for b in program.buffers if b.name == name)
    return target.flat().shape[0]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy().copy()


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# -- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_pointwise_chain_without_masks(dtype: DType) -> None:
    x = _random(128, dtype=TORCH_TYPES[dtype.name])
    program = programs.relu_chain(dtype, 128, 64, masked=False)
    y = run(program, {"x": x})["y"]
    torch.testing.assert_close(y, (x.float().relu() * 0.5 + 1.0).to(x.dtype))


def test_masked_lanes_touch_no_memory() -> None:
    x = _random(100)
    y = run(programs.relu_chain(F32, 100, 64, masked=True), {"x": x})["y"]
    torch.testing.assert_close(y, x.relu() * 0.5 + 1.0)


@pytest.mark.parametrize("count", [1, 64, 65])
def test_extent_known_at_launch_only(count: int) -> None:
    size = Size("N", 64)
    outer, lane, i = tiled("i", size, 64)
    b = Builder("double", (outer,), (lane,))
    x, y = buffer("x", F32, size), buffer("y", F32, size)
    inside = b.op("lt", b.position(i), b.position(size))
    b.put(y, i, b.op("mul", b.load(x, i, inside), f32(2.0)), inside)
    values = _random(count)
    assert torch.equal(run(b.program(size), {"x": values}, {size: count})["y"], values * 2)


def test_layer_norm_with_residual() -> None:
    size = Size("M", 8192)
    x, r = (_random(3, 256, dtype=torch.bfloat16) for _ in range(2))
    w, b = (_random(256, dtype=torch.bfloat16) for _ in range(2))
    written = run(programs.layer_norm(size, 256), {"x": x, "r": r, "w": w, "b": b}, {size: 3})
    assert torch.equal(written["xr"].view(3, 256), x + r)
    expected = torch.nn.functional.layer_norm(x.float() + r.float(), (256,), w.float(), b.float())
    torch.testing.assert_close(written["y"].view(3, 256), expected.bfloat16())


def test_softmax_of_ragged_rows_in_two_axis_lanes() -> None:
    x = _random(6, 50)
    y = run(programs.softmax(6, 50, 64, 2), {"x": x})["y"].view(6, 50)
    torch.testing.assert_close(y, x.softmax(-1))


def test_looped_sum_peels_the_ragged_tile() -> None:
    size = Size("M", 16)
    x = _random(3, 90)
    y = run(programs.looped_row_sum(size, 90, 32), {"x": x}, {size: 3})["y"]
    torch.testing.assert_close(y, x.sum(1))


def test_transposed_read_with_a_bias_along_one_lane_axis() -> None:
    x, bias = _random(32, 64, dtype=torch.float16), _random(32, dtype=torch.float16)
    y = run(programs.bias_tile(64, 32, (16, 32)), {"x": x, "bias": bias})["y"]
    assert torch.equal(y.view(64, 32), (x.t().float() + bias.float()).half())


def test_gather_reads_rows_by_index() -> None:
    table = _random(10, 64, dtype=torch.bfloat16)
    ids = torch.tensor([3, 0, 9])
    y = run(programs.embedding(3, 10, 64), {"ids": ids, "table": table})["y"]
    assert torch.equal(y.view(3, 64), table[ids])


def test_bool_buffers_are_read_and_written() -> None:
    c = Axis("c", index(64))
    b = Builder("masked_fill", (), (c,))
    keep = b.load(buffer("keep", BOOL, 64), c)
    value = b.select(keep, b.load(buffer("x", F32, 64), c), f32(-float("inf")))
    b.put(buffer("y", F32, 64), c, value)
    b.put(buffer("dropped", BOOL, 64), c, b.op("not", keep))
    mask = torch.arange(64) % 3 == 0
    written = run(b.program(), {"keep": mask, "x": torch.ones(64)})
    assert torch.equal(written["dropped"], ~mask)
    assert torch.equal(written["y"], torch.ones(64).masked_fill(~mask, -float("inf")))


def test_guarded_load_of_bool_gives_false() -> None:
    c = Axis("c", index(4))
    b = Builder("pad", (), (c,))
    guard = b.op("lt", b.position(c), Const(2, I64))
    b.put(buffer("y", BOOL, 4), c, b.load(buffer("x", BOOL, 2), c, guard))
    written = run(b.program(), {"x": torch.ones(2, dtype=torch.bool)})["y"]
    assert written.tolist() == [True, True, False, False]


def test_more_programs_than_32_bits_count_share_one_program_id() -> None:
    """Triton's launcher multiplies three in 32 bits, and launches nothing where that overflows."""
    y, x = (Axis(name, index(extent)) for name, extent in (("y", 2**12), ("x", 2**19)))
    b = Builder("store", (y, x), ())
    b.put(buffer("out", F32, 2**31), index(y) * 2**19 + x, f32(0.0))
    assert grid_exprs(b.program()) == (index(2**31), index(1), index(1))


def test_four_grid_axes_share_one_program_id() -> None:
    grid = tuple(
        Axis(name, index(extent)) for name, extent in zip("abcd", (2, 3, 1, 2), strict=True)
    )
    b = Builder("copy", grid, ())
    a, bb, c, d = map(index, grid)
    here = ((a * 3 + bb) * 1 + c) * 2 + d
    b.put(buffer("y", F32, 12), here, b.load(buffer("x", F32, 12), d * 6 + bb * 2 + a))
    program = b.program()
    assert grid_exprs(program) == (index(12), index(1), index(1))
    x = torch.arange(12.0)
    y = run(program, {"x": x})["y"]
    assert torch.equal(y.view(2, 3, 2), x.view(2, 3, 2).permute(2, 1, 0).contiguous())


@pytest.mark.parametrize("monoid", (SUM, PROD, MAX, MIN, ANY, ALL), ids=str)
@pytest.mark.parametrize("over", [(0,), (1,), (0, 1)])
def test_reduction_over_each_choice_of_lanes(monoid: object, over: tuple[int, ...]) -> None:
    lanes = (Axis("r", index(4)), Axis("c", index(8)))
    dtype = BOOL if monoid in (ANY, ALL) else F32
    b = Builder("reduce", (), lanes)
    value = b.load(buffer("x", dtype, 4, 8), index(lanes[0]) * 8 + lanes[1])
    total = b.reduce(monoid, tuple(lanes[i] for i in over), value)
    kept = [axis for i, axis in enumerate(lanes) if i not in over]
    b.put(buffer("y", dtype, 8), kept[0] if kept else 0, total)
    x = _random(4, 8)
    run(b.program(), {"x": x > 0.5 if dtype is BOOL else x})


@pytest.mark.parametrize("monoid", [MAX, MIN])
def test_extreme_of_a_tile_with_nan_is_nan(monoid: object) -> None:
    c = Axis("c", index(8))
    b = Builder("extreme", (), (c,))
    b.put(buffer("y", F32, 1), 0, b.reduce(monoid, (c,), b.load(buffer("x", F32, 8), c)))
    x = torch.arange(8.0)
    x[3] = float("nan")
    assert run(b.program(), {"x": x})["y"].isnan()


def test_reduction_counts_lanes_that_its_body_lacks() -> None:
    lanes = (Axis("r", index(4)), Axis("c", index(8)))
    b = Builder("reduce", (), lanes)
    value = b.load(buffer("x", F32, 8), lanes[1])
    b.put(buffer("y", F32, 1), 0, b.reduce(SUM, lanes, value))
    assert run(b.program(), {"x": torch.ones(8)})["y"].item() == 32


def test_carry_without_lanes_and_a_loop_with_two_stops() -> None:
    size, k = Size("K", 8), Axis("k", index(100))
    b = Builder("power", (), ())
    acc = b.carry(f32(1.0))
    with b.loop(k, 100, size):
        b.update(acc, Op("mul", (acc, f32(2.0))))
    b.put(buffer("y", F32, 1), 0, acc)
    assert run(b.program(size), {}, {size: 5})["y"].item() == 32


# -- scalar operations ---------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -3.5, 1e-4, 30.0, -30.0, 1e30]
NOT_FINITE = [float("inf"), -float("inf"), float("nan")]
SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TORCH_OPS = {
    "e2m1": lambda code: torch.where(code.long() & 8 > 0, -1, 1) * SIZES[code.long() & 7],
    **dict.fromkeys(COARSE_TERMS, torch.mul),
    "hits": torch.eq,
    "until": torch.le,
    "member": lambda s, begin, end: (begin <= s) & (s < end),
    "div": torch.true_divide,
    "floordiv": torch.floor_divide,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "ndtr": torch.special.ndtr,
    **{name: lambda a, to=to: narrowed(a, to).to(a.dtype) for to, name in ROUND.items()},
    "nonzero": lambda a: a,
    "within": lambda k, n: k,
    "probability": lambda a: a,
    "random": lambda seeds, indices: torch.cat(
        [
            torch.from_numpy(random_bits(int(s), [int(i)]))
            for s, i in zip(seeds, indices, strict=True)
        ]
    ),
}


def has(name: str, dtype: DType) -> bool:
    """True if the printer's table has this operation on this type."""
    try:
        template(name, dtype, approximate=False)
    except InternalError:
        return False
    return True


def operands(name: str, dtype: DType) -> list[torch.Tensor]:
    """Return 256 values for each argument, special ones in front."""
    arity = SCALAR_OPS[name].arity
    if dtype is BOOL:
        bits = torch.arange(256)
        return [(bits & 1).bool(), (bits & 2).bool()][:arity]
    generator = torch.Generator().manual_seed(len(name))
    if dtype.is_float:
        columns = [torch.randn(256, generator=generator, dtype=torch.float64) * 2 for _ in range(2)]
        special = torch.tensor([*SPECIAL, *NOT_FINITE], dtype=torch.float64)
        columns[0][: len(special)] = special
        if name in ("shl", "shr"):
            columns[1] = columns[1].abs()
        return [c.to(TORCH_TYPES[dtype.name]) for c in columns[:arity]]
    columns = [torch.randint(-100, 100, (256,), generator=generator) for _ in range(3)]
    if name in ("shl", "shr", "pow"):
        columns[1] = columns[1].abs() % 5
    if name == "random":
        columns = [columns[0] << 30, torch.arange(256) + (columns[1].abs() << 33)]
    columns[1][columns[1] == 0] = 7
    return [c.to(TORCH_TYPES[dtype.name]) for c in columns[:arity]]


def pointwise(name: str, dtype: DType, *, second: Const | None = None) -> Program:
    """Return y[i] = op(a[i], b[i]), or with a constant for the second operand."""
    lane = Axis("i", index(256))
    b = Builder("pointwise", (), (lane,))
    args = [b.load(buffer(n, dtype, 256), lane) for n in "abc"[: SCALAR_OPS[name].arity]]
    if second is not None:
        args[1] = second
    result = b.op(name, *args)
    b.put(buffer("y", result.dtype, 256), lane, result)
    return b.program()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, t) for n in SCALAR_OPS for t in (F32, F64, I32, I64, U8, BOOL) if has(n, t)],
    ids=str,
)
def test_scalar_operation_agrees_with_program_and_torch(name: str, dtype: DType) -> None:
    values = operands(name, dtype)
    y = run(pointwise(name, dtype), dict(zip("abc", values, strict=False)))["y"]
    reference = TORCH_OPS.get(name) or getattr(torch, name)
    expected = reference(*values).to(y.dtype)
    atol = 6e-8 if name == "ndtr" else 1e-30  # 1 + erf cancels, as each CPU's erf rounds it
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=atol, equal_nan=True)


def test_every_scalar_operation_has_a_row() -> None:
    assert ROWS.keys() == SCALAR_OPS.keys()


@pytest.mark.parametrize("dtype", [F32, F64, I64], ids=str)
@pytest.mark.parametrize("name", ["mul", "maximum", "remainder"])
def test_constant_operand_keeps_its_precision(name: str, dtype: DType) -> None:
    second = Const(0.1 if dtype.is_float else 3, dtype)
    run(pointwise(name, dtype, second=second), {"a": operands(name, dtype)[0]})


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["exp", "mul", "lt"])
def test_16_bit_operation_is_computed_in_f32(name: str, dtype: DType) -> None:
    values = [v[20:].repeat(2)[:256] for v in operands(name, dtype)]
    y = run(pointwise(name, dtype), dict(zip("abc", values, strict=False)))["y"]
    expected = getattr(torch, name)(*(v.float() for v in values))
    assert torch.equal(y, expected.to(y.dtype))


@pytest.mark.parametrize("source", [F32, BF16, I64, U8, I8, BOOL], ids=str)
@pytest.mark.parametrize("target", [F64, F32, BF16, F16, I64, I32, U8, BOOL], ids=str)
def test_casts(source: DType, target: DType) -> None:
    lane = Axis("i", index(16))
    b = Builder("cast", (), (lane,))
    b.put(buffer("y", target, 16), lane, b.cast(b.load(buffer("x", source, 16), lane), target))
    x = (torch.arange(16) * 1.37).to(TORCH_TYPES[source.name])
    y = run(b.program(), {"x": x})["y"]
    assert torch.equal(y, x.to(y.dtype))


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16, I64, U8, BOOL], ids=str)
def test_constants_are_stored_selected_and_reduced(dtype: DType) -> None:
    c = Axis("c", index(8))
    b = Builder("constants", (), (c,))
    one, zero = Const(1, dtype), Const(0, dtype)
    b.put(buffer("stored", dtype, 8), c, one)
    even = b.op("eq", b.op("and", b.position(c), Const(1, I64)), Const(0, I64))
    b.put(buffer("selected", dtype, 8), c, b.select(even, one, zero))
    b.put(buffer("reduced", dtype, 1), 0, b.reduce(MAX, (c,), one))
    written = run(b.program(), {})
    assert written["stored"].tolist() == [1] * 8
    assert written["selected"].tolist() == [1, 0] * 4
    assert written["reduced"].tolist() == [1]


@pytest.mark.parametrize(
    ("name", "relative", "absolute"),
    [
        ("erf", 0, 1.5e-6),
        ("ndtr", 2e-5, 2e-9),
        ("exp", 1e-5, 0),
        ("tanh", 1e-5, 0),
        ("sigmoid", 1e-5, 1e-37),
        ("div", 3e-7, 0),
    ],
)
def test_cheap_form_is_within_its_bound(name: str, relative: float, absolute: float) -> None:
    program = pointwise(name, F32)
    source = print_kernel(replace(form_of(program), approximate=named_values(program)))
    assert source != print_kernel(form_of(program))
    spread = torch.cat([torch.linspace(-90, 85, 100), torch.linspace(-6, 6, 100)])
    small = torch.logspace(-8, 0, 53)
    special = torch.tensor([0.0, float("inf"), -float("inf")])
    x = torch.cat([spread, small, special])
    args = [x, torch.linspace(1, 3, 256)][: SCALAR_OPS[name].arity]
    y = torch.zeros(256)
    interpret(source, program.name, (1, 1, 1), [*args, y])
    expected = (TORCH_OPS.get(name) or getattr(torch, name))(*(a.double() for a in args))
    torch.testing.assert_close(y.double(), expected, rtol=relative, atol=absolute)


# -- text ----------------------------------------------------------------------------------------


def test_kernel_text() -> None:
    program = programs.relu_chain(BF16, 4096, 1024, masked=False)
    assert print_kernel(form_of(program)).splitlines()[3:] == [
        "",
        "@triton.jit",
        "def relu_chain(x, y):",
        "    io = tl.program_id(0)",
        "    ii = tl.arange(0, 1024)",
        *[f"    {line}" for line in _body_of_relu_chain(program)],
    ]


def _body_of_relu_chain(program: Program) -> list[str]:
    v = [s.var.name for s in program.body if hasattr(s, "var")]
    return [
        f"{v[0]} = tl.load(x + io * 1024 + ii)",
        f"{v[1]} = {v[0]}.to(tl.float32)",
        f"{v[2]} = tl.maximum({v[1]}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        f"{v[3]} = {v[2]} * 0.5",
        f"{v[4]} = {v[3]} + 1.0",
        f"{v[5]} = {v[4]}.to(tl.bfloat16)",
        f"tl.store(y + io * 1024 + ii, {v[5]})",
    ]


def test_comments_hold_whatever_a_source_line_holds() -> None:
    program = Program(
        "k", (), (), (), (), (), (), ("y[m] = x[m]\n\tprint('no')",), ("a\u2028b\x00.py:1",)
    )
    assert "# y[m] = x[m]  print('no')\n# a b .py:1\n@triton.jit" in print_kernel(form_of(program))


def test_names_are_made_unique_and_legal() -> None:
    c = Axis("x", index(4))
    b = Builder("k", (), (c,))
    b.put(buffer("for", F32, 4), c, b.load(buffer("x", F32, 4), c))
    program = b.program()
    assert tuple(signature(form_of(program))) == ("x", "for_1")
    run(program, {"x": torch.ones(4)})


def test_large_buffers_are_addressed_in_64_bits() -> None:
    m, c = Axis("m", index(2**21)), Axis("c", index(2048))
    b = Builder("k", (m,), (c,))
    b.put(buffer("y", F32, 2**21, 2048), index(m) * 2048 + c, f32(0.0))
    assert "tl.store(y + m.to(tl.int64) * 2048 + c, 0.0)" in print_kernel(form_of(b.program()))
    small = Builder("k", (Axis("m", index(2**20)),), (c,))
    small.put(buffer("y", F32, 2**20, 2048), index(small.grid[0]) * 2048 + c, f32(0.0))
    assert "tl.store(y + m * 2048 + c, 0.0)" in print_kernel(form_of(small.program()))


def test_mask_positions_stay_in_32_bits() -> None:
    size = Size("N", 64)
    outer, lane, i = tiled("i", size, 64)
    b = Builder("k", (outer,), (lane,))
    inside = b.op("lt", b.position(i), b.position(size))
    b.put(buffer("y", F32, size), i, f32(0.0), inside)
    source = print_kernel(form_of(b.program(size)))
    assert "int64" not in source.replace("io.to(tl.int64) * 64 + ii, 0", "")


def test_signature_names_types_and_multiples_of_16() -> None:
    program = programs.layer_norm(Size("M", 8192), 256)
    assert signature(form_of(program)) == {
        "x": "*bf16",
        "r": "*bf16",
        "w": "*bf16",
        "b": "*bf16",
        "xr": "*bf16",
        "y": "*bf16",
        "M": "i32",
    }
    assert divisible_by_16(program) == (0, 1, 2, 3, 4, 5, 6)
    assert divisible_by_16(programs.layer_norm(Size("M", 7), 256)) == (0, 1, 2, 3, 4, 5)


def test_scratch_arrays_are_refused() -> None:
    array = buffer("a", F32, 4)
    program = Program("k", (), (), (), (), (), (Scratch(array, index(4)),))
    with pytest.raises(InternalError, match="Scratch"):
        print_kernel(form_of(program))


def test_operation_without_meaning_is_refused() -> None:
    with pytest.raises(InternalError, match="no exp of i32"):
        print_kernel(form_of(pointwise("exp", I32)))


def test_prod_reduction_prints_its_function_once() -> None:
    c = Axis("c", index(8))
    b = Builder("k", (), (c,))
    x = b.load(buffer("x", F32, 8), c)
    for n in range(2):
        b.put(buffer("y", F32, 2), n, b.let(Reduce(PROD, (c,), x)))
    assert print_kernel(form_of(b.program())).count("def _prod(a, b):") == 1


def test_a_launch_that_overlaps_waits_before_all_else() -> None:
    """Persistent programs wait once, and those of a table before they load their row."""
    program = replace(programs.layer_norm(8, 256), dependent=True)
    for changes in ({}, {"programs": 4}, {"table": True}):
        lines = print_kernel(form_of(replace(program, **changes))).splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith("def layer_norm(")) + 1
        assert lines[at : at + 2] == ["    gdc_wait()", "    gdc_launch_dependents()"]
        assert "from triton.language.extra.cuda import gdc_wait, gdc_launch_dependents" in lines
    assert "gdc" not in print_kernel(form_of(programs.layer_norm(8, 256)))
