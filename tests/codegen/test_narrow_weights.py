"""Products whose weights are narrower than what they are multiplied as: integers, 16-bit floats.

Each is converted as it is read, in the product's kernel.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.processors import PROCESSORS
from tests.support import BACKEND, compile_with, on_processor, seeded
from tests.support import check as check_beside_eager

TERMS, COLUMNS = 96, 64


def linear(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.to(x.dtype)) * scale


def operands(
    rows: int, dtype: torch.dtype, *, columns: int = COLUMNS, terms: int = TERMS
) -> tuple[torch.Tensor, ...]:
    with seeded(rows):
        w = torch.randint(-128, 128, (columns, terms), dtype=torch.int8)
        return torch.randn(rows, terms, dtype=dtype), w, torch.rand(columns, dtype=dtype)


def check(call: object, *args: torch.Tensor) -> None:
    """Compare a compiled call with eager, by their errors against fp64."""
    torch._dynamo.reset()
    ours, theirs = compile_with(call)(*args), call(*args)  # type: ignore[operator]
    exact = call(*(a.double() if a.is_floating_point() else a for a in args))  # type: ignore[operator]
    assert ours.dtype is theirs.dtype
    error, least = ((made - exact).abs().max().item() for made in (ours, theirs))
    assert error <= 2 * least + 1e-6 * exact.abs().max().item()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 12, 13, 14, 16, 17, 33, 128, 256, 300])
def test_any_number_of_rows_is_as_exact_as_eager(rows: int) -> None:
    check(linear, *operands(rows, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_other_types_are_as_exact_as_eager(rows: int, dtype: torch.dtype) -> None:
    check(linear, *operands(rows, dtype))


@pytest.mark.parametrize(("columns", "terms"), [(1, 96), (3, 7), (130, 33), (61, 1000)])
@pytest.mark.parametrize("rows", [1, 4, 16, 20])
def test_ragged_sizes_are_as_exact_as_eager(rows: int, columns: int, terms: int) -> None:
    check(linear, *operands(rows, torch.bfloat16, columns=columns, terms=terms))


def test_operands_of_16_bits_are_multiplied_as_they_lie_in_memory() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ v

    heads = [torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    made = fusec.kernels(attention, *heads, train=True, target="cpu:avx2")
    products = [kernel.source for kernel in made if "multiply" in kernel.source]
    assert len(products) == 2
    assert all("multiply_bf16" in source for source in products)


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_weights_are_read_as_integers(rows: int) -> None:
    torch._dynamo.reset()
    *_, kernel = fusec.kernels(linear, *operands(rows, torch.bfloat16, columns=256), target=AVX2)
    assert "ld_i8" in kernel.source
    assert "round_bf16(f32(" not in kernel.notation
    (graph,) = fusec.explain(
        linear, *operands(rows, torch.bfloat16, columns=256), target=AVX2
    ).graphs
    assert not graph.externs


@pytest.mark.parametrize("rows", [4, 16])
def test_blocks_of_rows_share_a_conversion(rows: int) -> None:
    torch._dynamo.reset()
    *_, kernel = fusec.kernels(linear, *operands(rows, torch.bfloat16, terms=512), target=AVX2)
    assert 0 < kernel.source.count("ld_i8(") < kernel.source.count("f_hsum(")


def grouped(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Two weights in a byte, and a scale for each group of 32 terms of a column."""
    codes = torch.stack([w & 15, w >> 4], -1).to(torch.int8) - 8
    weights = codes.view(*scale.shape, -1).to(x.dtype) * scale[..., None]
    return F.linear(x, weights.flatten(1))


def of_groups(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    with seeded(rows):
        w = torch.randint(0, 256, (COLUMNS, 64), dtype=torch.uint8)
        return torch.randn(rows, 128, dtype=dtype), w, torch.rand(COLUMNS, 4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 4, 15, 16, 17, 33, 128, 200])
def test_weights_of_groups_are_as_exact_as_eager(rows: int, dtype: torch.dtype) -> None:
    check(grouped, *of_groups(rows, dtype))


