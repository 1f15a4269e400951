"""Regions around far larger intermediates run in chunks of rows, and compute what they did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusec.codegen.targets import find_target
from fusec.driver.stages import CLEAN
from fusec.ir.dtype import BF16, F32, I64, DType
from fusec.ir.expr import Buffer, Cast, Const, Expr, IndexValue, Load, Op, Reduce, cast
from fusec.ir.graph import Def, Extern, Graph, RowLoop, Schedule, View
from fusec.ir.index import Axis, Runtime, Size, index
from fusec.ir.machine import FusionTuning
from fusec.ir.monoid import MAX, SUM
from fusec.ir.text import print_schedule
from fusec.ir.verify import verify_graph, verify_schedule
from fusec.passes.fusion.fuse import separate
from fusec.passes.graph.chunk import chunk, chunk_rows, cut_loops
from fusec.passes.stage import fold
from fusec.tools.interpreter.graph import run_graph
from fusec.tools.interpreter.scalar import round_to
from tests.fuzz.pipeline import context
from tests.ir.graphs import buffer, graph, mm, whole
from tests.passes.pipelines import numbers

C, V, ROWS = 2, 24, 4


TUNING = FusionTuning(chunk_bytes=ROWS * V * 4, chunk_rows=1, chunk_alignment=1)


def library(node: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    if node.target == "aten.addmm_.default":
        total, a, b = args
        total += a @ b
        return []
    return [args[0] @ args[1]]


def clean(graph: Graph) -> Graph:
    return fold(CLEAN, graph, context(find_target("cpu")))


class Head:
    """``mm = x @ w``, and lines that read it."""

    def __init__(self, rows: int = 3 * ROWS, dtype: DType = F32) -> None:
        self.rows, self.dtype = rows, dtype
        self.x, self.w = buffer("x", rows, C, dtype=dtype), buffer("w", C, V, dtype=dtype)
        self.t = buffer("t", rows, dtype=I64)
        self.mm = buffer("mm", rows, V, dtype=dtype)
        self.lines: list[Def | Extern] = [mm("mm", whole(self.x), whole(self.w), self.mm)]

    def define(self, name: str, shape: tuple[int, ...], body: Any) -> Buffer:
        made = buffer(name, *shape, dtype=self.dtype)
        axes = tuple(Axis(f"i{n}", index(extent)) for n, extent in enumerate(shape))
        self.lines.append(Def(made, axes, cast(body(*axes), self.dtype)))
        return made

    def row_max(self) -> Buffer:
        def body(i: Axis) -> Expr:
            v = Axis("v", index(V))
            return Reduce(MAX, (v,), at(self.mm, i, v))

        return self.define("m", (self.rows,), body)

    def gradient(self, m: Buffer) -> Buffer:
        return self.define(
            "d", (self.rows, V), lambda i, v: Op("sub", (at(self.mm, i, v), at(m, i)))
        )

    def product(self, name: str, left: View, right: View) -> Buffer:
        rows, columns = left.shape[0].const, right.shape[1].const
        made = buffer(name, rows, columns, dtype=self.dtype)
        self.lines.append(mm(name, left, right, made))
        return made

    def graph(self, *outputs: Buffer) -> Graph:
        return graph((self.x, self.w, self.t), tuple(self.lines), *outputs)

    def inputs(self) -> tuple[np.ndarray, ...]:
        t = np.arange(self.rows) * 5 % V
        x, w = numbers(self.rows, C), numbers(C, V, seed=1)
        return (round_to(BF16)(x), round_to(BF16)(w), t) if self.dtype is BF16 else (x, w, t)


def at(source: Buffer, *axes: Axis) -> Expr:
    return cast(Load(source, tuple(map(index, axes))), F32)


def transposed(source: Buffer) -> View:
    return View(source, source.shape[::-1], source.strides[::-1], index(0))


def run(
    head: Head, *outputs: Buffer, tuning: FusionTuning = TUNING
) -> tuple[Schedule, list[RowLoop]]:
    """Cut a graph in chunks, and check that it computes what it did."""
    before = head.graph(*outputs)
    after = chunk(before, tuning.chunk_bytes, clean, tuning)
    verify_graph(after)
    schedule = cut_loops(separate(after), separate)
    verify_schedule(schedule)
    expected = run_graph(before, head.inputs(), library)
    near = 1e-5 if head.dtype is F32 else 2e-2
    for mine, theirs in zip(run_graph(after, head.inputs(), library), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=near, atol=near)
    near = 0 if head.dtype is F32 else 2e-2
    found = run_graph(schedule, head.inputs(), library)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=near, atol=near)
    return schedule, [step for step in schedule.steps if isinstance(step, RowLoop)]


def whys(head: Head, *outputs: Buffer) -> list[str]:
    """Return why a graph is left as it is."""
    before = head.graph(*outputs)
    after = chunk(before, TUNING.chunk_bytes, clean, TUNING)
    assert after.nodes is before.nodes
    assert not any(d.taken for d in after.decisions)
    return [d.reason for d in after.decisions]


def largest(loop: RowLoop) -> int:
    inner = [b for s in loop.schedule.steps if isinstance(s, Extern) for b in s.outputs]
    return max(b.shape[0].hint() for b in inner if b is not None)


def test_rows_of_a_reduction_run_in_chunks() -> None:
    head = Head()
    _, (loop,) = run(head, head.row_max())
    assert (loop.chunk, loop.rounds, loop.count) == (ROWS, 3, index(ROWS))
    assert largest(loop) == ROWS


@pytest.mark.parametrize("rows", (ROWS + 1, 2 * ROWS, 2 * ROWS + 3))
def test_the_last_chunk_may_be_short(rows: int) -> None:
    head = Head(rows)
    _, (loop,) = run(head, head.row_max())
    assert loop.count.is_constant == (rows % ROWS == 0)


def test_products_with_the_rows_are_sliced_or_added_up() -> None:
    head = Head()
    d = head.gradient(head.row_max())
    dx = head.product("dx", whole(d), transposed(head.w))
    dw = head.product("dw", transposed(d), whole(head.x))
    xd = head.product("xd", transposed(head.x), whole(d))
    schedule, (loop,) = run(head, dx, dw, xd)
    assert [b.name for b in loop.results] == ["dx"] and not loop.placed
    assert [b.name for b in loop.added] == ["dw", "xd"]
    assert "aten.addmm_.default(dw" in print_schedule(schedule)


def test_kernels_store_rows_where_they_belong() -> None:
    head = Head()
    m = head.row_max()

    def total(i: Axis) -> Expr:
        v = Axis("v", index(V))
        return Reduce(SUM, (v,), at(head.mm, i, v))

    schedule, (loop,) = run(head, m, head.define("s", (head.rows,), total))
    assert [b.name for b in loop.placed] == ["m", "s"] and not loop.results
    assert loop.graph.inputs[-2:] == tuple(loop.chunks.values()) and not loop.graph.outputs
    assert "stored by the body m, s" in print_schedule(schedule)


def gradients(rows: int) -> tuple[Head, Buffer, Buffer]:
    """The gradients of the rows and of the weights, [2, 24], of a head in 16 bits."""
    head = Head(rows, BF16)
    d = head.gradient(head.row_max())
    dx = head.product("dx", whole(d), transposed(head.w))
    return head, dx, head.product("dw", transposed(d), whole(head.x))


def test_rows_are_whole_where_a_sum_in_a_wider_type_is_as_large() -> None:
    """5 rows of 48 bytes, and the largest of a chunk or the result: 336. A sum: 192 + 2 * 96."""
    head, dx, dw = gradients(5)
    schedule, (loop,) = run(head, dx, dw, tuning=replace(TUNING, chunk_bytes=2 * V * 2))
    assert [b.name for b in loop.placed] == ["d"] and not loop.added
    assert largest(loop) == 2
    after = schedule.steps[schedule.steps.index(loop) + 1 :]
    assert [step.writes[0].name for step in after] == ["dx", "dw"]
    (why,) = (decision.reason for decision in schedule.graph.decisions)
    assert why == "2 of 5 rows at a time; d is whole, for a product over all rows"


def test_many_rows_are_added_up_in_a_wider_type() -> None:
    """20 rows take 1056 bytes."""
    head, dx, dw = gradients(20)
    schedule, (loop,) = run(head, dx, dw, tuning=replace(TUNING, chunk_bytes=2 * V * 2))
    assert [(b.name, b.dtype) for b in loop.added] == [("dw_sum", F32)] and loop.chunk == 2
    assert schedule.steps[-1].writes == (dw,)


def test_chunks_that_add_to_a_wider_sum_have_more_rows() -> None:
    head, dx, dw = gradients(40)
    _, (loop,) = run(head, dx, dw, tuning=replace(TUNING, chunk_rows=4, chunk_sum_rows=8))
    assert loop.chunk == 8


def test_an_expansion_that_a_product_over_all_rows_reads_is_whole() -> None:
    """In 16 bits: it is the operand that would have to be whole."""
    head = Head(9, BF16)
    xm = head.product("xm", transposed(head.x), whole(head.mm))
    (why,) = whys(head, head.row_max(), xm)
    assert why == "mm: a product over all rows needs it whole"


def test_one_chunk_is_no_loop() -> None:
    head = Head(ROWS)
    assert whys(head, head.row_max()) == ["one chunk has all rows"]


def test_what_is_left_of_a_sum_over_rows_comes_after_the_loop() -> None:
    head = Head()

    def mean(*_: Axis) -> Expr:
        i, v = Axis("i", index(head.rows)), Axis("v", index(V))
        total = Reduce(SUM, (i,), Reduce(SUM, (v,), at(head.mm, i, v)))
        return Op("div", (total, Const(float(head.rows), F32)))

    made = head.define("mean", (), mean)
    schedule, (loop,) = run(head, made)
    assert [one.final.name for one in loop.carried] == ["mean_sum"]
    assert schedule.steps[-1] is not loop


def test_a_gather_of_a_row_is_one_row() -> None:
    head = Head()

    def picked(i: Axis) -> Expr:
        column = Runtime(Load(head.t, (index(i),)), index(V))
        return Load(head.mm, (index(i), index(column)))

    _, (loop,) = run(head, head.define("picked", (head.rows,), picked))
    assert [v.buffer.name for v in loop.sliced] == ["x", "t"]


def test_rows_of_two_axes_are_rows() -> None:
    head = Head()

    def body(b: Axis, t: Axis) -> Expr:
        v = Axis("v", index(V))
        return Reduce(MAX, (v,), Load(head.mm, (index(b) * ROWS + t, index(v))))

    _, (loop,) = run(head, head.define("m", (3, ROWS), body))
    assert loop.rounds == 3


def test_an_expansion_that_is_returned_is_whole() -> None:
    head = Head()
    assert whys(head, head.row_max(), head.mm) == ["mm is returned"]


def test_another_row_than_its_own_is_refused() -> None:
    head = Head()

    def body(i: Axis) -> Expr:
        v = Axis("v", index(V))
        return Reduce(MAX, (v,), Load(head.mm, (head.rows - 1 - index(i), index(v))))

    made = head.define("m", (head.rows,), body)
    (why,) = whys(head, made)
    assert "other rows" in why


def test_the_number_of_a_row_is_refused() -> None:
    head = Head()

    def body(i: Axis) -> Expr:
        v = Axis("v", index(V))
        number = Cast(IndexValue(index(i), I64), F32)
        return Reduce(SUM, (v,), Op("mul", (at(head.mm, i, v), number)))

    (why,) = whys(head, head.define("m", (head.rows,), body))
    assert "number of its row" in why


def test_all_rows_before_the_next_step_of_one_are_refused() -> None:
    head = Head()

    def total(*_: Axis) -> Expr:
        i, v = Axis("i", index(head.rows)), Axis("v", index(V))
        return Reduce(SUM, (i, v), at(head.mm, i, v))

    whole_sum = head.define("total", (), total)
    d = head.define(
        "d", (head.rows, V), lambda i, v: Op("sub", (at(head.mm, i, v), Load(whole_sum, ())))
    )
    dx = head.product("dx", whole(d), transposed(head.w))
    (why,) = whys(head, dx)
    assert "needs all rows" in why


def test_a_maximum_over_rows_is_refused() -> None:
    head = Head()

    def body(v: Axis) -> Expr:
        i = Axis("i", index(head.rows))
        return Reduce(MAX, (i,), at(head.mm, i, v))

    (why,) = whys(head, head.define("m", (V,), body))
    assert "max over rows" in why


def test_small_or_narrow_products_are_no_expansions() -> None:
    head = Head()
    before = head.graph(head.row_max())
    assert chunk(before, 0, clean, TUNING) is before
    assert chunk(before, head.rows * V * 4 + 1, clean, TUNING) is before


@pytest.mark.parametrize(
    ("rows", "found"), ((4096, 512), (4095, 512), (100, 100), (4096 + 16, 512), (4000, 400))
)
def test_chunks_are_even_shares_where_one_is_near(rows: int, found: int) -> None:
    tuning = FusionTuning(chunk_bytes=512 * 1000, chunk_rows=1)
    assert chunk_rows(index(rows), 1000, tuning) == found


def test_symbolic_rows_have_chunks_of_one_size() -> None:
    tuning = FusionTuning(chunk_bytes=512 * 1000, chunk_rows=1)
    assert chunk_rows(index(Size("s0", 77)), 1000, tuning) == 512
