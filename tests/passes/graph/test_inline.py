"""Inlining: what is not worth a place in memory goes into its readers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from fusec.codegen.targets import HOPPER_MACHINE, find_target
from fusec.ir.dtype import F32, I64
from fusec.ir.expr import Buffer, Cast, Op, Reduce, Select
from fusec.ir.graph import Def, Graph, Origin
from fusec.ir.index import IntoIndex, index
from fusec.ir.monoid import SUM
from fusec.ir.serial import runs_backwards
from fusec.passes.graph.inline import inline
from tests.fuzz.graphs import Example
from tests.ir.graphs import axes, below, buffer, f32, graph, load, position, total
from tests.passes.pipelines import BOUNDED, check_same, names, numbers, random_graphs
from tests.support import compile_with

CHEAP, DEAR = "neg", "exp"


def unary(name: str, op: str, source: Buffer) -> Def:
    """name[i, j] = op(source[i, j])"""
    own = axes("i j", *source.shape)
    return Def(buffer(name, *source.shape), own, Op(op, (load(source, *own),)))


def reader(name: str, source: Buffer, *at: IntoIndex, shape: tuple[int, ...] = (4, 6)) -> Def:
    """name[i, j] = source[...] * 2 at the places that ``at`` names."""
    own = axes("i j", *shape)
    indices = tuple(index(own["ij".index(a)]) if isinstance(a, str) else index(a) for a in at)
    return Def(buffer(name, *shape), own, Op("mul", (load(source, *indices), f32(2))))


def inlined(before: Graph) -> list[str]:
    """Check that ``inline`` keeps values; return the definitions that are left."""
    after = inline(before, HOPPER_MACHINE)
    shapes = [tuple(n.const for n in b.shape) for b in before.inputs if isinstance(b, Buffer)]
    check_same(before, after, tuple(numbers(*shape, seed=k) for k, shape in enumerate(shapes)))
    return names(after)


@pytest.mark.parametrize("op", [CHEAP, DEAR])
def test_a_pointwise_definition_goes_into_its_one_reader(op: str) -> None:
    x = buffer("x", 4, 6)
    a = unary("a", op, x)
    y = reader("y", a.buffer, "i", "j")
    assert inlined(graph((x,), (a, y), y.buffer)) == ["y"]


def test_any_index_map_will_do() -> None:
    x = buffer("x", 4, 6)
    a = unary("a", DEAR, x)
    i, j = axes("i j", 8, 3)
    flat = index(i) * 3 + index(j)
    flipped = load(a.buffer, 3 - flat // 6, flat % 6)
    y = Def(buffer("y", 8, 3), (i, j), Op("neg", (flipped,)))
    assert inlined(graph((x,), (a, y), y.buffer)) == ["y"]


def test_a_guarded_read_stays_zero_outside() -> None:
    """0 + 1 is 1: the guard is around what is inlined, not around its load alone."""
    x = buffer("x", 4, 6)
    own = axes("i j", 4, 6)
    a = Def(buffer("a", 4, 6), own, Op("add", (load(x, *own), f32(1))))
    i, j = axes("i j", 4, 8)
    padded = load(a.buffer, i, j, guard=below(j, 6))
    y = Def(buffer("y", 4, 8), (i, j), Op("neg", (padded,)))
    assert inlined(graph((x,), (a, y), y.buffer)) == ["y"]


def test_a_scan_that_is_only_read_from_its_end_runs_backwards() -> None:
    x = buffer("x", 4, 6)
    i, j, k = axes("i j k", 4, 6, 6)
    so_far = Select(Op("until", (position(k), position(j))), load(x, i, k), f32(0))
    sums = Def(buffer("sums", 4, 6), (i, j), Reduce(SUM, (k,), so_far))
    y = Def(buffer("y", 4, 6), (i, j), Op("neg", (load(sums.buffer, i, 5 - index(j)),)))
    z = Def(buffer("z", 4, 6), (i, j), Op("neg", (load(sums.buffer, i, j),)))
    for reader, turns in ((y, True), (z, False)):
        before = graph((x,), (sums, reader), reader.buffer)
        after = inline(before, HOPPER_MACHINE)
        check_same(before, after, (numbers(4, 6),))
        (scan,) = (line.expr for line in after.defs if isinstance(line.expr, Reduce))
        assert runs_backwards(scan) is turns
    both = graph((x,), (sums, y, z), y.buffer, z.buffer)
    assert inline(both, HOPPER_MACHINE) is both


def test_a_mask_that_reads_no_memory_goes_into_all_readers() -> None:
    i, j = axes("i j", 4, 6)
    mask = Def(buffer("mask", 4, 6), (i, j), Cast(Op("le", (position(j), position(i))), F32))
    y, z = reader("y", mask.buffer, "i", "j"), reader("z", mask.buffer, 3, "j")
    assert inlined(graph((), (mask, y, z), y.buffer, z.buffer)) == ["y", "z"]


@pytest.mark.parametrize(("op", "left"), [(CHEAP, ["y", "z"]), (DEAR, ["a", "y", "z"])])
def test_of_two_readers_only_a_cheap_definition_is_computed_twice(op: str, left: list[str]) -> None:
    x = buffer("x", 4, 6)
    a = unary("a", op, x)
    y, z = reader("y", a.buffer, "i", "j"), reader("z", a.buffer, 0, "j")
    assert inlined(graph((x,), (a, y, z), y.buffer, z.buffer)) == left


def test_a_cheap_sum_of_two_tensors_is_stored_for_two_readers() -> None:
    """To load one tensor twice costs less than two tensors twice."""
    x, r = buffer("x", 4, 6), buffer("r", 4, 6)
    own = axes("i j", 4, 6)
    a = Def(buffer("a", 4, 6), own, Op("add", (load(x, *own), load(r, *own))))
    y, z = reader("y", a.buffer, "i", "j"), reader("z", a.buffer, 0, "j")
    assert inlined(graph((x, r), (a, y, z), y.buffer, z.buffer)) == ["a", "y", "z"]


@pytest.mark.parametrize(("op", "left"), [(CHEAP, ["y"]), (DEAR, ["a", "y"])])
def test_only_a_cheap_definition_is_computed_again_where_it_repeats(
    op: str, left: list[str]
) -> None:
    x = buffer("x", 1, 3)
    a = unary("a", op, x)
    (i,), (j,) = axes("i", 1), axes("j", 6)
    y = Def(buffer("y", 1, 6), (i, j), Op("mul", (load(a.buffer, 0, index(j) % 3), f32(2))))
    assert inlined(graph((x,), (a, y), y.buffer)) == left


def test_a_dear_row_goes_into_a_matrix_for_each_row_loads_the_same() -> None:
    x, r = buffer("x", 1, 6), buffer("r", 4, 6)
    a = unary("a", DEAR, x)
    i, j = axes("i j", 4, 6)
    y = Def(buffer("y", 4, 6), (i, j), Op("add", (load(a.buffer, 0, j), load(r, i, j))))
    assert inlined(graph((x, r), (a, y), y.buffer)) == ["y"]


@pytest.mark.parametrize(("op", "left"), [(CHEAP, ["y"]), (DEAR, ["a", "y"])])
def test_a_row_written_into_a_matrix_is_computed_for_each_of_its_rows(
    op: str, left: list[str]
) -> None:
    """The row's guard stands around its load, which does not vary along it."""
    x = buffer("x", 1, 6)
    a = unary("a", op, x)
    i, j = axes("i j", 4, 6)
    row = Select(below(i, 1), load(a.buffer, 0, j), f32(0))
    y = Def(buffer("y", 4, 6), (i, j), row)
    assert inlined(graph((x,), (a, y), y.buffer)) == left