@pytest.mark.parametrize("target", ["cpu:amx", "cpu:avx512", "cpu:avx2"])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_weights_are_not_rounded_but_where_the_user_does(rows: int, target: str) -> None:
    """Else scales could not leave the sums of groups: 0.79 instead of 2.0 ms, one row of 4096."""

    def rounding(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        codes = (torch.stack([w & 15, w >> 4], -1).int() - 8).view(*scale.shape, -1)
        return F.linear(x, (codes * scale.float()[..., None]).to(x.dtype).flatten(1))

    for call, rounds in ((grouped, False), (rounding, True)):
        torch._dynamo.reset()
        kernels = fusec.kernels(call, *of_groups(rows), target=target)
        assert any("round_bf16(f32(" in kernel.notation for kernel in kernels) is rounds


@pytest.mark.parametrize("target", ["cpu:amx", "cpu:avx512"])
def test_tiles_of_bf16_multiply_the_integers_of_groups(target: str) -> None:
    torch._dynamo.reset()
    *_, kernel = fusec.kernels(grouped, *of_groups(32), target=target)
    made = [kernel.source.count(f"f_multiply{which}(") for which in ("_bf16", "")]
    assert made == ([1, 0] if target == "cpu:amx" else [0, 1])


@pytest.mark.parametrize("terms", [32, 48])
@pytest.mark.parametrize("target", ["cpu:amx", "cpu:avx2"])
def test_both_weights_of_a_byte_are_stored_side_by_side(target: str, terms: int) -> None:
    """Where a group's bytes are whole vectors; each byte is read once, and no weight is chosen."""
    with seeded(terms):
        w = torch.randint(0, 256, (COLUMNS, 2 * terms), dtype=torch.uint8)
        x, scale = torch.randn(32, 4 * terms).bfloat16(), torch.rand(COLUMNS, 4).bfloat16()
    torch._dynamo.reset()
    *_, kernel = fusec.kernels(grouped, x, w, scale, target=target)
    whole = terms // 2 % (16 if target == "cpu:amx" else 8) == 0
    assert ("stp_" in kernel.source) is whole
    assert ("f_select(" in kernel.source) is not whole
    assert "ldi_u8" not in kernel.source
    check(grouped, x, w, scale)


@pytest.mark.parametrize("terms", [32, 24])
def test_a_product_of_bytes_beside_a_sum_of_its_rows(terms: int) -> None:
    """Columns run inside, beside the axes of the sums: they are stored, not summed."""

    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.stack([w & 15, w >> 4], -1).to(x.dtype)
        return F.linear(x, codes.flatten(1)), (x.view(17, terms, 2) * codes[0]).sum((-1, -2))

    with seeded(terms):
        w = torch.randint(0, 256, (33, terms), dtype=torch.uint8)
        x = torch.randn(17, 2 * terms)
    torch._dynamo.reset()
    made = torch.compile(both, backend="fusec", options={"strict": True})(x, w)
    for ours, exact in zip(made, both(x.double(), w), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", ["cpu:amx", "cpu:avx2"])
def test_rows_are_quantised_once(target: str) -> None:
    """Each tile of columns would compute them again (128 x 4096 x 4096: 18.9 ms for 16.6)."""

    def dynamic(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(1, keepdim=True).float() / 127
        codes = (x / step).round().to(torch.int8)
        return F.gelu((torch._int_mm(codes, w.t()) * step * scale).to(x.dtype))

    torch._dynamo.reset()
    given = operands(128, torch.bfloat16, columns=2048, terms=2048)
    *_, product = fusec.kernels(dynamic, *given, target=target)
    assert "f_multiply_i8(" in product.source and "round(" not in product.notation


@pytest.mark.parametrize("target", ["cpu:amx", "cpu:avx2"])
def test_products_of_groups_share_a_kernel_with_the_rows_that_they_read(target: str) -> None:
    """Columns are then a loop inside a row: no axis of a sum, and none that a sum has lost."""

    def gated(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = F.rms_norm(x, x.shape[-1:])
        return F.silu(grouped(rows, w, scale)) * grouped(rows, w.flip(0), scale)

    torch._dynamo.reset()
    given = of_groups(31)
    kernels = fusec.kernels(gated, *given, target=target)
    assert all(kernel.source for kernel in kernels)
    check(gated, *given)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("target", ["cpu:amx", "cpu:avx512"])
def test_a_vector_of_rows_is_multiplied_by_tiles_of_bf16(rows: int, target: str) -> None:
    torch._dynamo.reset()
    *_, kernel = fusec.kernels(linear, *operands(rows, torch.bfloat16), target=target)
    assert ("f_multiply_bf16(" in kernel.source) is (target == "cpu:amx")
    assert ("f_multiply(" in kernel.source) is (target != "cpu:amx" and rows > 16)


@pytest.mark.parametrize(("rows", "scattered"), [(16, True), (17, False), (128, False)])
def test_columns_are_in_the_lanes_where_rows_are_many(rows: int, scattered: bool) -> None:
    """A product packs what is in the lanes. Few rows cost less, but their stores are scattered."""
    torch._dynamo.reset()
    given = operands(rows, torch.bfloat16, columns=4096, terms=1024)
    *_, kernel = fusec.kernels(linear, *given, target="cpu:amx")
    assert ("stg" in kernel.source) is scattered
    check(linear, *given)


def test_a_gate_of_two_products_is_as_exact_as_eager() -> None:
    def gated(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, w.to(x.dtype))) * F.linear(x, v.to(x.dtype))

    x, w, _ = operands(16, torch.bfloat16)
    check(gated, x * 0.01, w, w.flip(0))


def test_nan_and_infinity_reach_their_rows_alone() -> None:
    x, w, scale = operands(16, torch.bfloat16)
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    torch._dynamo.reset()
    ours, theirs = compile_with(linear)(x, w, scale), linear(x, w, scale)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())


def test_weights_that_are_no_rows_in_memory_are_as_exact_as_eager() -> None:
    x, w, scale = operands(16, torch.bfloat16, columns=96, terms=96)
    check(linear, x, w.t(), scale)
    check(linear, x[::2], w, scale)


def test_no_rows_make_no_result() -> None:
    torch._dynamo.reset()
    x, w, scale = operands(0, torch.bfloat16)
    assert compile_with(linear)(x, w, scale).shape == (0, COLUMNS)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_for_each_matrix_of_a_batch_converts_it_as_it_reads_it(*, transposed: bool) -> None:
    def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, (w.transpose(1, 2) if transposed else w).to(x.dtype))

    x, w, _ = operands(1, torch.bfloat16, columns=3 * TERMS)
    x, w = x.expand(3, 1, TERMS) / 16, w.view(3, TERMS, TERMS)
    (graph,) = fusec.explain(batched, x, w).graphs
    assert not graph.externs
    check(batched, x, w)


# -- floats of 16 bits, where the library has no instructions for them ----------------------------

AVX2 = "cpu:avx2"
HALF = (torch.bfloat16, torch.float16)
fusec_alone = pytest.mark.skipif(BACKEND != "fusec", reason="asks for another processor's code")
SPELLED = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with a bias": lambda x, w: F.linear(x, w, w[:, 0]),
    "mm": lambda x, w: torch.mm(x, w.t()),
    "addmm": lambda x, w: torch.addmm(w[:, 1], x, w.t(), alpha=0.5),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(w[:, 0], x[None], w.t()[None])[0],
    "an epilogue": lambda x, w: F.gelu(F.linear(x, w, w[:, 0])) + x[:, :1],
    "a computed row": lambda x, w: F.linear(F.silu(x) * x, w),
    "a gate": lambda x, w: F.silu(F.linear(x, w)) * F.linear(x, w.flip(1)),
    "rows of a batch": lambda x, w: F.linear(x[None].expand(2, -1, -1), w),
}


