"""Where loops over masked scores begin and end: all tiles that count, and no other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import fusec
from fusec.codegen.lowering.band import loop_bounds
from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, Load, Op, Reduce, Select, substitute
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.program import For
from fusec.ir.strides import contiguous_strides
from fusec.tools.report.observe import observe
from tests.support import FUSED, check, values
from tests.triton_backend import gpu_pipeline

ROWS, KEYS, TILES = 32, 16, 12
"""Rows and keys of a tile; tiles of rows, and of keys."""

Compared = tuple[str, Index, Index]
Condition = Callable[[Index, Index], Compared]

CONDITIONS: dict[str, Condition] = {
    "causal": lambda m, n: ("ge", m, n),
    "strictly causal": lambda m, n: ("gt", m, n),
    "causal with a longer past": lambda m, n: ("le", n, m + 37),
    "causal with a shorter past": lambda m, n: ("le", n + 37, m),
    "window": lambda m, n: ("lt", m - n, index(40)),
    "later keys": lambda m, n: ("le", m, n),
    "later keys, shifted": lambda m, n: ("lt", m + 50, n),
    "prefix": lambda m, n: ("lt", n, index(45)),
    "all but a prefix": lambda m, n: ("ge", n, index(45)),
    "two keys a row": lambda m, n: ("le", n, m * 2 + 3),
    "two rows a key": lambda m, n: ("le", n * 2, m + 5),
    "nothing": lambda m, n: ("lt", n, index(0)),
    "late and backwards": lambda m, n: ("ge", n + m, index(100)),
    "falling": lambda m, n: ("le", n + m, index(100)),
}
HOLDS: dict[str, Callable[[int, int], bool]] = {
    "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
}


class _Tiles:
    """Axes of tiles of scores, and the bounds of the loop over keys under a condition."""

    def __init__(self) -> None:
        self.mo, self.mi = Axis("mo", index(TILES)), Axis("mi", index(ROWS))
        self.no, self.ni = Axis("no", index(TILES)), Axis("ni", index(KEYS))
        self.m = index(self.mo) * ROWS + index(self.mi)
        self.n = index(self.no) * KEYS + index(self.ni)

    def compared(self, condition: Condition) -> Expr:
        name, a, b = condition(self.m, self.n)
        return Op(name, (IndexValue(a), IndexValue(b)))

    def scores(self) -> Expr:
        shape = (index(TILES * ROWS), index(TILES * KEYS))
        buffer = Buffer("s", shape, contiguous_strides(shape), F32)
        return Load(buffer, (self.m, self.n))

    def visited(self, reduction: Reduce, row: int) -> range:
        start, stop = loop_bounds(self.no, [reduction], frozenset((self.mi, self.ni)))
        here = {self.mo: index(row)}
        first = substitute(start, here).const
        last = TILES if stop is None else substitute(stop, here).const
        return range(max(first, 0), min(last, TILES))

    def counting(self, condition: Condition, row: int) -> set[int]:
        """Return the tiles of keys in which some score counts, by trying each."""

        def counts(mi: int, no: int, ni: int) -> bool:
            name, a, b = condition(index(row * ROWS + mi), index(no * KEYS + ni))
            return HOLDS[name](a.const, b.const)

        return {
            no
            for no in range(TILES)
            if any(counts(mi, no, ni) for mi in range(ROWS) for ni in range(KEYS))
        }


@pytest.mark.sampled(17)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("monoid", (MAX, SUM), ids=("maximum", "sum"))
def test_a_loop_visits_the_tiles_that_count_and_no_other(condition, monoid):
    tiles = _Tiles()
    keep = tiles.compared(CONDITIONS[condition])
    hidden = Select(keep, tiles.scores(), Const(float("-inf"), F32))
    body = hidden if monoid is MAX else Op("exp", (hidden,))
    reduction = Reduce(monoid, (tiles.no, tiles.ni), body)
    for row in range(TILES):
        assert set(tiles.visited(reduction, row)) == tiles.counting(CONDITIONS[condition], row)


def test_what_two_reductions_skip_both_is_skipped():
    tiles = _Tiles()
    causal, window = (tiles.compared(CONDITIONS[name]) for name in ("causal", "window"))
    lowest = Const(float("-inf"), F32)
    one = Select(causal, tiles.scores(), lowest)
    both = Select(window, one, lowest)
    lanes, over = frozenset((tiles.mi, tiles.ni)), (tiles.no, tiles.ni)
    start, stop = loop_bounds(tiles.no, [Reduce(MAX, over, e) for e in (one, both)], lanes)
    assert start is index(0) and stop is not None


def _window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    row, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    scores = torch.where((row >= key) & (row - key < 40), q @ k.mT * 0.25, float("-inf"))
    return torch.softmax(scores, -1) @ v


def test_a_window_of_keys_is_visited_from_its_first_tile_to_its_last():
    q, k, v = (values(1, 256, 16, seed=s) for s in range(3))
    check(_window, q, k, v, backend="triton_fused")
    (stage,) = observe(_window, (q, k, v))
    ((_, program),) = gpu_pipeline(stage.graph, "g", race="fused").programs.items()
    (loop,) = (s for s in program.body if isinstance(s, For))
    assert loop.start is not index(0) and len(loop.stops) == 2


@pytest.mark.parametrize("lengths", [(33, 33), (100, 65), (65, 100)])
@pytest.mark.parametrize("window", [20, 64])
def test_a_window_without_an_end_trains(lengths: tuple[int, int], window: int) -> None:
    """A loop's part behind its whole tiles begins where the band does, which rows of tiles move."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        row, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        scores = (q @ k.mT * 0.25).masked_fill(key <= row - window, float("-inf"))
        return torch.softmax(scores, -1) @ v

    rows, keys = lengths
    given = values(3, rows, 16), values(3, keys, 16, seed=1), values(3, keys, 16, seed=2)
    check(attention, *given, backend=FUSED, train=True)


def _padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    row, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    return torch.softmax(torch.where((row >= key) & real, q @ k.mT * 0.25, float("-inf")), -1) @ v


def _sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    row, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = (row >= key) & ((row - key < 5) | (key < 2))
    return torch.softmax(torch.where(seen, q @ k.mT * 0.25, float("-inf")), -1) @ v


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attention", (_padded, _sinks))
def test_inside_an_edge_all_else_that_a_condition_says_is_asked(attention: Callable):
    q, k, v = (values(1, 192, 16, seed=s) for s in range(3))
    real = torch.arange(192) % 3 == 0
    check(attention, q, k, v, real, backend=FUSED)


# -- loops that change nothing ---------------------------------------------------------------------


def _sums_where(used: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.where(used[:, None], x, 0.0) * torch.where(used[:, None], w, 0.0)).sum(1)


def _sums_of_masked(used: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.where(used[:, None], x, 0.0) * w).sum(1)


@pytest.mark.parametrize("fn", [_sums_where, _sums_of_masked])
def test_rows_whose_terms_are_all_zero_have_no_iterations(fn: Callable) -> None:
    used, x, w = torch.tensor([True, False, True]), torch.randn(3, 500), torch.randn(3, 500)
    x[1, 7], w[1, 3] = math.inf, math.nan
    compiled = torch.compile(fn, backend="fusec", options={"strict": True})
    torch.testing.assert_close(compiled(used, x, w), fn(used, x, w), equal_nan=True)
    (kernel,) = fusec.kernels(fn, used, x, w)
    skipped = "_end = fusec_least(" in kernel.source
    assert skipped == (fn is _sums_where)  # 0 * NaN is NaN: the other has to add its terms