def test_reductions_stay() -> None:
    x = buffer("x", 4, 6)
    (i,), (c,) = axes("i", 4), axes("c", 6)
    s = Def(buffer("s", 4), (i,), total(SUM, c, load(x, i, c)))
    y = reader("y", s.buffer, "i")
    assert inlined(graph((x,), (s, y), y.buffer)) == ["s", "y"]


def test_what_is_returned_stays() -> None:
    x = buffer("x", 4, 6)
    a = unary("a", CHEAP, x)
    y = reader("y", a.buffer, "i", "j")
    assert inlined(graph((x,), (a, y), y.buffer, a.buffer)) == ["a", "y"]


def test_a_definition_carries_the_origins_of_what_went_into_it() -> None:
    x = buffer("x", 4, 6)
    a = unary("a", DEAR, x)
    a = Def(a.buffer, a.axes, a.expr, Origin(("exp.default",)))
    y = reader("y", a.buffer, "i", "j")
    y = Def(y.buffer, y.axes, y.expr, Origin(("mul.Tensor",)))
    (line,) = inline(graph((x,), (a, y), y.buffer), HOPPER_MACHINE).nodes
    assert line.origin.ops == ("exp.default", "mul.Tensor")


@BOUNDED
@given(drawn=random_graphs())
def test_random_graphs_compute_the_same(drawn: Example) -> None:
    check_same(drawn.graph, inline(drawn.graph, HOPPER_MACHINE), drawn.inputs)