def floats(
    rows: int, dtype: torch.dtype, *, columns: int = 160, terms: int = 96
) -> tuple[torch.Tensor, torch.Tensor]:
    with seeded(rows):
        x, w = torch.randn(rows, terms), torch.randn(columns, terms) / terms**0.5
        return x.to(dtype), w.to(dtype)


def strided(w: torch.Tensor) -> torch.Tensor:
    """Return the matrix with its columns, not its terms, side by side in memory."""
    return w.t().contiguous().t()


@fusec_alone
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 16, 17, 40, 128])
def test_16_bits_are_as_exact_as_eager(rows: int, dtype: torch.dtype) -> None:
    x, w = floats(rows, dtype)
    with on_processor(PROCESSORS[AVX2].features):
        check_beside_eager(SPELLED["an epilogue"], x, w)
        check_beside_eager(SPELLED["linear"], x, strided(w))


@fusec_alone
@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize("rows", [3, 16, 20])
def test_each_spelling_is_as_exact_as_eager(name: str, rows: int) -> None:
    with on_processor(PROCESSORS[AVX2].features):
        check_beside_eager(SPELLED[name], *floats(rows, torch.bfloat16), train=rows == 16)


@fusec_alone
@pytest.mark.parametrize(("columns", "terms"), [(130, 33), (61, 100), (97, 1)])
def test_ragged_16_bits_are_as_exact_as_eager(columns: int, terms: int) -> None:
    with on_processor(PROCESSORS[AVX2].features):
        for rows in (4, 16, 20):
            x, w = floats(rows, torch.bfloat16, columns=columns, terms=terms)
            check_beside_eager(SPELLED["linear"], x, w)
            check_beside_eager(SPELLED["linear"], x, strided(w))


