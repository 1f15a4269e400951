"""The verifiers: what they accept, and one structure that must fail for each rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fusec.errors import InvalidIR
from fusec.ir.disjoint import are_apart, determined_axes, has_distinct_elements
from fusec.ir.dtype import BF16, DTYPES, F16, F32, F64, I8, I32, NumberForm
from fusec.ir.expr import Buffer, Cast, Expr, Op, Reduce, Var
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule, Store, View
from fusec.ir.index import Axis, Index, Runtime, Size, index, is_in_range
from fusec.ir.monoid import ANY, MAX, SUM
from fusec.ir.verify import verify_expr, verify_flat, verify_graph, verify_kernel, verify_schedule
from fusec.passes.kernel.coalesce import flatten
from tests.ir.graphs import (
    axes,
    below,
    buffer,
    cat,
    f32,
    gather,
    graph,
    layer_norm,
    load,
    matmul,
    position,
    ragged_sum,
    softmax,
    total,
    whole,
)

N = Size("N", 8)
A, B = axes("a b", 4, 6)
X, Y, XY = buffer("x", 4), buffer("y", 4), buffer("xy", 4, 6)


def rejected(verify: Callable[[], None], message: str) -> None:
    with pytest.raises(InvalidIR, match=message):
        verify()


# -- what is legal -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "example",
    [
        layer_norm(5, 24),
        layer_norm(Size("M", 8), 24, dtype=BF16),
        softmax(4, 9),
        matmul(Size("M", 8), 7, 40),
        cat(3, 4),
        gather(10, 3, 4),
        ragged_sum(9, 4),
    ],
    ids=["layer_norm", "layer_norm_bf16", "softmax", "matmul", "cat", "gather", "ragged_sum"],
)
def test_real_graphs_are_legal(example: Graph) -> None:
    verify_graph(example)


# -- expressions ---------------------------------------------------------------------------------

AXIS_BEYOND = Axis("r", index(4), limit=index(9) - index(B) * 4)
FLOAT_LOAD, BOOL_VALUE = load(X, A), below(A, 2)
HALF = load(buffer("h", 4, dtype=F16), A)

ILLEGAL_EXPRESSIONS: dict[str, tuple[Expr, str]] = {
    "an axis out of scope": (load(XY, A, B), "axes b are not in scope"),
    "an axis in a guard": (load(X, A, guard=below(B, 2)), "axes b are not in scope"),
    "an axis in a limit": (total(SUM, AXIS_BEYOND, f32(1)), "axes b are not in scope"),
    "a load past the end": (load(X, index(A) + 1), r"load of x at a \+ 1 is not provably in"),
    "a load before the start": (load(X, index(A) - 1), "nor guarded"),
    "a product out of range": (load(X, index(A) * 2), "nor guarded"),
    "a gather out of range": (load(X, index(Runtime(position(A), index(5)))), "nor guarded"),
    "a guard that is no bool": (load(X, A, guard=FLOAT_LOAD), "guard of x is f32"),
    "a reduction over one axis twice": (Reduce(SUM, (B, B), load(XY, A, B)), r"axes \(b, b\)"),
    "a reduction over nothing": (Reduce(SUM, (), FLOAT_LOAD), r"sum over axes \(\)"),
    "a sum of bools": (total(SUM, B, below(B, 2)), "sum of bool"),
    "any of floats": (total(ANY, B, load(XY, A, B)), "any of f32"),
    "a maximum of f16": (total(MAX, B, HALF), "max of f16"),
    "arithmetic on f16": (Op("add", (HALF, HALF)), "add on f16"),
    "arithmetic on bool": (Op("add", (BOOL_VALUE, BOOL_VALUE)), "add on bool"),
    "exp of an integer": (Op("exp", (position(A, I32),)), "exp on i32"),
    "and of floats": (Op("and", (FLOAT_LOAD, FLOAT_LOAD)), "and on f32"),
    "a shift of bools": (Op("shl", (BOOL_VALUE, BOOL_VALUE)), "shl on bool"),
    "small integers": (Op("neg", (Cast(FLOAT_LOAD, I8),)), "neg on i8"),
    "rounding of f64": (Op("round_bf16", (Cast(FLOAT_LOAD, F64),)), "round_bf16 on f64"),
    "an index value of type f32": (position(A, F32), "an index value of type f32"),
    "an opaque value": (load(buffer("z", 4, dtype=DTYPES["c64"]), A), "opaque type c64"),
    "a variable": (Var("v", F32, frozenset()), "a variable outside a program"),
}


@pytest.mark.parametrize("name", ILLEGAL_EXPRESSIONS)
def test_illegal_expression(name: str) -> None:
    expr, message = ILLEGAL_EXPRESSIONS[name]
    rejected(lambda: verify_expr(expr, frozenset((A,)), "y[a] = ..."), message)
    rejected(lambda: verify_expr(expr, frozenset((A,)), "y[a] = ..."), r"invalid IR: y\[a\] = ")


def test_guarded_and_gathered_loads_need_no_proof() -> None:
    scope = frozenset((A,))
    verify_expr(load(X, index(A) - 7, guard=below(3, A)), scope, "y")
    verify_expr(load(X, Runtime(position(A), index(4))), scope, "y")
    table, c = buffer("table", N, 64), Axis("c", index(64))
    verify_expr(load(table, Runtime(position(A), index(N)), c), scope | {c}, "y")


def test_small_domains_are_tried_where_bounds_prove_nothing() -> None:
    o = Axis("o", index(4))
    ragged = Axis("r", index(4), limit=index(13) - index(o) * 4)
    square = (index(o) * 4 + ragged) * (index(o) * 4 + ragged)
    assert not is_in_range(square, index(145))
    verify_expr(load(buffer("w", 145), square), frozenset((o, ragged)), "y")
    narrow = load(buffer("w", 144), square)
    rejected(lambda: verify_expr(narrow, frozenset((o, ragged)), "y"), "nor guarded")


def test_inner_reduction_may_bind_the_axis_of_an_outer_one() -> None:
    top = total(MAX, B, load(XY, A, B))
    centred = total(SUM, B, Op("exp", (Op("sub", (load(XY, A, B), top)),)))
    verify_expr(centred, frozenset((A,)), "y")


# -- graphs --------------------------------------------------------------------------------------


def line(target: Buffer, over: tuple[Axis, ...], expr: Expr) -> Def:
    return Def(target, over, expr)


def illegal_graphs() -> dict[str, tuple[Graph, str]]:
    copy = line(Y, (A,), load(X, A))
    other = buffer("other", 4)
    after = line(other, (A,), load(Y, A))
    square = buffer("square", 4, 4)
    overlapping = Buffer("overlapping", (index(4), index(6)), (index(5), index(1)), F32)
    call = Extern("n", "t", (whole(Y),), (), (other,), "why")
    bad_view = View(X, (index(4),), (index(1), index(1)), index(0))
    no_pairs = replace(whole(X), form=NumberForm.COMPLEX)
    both = line(XY, (A, B), total(SUM, B, load(XY, A, B)))
    return {
        "use before definition": (graph((X,), (after, copy), other), "y is not defined yet"),
        "use of itself": (graph((X,), (line(Y, (A,), load(Y, A)),), Y), "y is not defined yet"),
        "two definitions": (graph((X,), (copy, copy), Y), "y is defined twice"),
        "definition of an input": (graph((X, Y), (copy,), Y), "y is defined twice"),
        "rank": (graph((X,), (line(XY, (A,), load(X, A)),), XY), "shape is"),
        "an axis twice": (graph((X,), (line(square, (A, A), load(X, A)),)), "an axis stands twice"),
        "extent": (graph((X,), (line(Y, (B,), f32(1)),), Y), "b has 6 of 4 points"),
        "type": (graph((X,), (line(Y, (A,), position(A)),), Y), "i64 into a buffer of f32"),
        "strides": (graph((), (line(overlapping, (A, B), f32(1)),)), "strides .* overlap"),
        "free and bound": (graph((), (both,)), "axes b are both free and bound"),
        "extern's argument": (graph((X,), (call,), other), r"other = extern t\(...\): y is not"),
        "extern's output": (graph((X, Y, other), (call,), other), "other is defined twice"),
        "extern's view": (
            graph((X,), (Extern("n", "t", (bad_view,), (), (), "why"),)),
            "view of x: rank",
        ),
        "output": (graph((X,), (), Y), "return: y is never defined"),
        "form": (replace(graph((X,), ()), outputs=(no_pairs,)), "view of x: no pairs of parts"),
    }


@pytest.mark.parametrize("name", illegal_graphs())
def test_illegal_graph(name: str) -> None:
    example, message = illegal_graphs()[name]
    rejected(lambda: verify_graph(example), message)


def test_transposed_and_padded_buffers_have_distinct_elements() -> None:
    def strided(*strides: object) -> Buffer:
        return Buffer("s", (index(4), index(N)), tuple(map(index, strides)), F32)

    assert has_distinct_elements(strided(N, 1))
    assert has_distinct_elements(strided(1, 4))
    assert has_distinct_elements(strided(index(N) + 8, 1))
    half = index(N) // 2
    shape, strides = (index(3), index(2), index(N), half), (half * N * 2, half, half * 2, index(1))
    assert has_distinct_elements(Buffer("s", shape, strides, F32))
    assert not has_distinct_elements(strided(0, 1))
    assert not has_distinct_elements(strided(1, 1))
    assert has_distinct_elements(Buffer("s", (index(1), index(5)), (index(1), index(1)), F32))


# -- kernels -------------------------------------------------------------------------------------


def kernel(*stores: Store, grid: tuple[Axis, ...] = (A,), inside: tuple[Axis, ...] = ()) -> Kernel:
    return Kernel("k0", grid, inside, stores)


def put(target: Buffer, expr: Expr, *indices: Index | Axis | int) -> Store:
    return Store(target, tuple(index(i) for i in indices), expr)


def test_kernel_with_reduced_and_stored_axes_is_legal() -> None:
    rows = buffer("rows", 4)
    summed = put(rows, total(SUM, B, load(XY, A, B)), A)
    twice = put(buffer("twice", 4, 6), Op("add", (load(XY, A, B), load(rows, A))), A, B)
    verify_kernel(kernel(summed, inside=(B,)))
    verify_kernel(kernel(twice, grid=(A, B)))
    flat = Store(XY.flat(), (index(A) * 6 + B,), f32(1))
    verify_kernel(kernel(flat, grid=(A, B)))


def test_kernel_may_read_in_place_what_it_writes() -> None:
    verify_kernel(kernel(put(Y, Op("neg", (load(Y, A),)), A)))


def test_a_store_is_in_range_and_apart_where_its_guard_says_so() -> None:
    long, w = Axis("long", index(8)), buffer("w", 8)
    short = replace(put(w, f32(1), index(long) + 4), guard=below(long, 4))
    first = put(w, f32(2), B)
    verify_kernel(kernel(replace(first, guard=below(B, 4)), short, grid=(), inside=(long, B)))
    rejected(lambda: verify_kernel(kernel(first, short, grid=(), inside=(long, B))), "stored twice")
    late = replace(short, guard=below(long, 5))
    rejected(lambda: verify_kernel(kernel(late, grid=(long,))), "store at long . 4 is not provably")
    unreached = replace(short, guard=below(B, 4))
    rejected(lambda: verify_kernel(kernel(unreached, grid=(long,))), "axes b are not in scope")
    number = replace(short, guard=f32(1))
    rejected(lambda: verify_kernel(kernel(number, grid=(long,))), "its guard is f32")


def illegal_kernels() -> dict[str, tuple[Kernel, str]]:
    ones = put(XY, f32(1), A, B)
    long = Axis("long", index(8))
    summed = total(SUM, B, load(XY, A, B))
    return {
        "an axis twice": (kernel(ones, grid=(A, B), inside=(B,)), "an axis stands twice"),
        "a reduced grid axis": (kernel(put(Y, summed, A), grid=(A, B)), "b, which is not inside"),
        "a reduced axis of nobody": (kernel(put(Y, summed, A)), "b, which is not inside"),
        "an axis of nobody": (kernel(ones), r"k0: xy\[a, b\] = ...: axes b are not in scope"),
        "a store out of range": (
            kernel(put(Y, f32(1), long), grid=(long,)),
            r"store at long is not provably in \[0, 4\)",
        ),
        "a rank": (kernel(put(XY, f32(1), A)), r"xy\[a\] = ...: shape is \(4, 6\)"),
        "a type": (kernel(put(Y, position(A), A)), "i64 into a buffer of f32"),
        "a grid axis that no index has": (
            kernel(put(Y, f32(1), A), grid=(A, B)),
            "different points of b may write one element",
        ),
        "a value that varies along more": (
            kernel(put(Y, load(XY, A, B), A), inside=(B,)),
            "different points of b may write one element",
        ),
        "overlapping digits": (
            kernel(put(buffer("w", 14), f32(1), index(A) * 2 + B), grid=(A, B)),
            "different points of a, b may write",
        ),
        "a quotient alone": (
            kernel(put(Y, f32(1), index(long) // 2), grid=(long,)),
            "different points of long may write",
        ),
        "a scatter": (
            kernel(put(Y, f32(1), index(Runtime(position(A), index(4))))),
            "different points of a may write",
        ),
        "two stores of one buffer": (
            kernel(put(Y, f32(1), A), put(Y, f32(2), A)),
            "may be stored twice",
        ),
        "a read at another index": (
            kernel(put(Y, load(Y, index(3) - A), A)),
            "y is written, and read at another index",
        ),
        "an illegal expression": (
            kernel(put(Y, load(X, index(A) + 1), A)),
            r"k0: y\[a\] = ...: load",
        ),
    }


def test_flat_kernel_has_offsets_over_its_own_axes() -> None:
    whole = kernel(put(XY, load(XY, A, B), A, B), grid=(A, B))
    flat = flatten(whole)
    verify_flat(flat)
    mixed = replace(flat, stores=(replace(flat.stores[0], expr=whole.stores[0].expr),))
    rejected(lambda: verify_flat(mixed), "k0: xy is not addressed by its element offset")
    rejected(lambda: verify_flat(replace(flat, grid=(A,))), "k0: axes b are not in scope")


@pytest.mark.parametrize("name", illegal_kernels())
def test_illegal_kernel(name: str) -> None:
    example, message = illegal_kernels()[name]
    rejected(lambda: verify_kernel(example), message)


def test_schedule_defines_each_buffer_once_and_before_use() -> None:
    first = kernel(put(Y, load(X, A), A))
    other = buffer("other", 4)
    second = Kernel("k1", (A,), (), (put(other, load(Y, A), A),))
    call = Extern("n", "t", (whole(other),), (), (buffer("last", 4),), "why")

    def schedule(*steps: Kernel | Extern, outputs: tuple[Buffer, ...] = ()) -> Schedule:
        return Schedule(graph((X,), (), *outputs), steps)

    verify_schedule(schedule(first, second, call, outputs=(other,)))
    rejected(lambda: verify_schedule(schedule(second, first)), "kernel k1: y is not defined yet")
    rejected(lambda: verify_schedule(schedule(first, first)), "kernel k0: y is defined twice")
    rejected(lambda: verify_schedule(schedule(first, call)), "other is not defined yet")
    rejected(lambda: verify_schedule(schedule(first, outputs=(other,))), "other is never defined")
    wrong = kernel(put(Y, load(X, index(A) + 1), A))
    rejected(lambda: verify_schedule(schedule(wrong)), "nor guarded")


# -- the race check ------------------------------------------------------------------------------


def test_digits_of_mixed_radix_numbers_are_determined() -> None:
    m, c, t = Axis("m", index(N)), Axis("c", index(N) * 3), Axis("t", index(64))
    assert determined_axes((index(m) * N * 3 + c,)) == {m, c}
    assert determined_axes((index(m) + index(c) * N,)) == {m, c}
    assert determined_axes((index(m) * N * 3 + c + 5,)) == {m, c}
    assert determined_axes((index(c) * -1 + index(N) * 3 - 1,)) == {c}
    assert determined_axes((index(m) * N + c,)) == frozenset()
    assert determined_axes((index(t) // 8, index(t) % 8)) == {t}
    assert determined_axes((index(t) // 16, (index(t) // 4) % 4, index(t) % 4)) == {t}
    assert determined_axes((index(t) // 16, index(t) % 4)) == frozenset()
    assert determined_axes((index(t) // 8 * 100 + index(t) % 8,)) == {t}
    assert determined_axes((index(m) + t, index(t))) == {m, t}
    p = Axis("p", index(16))
    ragged, plain = Axis("r", index(13), limit=index(200) - index(p) * 13), Axis("r", index(13))
    assert determined_axes((index(m) * 200 + index(p) * 13 + ragged,)) == {m, p, ragged}
    assert determined_axes((index(m) * 200 + index(p) * 13 + plain,)) == frozenset()
    assert determined_axes((index(m) * t,)) == frozenset()


def test_stores_are_apart_where_all_of_one_are_below_all_of_the_other():
    (half,), (row,) = axes("half", N), axes("row", 4)
    assert are_apart((index(row), index(half)), (index(row), index(half) + N))
    assert are_apart((index(row), index(half) + N), (index(row), index(half)))
    assert not are_apart((index(row), index(half)), (index(row), index(half) + N - 1))
    assert not are_apart((index(row), index(half)), (index(row) + 1, index(half)))


def test_stores_are_apart_where_one_is_at_odd_places():
    (row, column) = axes("row column", 4, N)
    flat = index(row) * N * 2 + index(column) * 2
    assert are_apart((flat,), (flat + 1,))
    assert not are_apart((flat,), (flat + 2,))


@pytest.mark.parametrize("rows", (64, N))
def test_flat_stores_are_apart_where_they_differ_in_a_digit(rows):
    (row, column), (batch,) = axes("row column", rows, 32), axes("batch", 3)
    flat = index(row) * 64 + column
    assert are_apart((flat,), (flat + 32,)) and are_apart((flat + 32,), (flat,))
    assert not are_apart((flat,), (flat + 31,))
    assert not are_apart((flat,), (flat + 64 + 16,))
    assert are_apart((flat * 3 + batch,), (flat * 3 + batch + 96,))
    assert not are_apart((flat + index(batch) * 32,), (flat + 32,))


def test_ragged_tiles_are_digits() -> None:
    o = Axis("o", (index(N) + 15) // 16)
    i = Axis("i", index(16), limit=index(N) - index(o) * 16)
    assert determined_axes((index(o) * 16 + i,)) == {o, i}


def test_axes_of_one_point_need_not_be_determined() -> None:
    one = Axis("one", index(1))
    verify_kernel(kernel(put(Y, f32(1), A), grid=(A, one)))
    assert determined_axes((index(A) + index(one) * 2,)) >= {A}
