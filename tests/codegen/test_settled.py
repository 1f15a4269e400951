"""The part of a loop in which a mask by index is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tests.triton_backend  # noqa: F401 (registers the backends)
from fusec.codegen.lowering.band import loop_bounds, mask_free_part
from fusec.ir.dtype import F32, I32
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, Load, Op, Reduce, Select
from fusec.ir.index import Axis, index
from fusec.ir.monoid import MAX
from fusec.ir.strides import contiguous_strides
from tests.codegen.test_contraction_static import staged, tensors
from tests.support import check, values

ROWS, KEYS = 128, 64


class _Tile:
    """Scores of a tile of rows, ``m = mo*128 + mi``, and keys, ``n = no*64 + ni``."""

    def __init__(self) -> None:
        self.mo, self.no = Axis("mo", index(8)), Axis("no", index(16))
        self.mi, self.ni = Axis("mi", index(ROWS)), Axis("ni", index(KEYS))
        self.m = index(self.mo) * ROWS + index(self.mi)
        self.n = index(self.no) * KEYS + index(self.ni)
        shape = (index(1024), index(1024))
        self.scores = Load(Buffer("s", shape, contiguous_strides(shape), F32), (self.m, self.n))
        self.lanes = frozenset((self.mi, self.ni))

    def compare(self, name: str, a, b) -> Expr:
        return Op(name, (IndexValue(a, I32), IndexValue(b, I32)))

    def top(self, condition: Expr) -> Reduce:
        hidden = Const(float("-inf"), F32)
        return Reduce(MAX, (self.ni,), Select(condition, self.scores, hidden))


def test_causal_keys_are_visible_in_tiles_wholly_before_the_first_row():
    t = _Tile()
    mask = t.compare("le", t.n, t.m)
    top = t.top(mask)
    assert loop_bounds(t.no, [top], t.lanes) == (index(0), index(t.mo) * 2 + 2)
    part = mask_free_part(t.no, [top], t.lanes)
    assert part is not None
    assert (part.first, part.stop) == (None, index(t.mo) * 2)
    assert part.truth == {mask: True}


def test_what_depends_on_a_loop_inside_bounds_that_loop():
    t = _Tile()  # the loop over keys is around one over rows
    top = t.top(t.compare("le", t.n, t.m))
    assert mask_free_part(t.no, [top], t.lanes, {t.mo}) is None
    start, stop = loop_bounds(t.no, [top], t.lanes | {t.mo})
    assert (start, stop) == (index(0), index(16))  # the last row sees all


def test_causal_queries_see_all_keys_of_a_tile_from_some_tile_on():
    t = _Tile()  # keys are rows here, and the loop runs over queries
    top = t.top(t.compare("le", t.m, t.n))
    assert loop_bounds(t.no, [top], t.lanes) == (index(t.mo) * 2, None)
    part = mask_free_part(t.no, [top], t.lanes)
    assert part is not None
    assert (part.first, part.stop) == (index(t.mo) * 2 + 2, None)


def test_a_mask_spelled_as_what_it_hides_is_known_to_be_false():
    t = _Tile()
    hides = t.compare("gt", t.n, t.m)
    body = Select(hides, Const(float("-inf"), F32), t.scores)
    part = mask_free_part(t.no, [Reduce(MAX, (t.ni,), body)], t.lanes)
    assert part is not None and part.truth == {hides: False}


def test_a_band_of_two_edges_settles_nothing():
    t = _Tile()
    band = Op("and", (t.compare("le", t.n, t.m), t.compare("lt", t.m - t.n, index(100))))
    assert mask_free_part(t.no, [t.top(band)], t.lanes) is None


def test_two_masks_on_the_same_side_settle_nothing_unless_they_are_one():
    t = _Tile()
    one, other = t.compare("le", t.n, t.m), t.compare("lt", t.n, index(300))
    assert mask_free_part(t.no, [t.top(one), t.top(other)], t.lanes) is None
    assert mask_free_part(t.no, [t.top(one), t.top(one)], t.lanes) is not None


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_tiles_inside_a_causal_mask_do_not_compare():
    (one,) = staged(causal, *tensors(*[(8, 16, 1024, 64)] * 3))
    assert one.compiled is not None
    (source,) = one.compiled.sources.values()
    clear, masked = source.split("for no in")[1:]
    assert "<=" not in clear and "<=" in masked


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", (128, 200, 257))
def test_values_and_gradients_across_the_edge_of_a_mask(length: int):
    q, k, v = (values(1, 2, length, 16, seed=s) for s in range(3))
    check(causal, q, k, v, backend="triton_fused", train=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keys", (100, 300))
@pytest.mark.parametrize("shift", (70, -150))
def test_values_of_queries_that_begin_later_than_keys_or_earlier(keys: int, shift: int):
    q, k, v = (values(1, 1, n, 16, seed=s) for s, n in enumerate((200, keys, keys)))

    def attention(q, k, v):
        rows, columns = torch.arange(200)[:, None], torch.arange(keys)
        scores = (q @ k.mT * 0.25).masked_fill(columns > rows + shift, float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp_min(-1e9)  # of rows that see no key, finite
        weights = torch.exp(scores - top)
        return weights @ v / (weights.sum(-1, keepdim=True) + 1)

    check(attention, q, k, v, backend="triton_fused")


def test_the_longest_rows_of_a_causal_attention_run_first():
    (one,) = staged(causal, *tensors(*[(8, 16, 1024, 64)] * 3))
    assert one.compiled is not None
    (source,) = one.compiled.sources.values()
    assert "i2o = 15 - tl.program_id(0)" in source  # of 16 tiles of 64 rows