@fusec_alone
def test_any_number_of_rows_of_16_bits() -> None:
    x, w = floats(20, torch.bfloat16)
    more = [(x[:3], w), (x[:0], w), (torch.cat([x] * 20), w)]
    with on_processor(PROCESSORS[AVX2].features):
        check_beside_eager(lambda x, w: F.linear(x, w).relu(), x, w, more=more, dynamic=True)


@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize("rows", [16, 20])
def test_16_bits_are_widened_where_they_are_multiplied(name: str, rows: int) -> None:
    x, w = floats(rows, torch.bfloat16, terms=512)
    for weights in (w, strided(w)):
        (graph,) = fusec.explain(SPELLED[name], x, weights, target=AVX2).graphs
        assert not graph.externs


def test_a_library_with_instructions_for_16_bits_multiplies() -> None:
    x, w = floats(20, torch.bfloat16, terms=512)
    (graph,) = fusec.explain(F.linear, x, w, target="cpu:avx512").graphs
    assert graph.externs


@fusec_alone
@pytest.mark.parametrize("rows", [16, 20])
def test_nan_and_infinity_of_16_bits_reach_their_rows_alone(rows: int) -> None:
    x, w = floats(rows, torch.bfloat16)
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    torch._dynamo.reset()
    with on_processor(PROCESSORS[AVX2].features):
        ours, theirs = compile_with(F.linear)(x, w), F.linear(x, w)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())


# -- two integers in a byte ------------------------------------------------------------------------