@BOUNDED
@given(drawn=random_graphs(symbols=True))
def test_random_graphs_over_sizes_compute_the_same(drawn: Example) -> None:
    check_same(drawn.graph, inline(drawn.graph, HOPPER_MACHINE), drawn.inputs)


def test_a_random_number_is_drawn_in_each_of_its_readers() -> None:
    seeds = buffer("seeds", 2, dtype=I64)
    own = axes("i j", 4, 6)
    bits = Op("random", (load(seeds, index(1)), position(index(own[0]) * 6 + index(own[1]))))
    a = Def(buffer("a", 4, 6), own, Cast(bits, F32))
    y, z = (reader(name, a.buffer, "i", "j") for name in "yz")
    after = inline(graph((seeds,), (a, y, z), y.buffer, z.buffer), HOPPER_MACHINE)
    assert names(after) == ["y", "z"]
    given = np.array([5, -7])
    check_same(graph((seeds,), (a, y, z), y.buffer, z.buffer), after, (given,))


@pytest.mark.parametrize(("most", "left"), [(0, ["y"]), (8, ["a", "y"])])
def test_the_few_rows_of_a_product_are_stored_for_all_its_columns(
    most: int, left: list[str]
) -> None:
    x, w, y = buffer("x", 2, 6), buffer("w", 9, 6), buffer("y", 2, 9)
    a = unary("a", DEAR, x)
    i, j, k = axes("i j k", 2, 9, 6)
    body = Op("mul", (load(a.buffer, i, k), load(w, j, k)))
    product = graph((x, w), (a, Def(y, (i, j), total(SUM, k, body))), y)
    assert names(inline(product, replace(HOPPER_MACHINE, skinny_rows=most))) == left


REARRANGED = (
    lambda y: y.flip(0),
    lambda y: y.roll(1, 0),
    lambda y: torch.cat([y, y]),
    lambda y: torch.nn.functional.pad(y, (1, 1)),
    lambda y: torch.stack([y, y]),
    lambda y: y.repeat(2, 1),
    lambda y: y @ y.t(),
    lambda y: (y[:, :, None] * y[:, None, :]).sum(1),
    lambda y: y.flip(1).sum(0),
)


@pytest.mark.parametrize("write", ("add_", "zero_", "part"))
def test_no_read_is_moved_behind_a_write(write: str) -> None:
    def fn(x):
        made = [rearranged(x * (2 + n)) for n, rearranged in enumerate(REARRANGED)]
        match write:
            case "add_":
                x.add_(sum(y.sum() for y in made))
            case "zero_":
                x.zero_()
            case _:
                x[0].mul_(3)
        return made

    torch._dynamo.reset()
    given, other = (torch.from_numpy(numbers(4, 6, seed=1)) for _ in range(2))
    torch.testing.assert_close(compile_with(fn)(given), fn(other))
    torch.testing.assert_close(given, other)


@pytest.mark.parametrize("target", ["sm_90", "cpu"])
def test_what_stands_between_two_products_stays_for_the_first(target: str) -> None:
    """As an epilogue it is computed once, as an operand once for each tile of columns."""
    x, w, v = buffer("x", 64, 64), buffer("w", 64, 64), buffer("v", 64, 64)

    def multiply(name: str, left: Buffer, right: Buffer) -> Def:
        m, n, k = axes("m n k", 64, 64, 64)
        body = Op("mul", (load(left, m, k), load(right, k, n)))
        return Def(buffer(name, 64, 64), (m, n), total(SUM, k, body))

    y = multiply("y", x, w)
    h = unary("h", DEAR, y.buffer)
    z = multiply("z", h.buffer, v)
    after = inline(graph((x, w, v), (y, h, z), z.buffer), find_target(target).machine)
    assert names(after) == (["y", "z"] if target == "cpu" else ["y", "h", "z"])