def int4_linear(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A linear whose weights lie two in a byte, the earlier one in the lower half."""
    columns, groups = scale.shape
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(columns, -1).to(torch.int8) - 8
    weights = codes.view(columns, groups, -1).to(x.dtype) * scale[..., None]
    return F.linear(x, weights.reshape(columns, -1))


def int4_operands(
    rows: int, *, columns: int = 160, groups: int = 4, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    with seeded(rows):
        packed = torch.randint(0, 256, (columns, 16 * groups), dtype=torch.uint8)
        scale = torch.rand(columns, groups, dtype=dtype)
        return torch.randn(rows, 32 * groups, dtype=dtype), packed, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16, 128])
def test_weights_of_four_bits_are_as_exact_as_eager(rows: int, dtype: torch.dtype) -> None:
    check(int4_linear, *int4_operands(rows, dtype=dtype))


def test_a_group_s_scale_multiplies_its_sum() -> None:
    torch._dynamo.reset()
    (kernel,) = fusec.kernels(int4_linear, *int4_operands(1))
    innermost = kernel.source.split("for (")[-1].split("}")[0]
    assert "ld_u8(" in innermost and "__builtin_prefetch(" in innermost
    assert "lds_bf16(" not in innermost
    assert "f_field<15, 8>(" in innermost and "f_field<240, 8>(" in innermost
    assert not {"f_and(", "f_shr(", "to_f32("} & set(re.findall(r"\w+\(", innermost))
    assert "#pragma GCC unroll" in kernel.source.split("for (")[-2]


@pytest.mark.parametrize("scale", [0.0, torch.nan, 1e30])
def test_a_group_s_scale_of_any_size_is_eager_s(scale: float) -> None:
    x, packed, scales = int4_operands(1, dtype=torch.float32)
    scales[3, 1] = scale
    torch._dynamo.reset()
    ours, theirs = compile_with(int4_linear)(x, packed, scales), int4_linear(x, packed, scales)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_other_sums_multiply_each_term() -> None:
    """Squares of scaled gradients stay in range, though those of the gradients do not."""

    def squares(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x * scale).square().sum((0, 2))

    torch._dynamo.reset()
    x, scale = torch.full((5, 3, 70), 1e22), torch.full((3, 1), 1e-5)
    torch.testing.assert_close(compile_with(squares)(x, scale), squares(x, scale))


@pytest.mark.parametrize("rows", [2, 5, 8, 16])
def test_rows_share_the_conversion_of_a_byte(rows: int) -> None:
    torch._dynamo.reset()
    (kernel,) = fusec.kernels(int4_linear, *int4_operands(rows), target=AVX2)
    assert "f_multiply(" not in kernel.source
    assert 0 < kernel.source.count("ld_u8(") < kernel.source.count("f_hsum(")
    assert "f_select(" not in kernel.source  # the halves of a byte are terms of their own


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_computed_rows_are_stored_before_columns_read_them(rows: int) -> None:
    x, packed, scale = int4_operands(rows, columns=160)

    def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return int4_linear(F.silu(x) * y, packed, scale)

    torch._dynamo.reset()
    *before, kernel = fusec.kernels(gated, x, x)
    assert before
    assert "ld_u8(" in kernel.source
    assert "exp" not in kernel.source
    assert ("ldp_bf16<" in kernel.source) is (rows < 32)  # pairs, in a word each
    check(gated, x, x)


def test_zeros_and_scales_of_transposed_groups_are_as_exact_as_eager() -> None:
    def affine(
        x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> torch.Tensor:
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1, 32)
        weights = (codes - 8.0) * scale.t()[..., None] + zero.t()[..., None]
        return F.linear(x, weights.reshape(len(packed), -1).to(x.dtype))

    for rows in (1, 3, 16):
        x, packed, scale = int4_operands(rows, dtype=torch.float32)
        check(affine, x, packed, scale.t().contiguous(), scale.t().contiguous() / 16)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_zeros_that_are_subtracted_from_codes_are_as_exact_as_eager(rows: int) -> None:
    def shifted(
        x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> torch.Tensor:
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(*scale.shape, -1)
        weights = (codes.to(x.dtype) - zero[..., None]) * scale[..., None]
        return F.linear(x, weights.reshape(len(packed), -1))

    x, packed, scale = int4_operands(rows, dtype=torch.float32)
    check(shifted, x, packed, scale, scale * 15)


def test_rows_of_a_column_share_the_sum_beside_its_zero() -> None:
    """A group's zero multiplies the sum of x, which columns share: one addition for all of them."""

    def affine(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> object:
        weights = w.view(len(w), -1, 32).float() * scale[..., None] + zero[..., None]
        return F.linear(x, weights.view(w.shape))

    with seeded(0):
        x, w = torch.randn(1, 128), torch.randint(-128, 128, (64, 128), dtype=torch.int8)
        scale, zero = torch.rand(64, 4), torch.rand(64, 4)
    torch._dynamo.reset()
    (kernel,) = fusec.kernels(affine, x, w, scale, zero, target=AVX2)
    innermost = kernel.source.split("for (")[-1].split("}")[0]
    columns = innermost.count("ld_i8(")
    assert columns > 1
    assert len(re.findall(r"sum_acc\w* = \w+sum_acc\w* \+", innermost)) == columns + 1
    check(affine, x, w, scale, zero)


def test_nan_and_infinity_beside_a_zero_reach_their_rows_alone() -> None:
    """Infinities may be NaN: the sum of a group's rows times a scale and a zero has both signs."""

    def affine(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w.float() * scale[:, None] + scale[:, None])

    x, w, scale = operands(4, torch.float32)
    x[1, 5], x[2, 0] = torch.nan, torch.inf
    torch._dynamo.reset()
    ours, theirs = compile_with(affine)(x, w, scale), affine(x, w, scale)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert ours[1].isnan().all()


@pytest.mark.parametrize(("columns", "groups"), [(1, 1), (33, 3), (150, 9)])
def test_ragged_groups_of_four_bits_are_as_exact_as_eager(columns: int, groups: int) -> None:
    for rows in (1, 5):
        check(int4_linear, *int4_operands(rows, columns=columns, groups=groups))


@pytest.mark.parametrize("rows", [1, 16])
def test_a_byte_is_cut_where_it_is_read(rows: int) -> None:
    torch._dynamo.reset()
    (kernel,) = fusec.kernels(int4_linear, *int4_operands(rows))
    assert "ld_u8" in kernel.source
    assert "ldi_" not in kernel.source
    assert "to_i8" not in kernel.source


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 4, 13, 16, 64])
def test_the_packed_call_of_eager_is_as_exact(rows: int, dtype: torch.dtype) -> None:
    x, w, scale = operands(rows, dtype, columns=128)
    torch._dynamo.reset()
    (graph,) = fusec.explain(torch._weight_int8pack_mm, x, w, scale).graphs
    assert not graph.externs
    torch._dynamo.reset()
    ours = compile_with(torch._weight_int8pack_mm)(x, w, scale)
    theirs = torch._weight_int8pack_mm(x, w, scale)
    exact = (x.double() @ w.double().t()) * scale.double()
    error, least = ((made - exact).abs().max().item() for made in (ours, theirs))
    assert error <= 2 * least + 1e-6 * exact.abs().max().item()
