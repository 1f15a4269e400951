"""Indices: the canonical form, its arithmetic, and what the prover claims."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusec.ir.atoms import Minimum
from fusec.ir.expr import substitute
from fusec.ir.index import (
    Axis,
    FloorDiv,
    Index,
    Mod,
    Quotient,
    Size,
    floordiv,
    index,
    is_in_range,
    is_nonnegative,
    least,
    mod,
    most,
    product,
)
from fusec.tools.interpreter.expression import Env, eval_scalar
from tests.passes.pipelines import BOUNDED

N, M, C, T = Size("N", 5), Size("M", 3), Size("C", 40), Size("T", 6, 2)
K = Size("K", 8)
QUARTER = Quotient(index(K), index(4))
"""A size of which 4 is a divisor, ``4*QUARTER`` in every index."""
A = Axis("a", index(6))
B = Axis("b", index(N))
D = Axis("d", index(N) * M)
E = Axis("e", index(4), limit=index(N) * M - index(D))
AXES = (A, B, D, E)
ATOMS = (*AXES, N, M, QUARTER)


@dataclass(frozen=True)
class Point:
    """Sizes and coordinates within the domains of all axes."""

    env: Env

    def value(self, of: Index) -> int:
        return eval_scalar(of, self.env)


@st.composite
def points(draw: st.DrawFn) -> Point:
    sizes = {N: draw(st.integers(1, 5)), M: draw(st.integers(1, 4))}
    sizes[K] = 4 * draw(st.integers(1, 3))
    env = Env(sizes=sizes)
    for axis in AXES:
        last = eval_scalar(axis.extent, env) - 1
        if axis.limit is not None:
            last = min(last, eval_scalar(axis.limit, env) - 1)
        env.points[axis] = draw(st.sampled_from((0, last)) | st.integers(0, last))
    return Point(env)


# A tree is an atom, a constant or (operator, left, right): what an Index is built from.
SUMS = (index(N) + 1, index(N) * M + M, index(M) - N)
DIVISORS = st.sampled_from((1, 2, 3, 4, 8, N, M, QUARTER, index(N) * M, index(N) * 2, *SUMS))
LEAVES = st.sampled_from(ATOMS) | st.integers(-3, 9)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(st.sampled_from("+-"), inner, inner)
        | st.tuples(st.just("*"), inner, LEAVES)
        | st.tuples(st.sampled_from(("//", "%")), inner, DIVISORS)
    ),
    max_leaves=8,
)


def build(tree: object) -> Index:
    match tree:
        case (operator, left, right):
            a, b = build(left), build(right)
            match operator:
                case "+":
                    return a + b
                case "-":
                    return a - b
                case "*":
                    return a * b
                case "//":
                    return a // b
                case _:
                    return a % b
        case _:
            return index(tree)


def compute(tree: object, point: Point) -> int:
    match tree:
        case (operator, left, right):
            a, b = compute(left, point), compute(right, point)
            match operator:
                case "+":
                    return a + b
                case "-":
                    return a - b
                case "*":
                    return a * b
                case "//":
                    return a // b
                case _:
                    return a % b
        case int():
            return tree
        case _:
            return point.value(index(tree))


def divides(tree: object, point: Point) -> bool:
    """Return True if no divisor is 0 at a point."""
    match tree:
        case (operator, left, right):
            zero = operator in ("//", "%") and point.value(build(right)) == 0
            return not zero and divides(left, point) and divides(right, point)
        case _:
            return True


@settings(BOUNDED, max_examples=100)
@given(TREES, points())
def test_arithmetic_agrees_with_integers(tree: object, point: Point) -> None:
    assume(divides(tree, point))
    assert point.value(build(tree)) == compute(tree, point)


@settings(BOUNDED, max_examples=100)
@given(TREES, TREES, points())
def test_substitution_is_composition(tree: object, other: object, point: Point) -> None:
    assume(divides(tree, point) and divides(other, point))
    replaced = substitute(build(tree), {A: build(other)})
    held = dict(point.env.points)
    held[A] = point.value(build(other))
    assert point.value(replaced) == eval_scalar(build(tree), Env(point.env.sizes, points=held))


@settings(BOUNDED, max_examples=300)
@given(TREES, points())
def test_claims_of_the_prover_hold(tree: object, point: Point) -> None:
    assume(divides(tree, point))
    value = build(tree)
    seen = point.value(value)
    low, high = least(value), most(value)
    assert not is_nonnegative(value) or seen >= 0
    assert low is None or low <= seen
    assert high is None or high >= seen


@settings(BOUNDED, max_examples=100)
@given(st.lists(TREES, min_size=2, max_size=5), st.randoms())
def test_equal_sums_are_one_object(trees: list[object], random: object) -> None:
    terms = [build(tree) for tree in trees]
    forward = index(0)
    for term in terms:
        forward = forward + term
    random.shuffle(terms)  # type: ignore[attr-defined]
    shuffled = index(0)
    for term in terms:
        shuffled = shuffled + term
    assert forward is shuffled


def test_equal_indices_are_one_object() -> None:
    assert index(A) * 3 + index(B) is index(B) + index(A) * 2 + A
    assert index(N) * M is index(M) * N
    assert index(A) - A is index(0)
    assert (index(A) + N) * (index(A) - N) is index(A) * A - index(N) * N


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_digits_of_a_number_rejoin_in_any_order(order: tuple[int, ...]) -> None:
    k = index(Axis("k", index(1024)))
    digits = [k % 2, 2 * ((k // 2) % 4), 8 * ((k // 8) % 4), 32 * (k // 32)]
    total = index(0)
    for position in order:
        total = total + digits[position]
    assert total is k


def test_symbolic_digits_rejoin() -> None:
    k, c = index(Axis("k", index(N) * T * C)), index(B)
    whole = (k // (index(T) * C)) * T * C + (k // C) % T * C + k % C
    assert whole is k
    assert (k // T) * T * C + (k % T) * C + c is k * C + c
    less = index(T) - 1
    assert (k // less) * less + k % less is k
    assert (k // T) * T * C + (k % T) * N is not k * C


def test_division_drops_what_bounds_prove() -> None:
    t = Axis("t", index(8))
    m = index(B) * 8 + t
    assert m // 8 is index(B)
    assert m % 8 is index(t)
    assert (index(D) * N + B) // N is index(D)
    assert (index(D) * N + B) % N is index(B)
    assert index(-1) // N is index(-1)
    assert index(-1) % N is index(N) - 1
    assert (m // 4) // 2 is index(B)


def test_division_of_a_multiple_and_less_is_one_of_the_multiple() -> None:
    o, lane = Axis("o", index(16)), Axis("l", index(8))
    m = index(o) * 8 + lane
    assert m // 64 is index(o) // 8
    assert m % 64 is (index(o) % 8) * 8 + lane
    assert (m + 64 * index(B)) // 64 is index(B) + index(o) // 8
    assert (m // 60).terms[0][0][0] == FloorDiv(m, index(60))  # 8 lanes may be in two of 60
    assert m // 64 * 64 + m % 64 is m


def test_nested_divisions_merge_for_positive_divisors_only() -> None:
    k = index(Axis("k", index(100)))
    assert (k // 3) // 5 is k // 15
    assert (k // N) // M is k // (index(N) * M)
    env = Env(points=dict.fromkeys(k.axes, 7))
    assert eval_scalar((k // 2) // -2, env) == (7 // 2) // -2


def test_division_by_zero_stays_written_out() -> None:
    (monomial, _), *_ = floordiv(index(A), index(0)).terms
    assert isinstance(monomial[0], FloorDiv)
    (monomial, _), *_ = mod(index(A), index(0)).terms
    assert isinstance(monomial[0], Mod)


def test_zero_divided_by_anything_is_zero() -> None:
    for divisor in (index(N) // 2, index(N) - 3):  # which may be 0: then nobody asks
        assert floordiv(index(0), divisor) is index(0)
        assert mod(index(0), divisor) is index(0)


def test_coefficient_is_none_where_an_axis_is_not_linear() -> None:
    value = index(A) * N * 3 + index(A) * 2 + B
    assert value.coefficient(A) is index(N) * 3 + 2
    assert value.coefficient(D) is index(0)
    assert (index(A) * A).coefficient(A) is None
    assert (index(D) // 4 + D).coefficient(D) is None


def split(name: str, extent: Index, tile: int) -> tuple[Axis, Axis]:
    """Return outer and ragged inner axis of an extent cut into tiles."""
    outer = Axis(f"{name}o", (extent + (tile - 1)) // tile)
    return outer, Axis(f"{name}i", index(tile), limit=extent - index(outer) * tile)


def realistic_facts() -> dict[str, tuple[Index, Index]]:
    """Return index and extent by name, as views, splits and flat offsets make them."""
    flat = Axis("m", index(N) * T)
    constant = Axis("k", index(M) * 8)
    plain, symbolic = Axis("t", index(8)), Axis("s", index(T))
    co, ci = split("c", index(C), 16)
    full, lane = Axis("u", index(C) // 16), Axis("v", index(16))
    feature = Axis("f", index(C))
    peeled = Axis("w", (index(C) + 15) // 16, limit=index(C) // 16)
    shifted = Axis("y", index(N) * (index(T) - 1))
    heads, quarter = Axis("p", index(QUARTER) * 4), index(QUARTER)
    pairs, pair = Axis("j", index(N) * T // 8), Axis("l", index(8))
    chunk = Axis("g", ((index(C) + 15) // 16 + 2) // 3)
    piece = Axis("z", index(3), limit=index(C) // 16 - index(chunk) * 3)
    halves = Axis("h", index(C) // 2 * 2)
    ten = [Axis(f"x{i}", index(2)) for i in range(10)]
    rank = product([3, N])
    block = (index(Axis("e", index(8))) * 3 + Axis("o", index(3))) // 8
    digit = (index(plain) + 1) % 3 + index(feature) * 2 + 2
    many = Axis("i", index(16))
    quad = (index(many) + 1) // 4
    column = index(Axis("d", index(C) // 4))
    row, half, quarters = Axis("r", index(N)), index(C) - index(C) // 2, index(C) // 4
    groups = Axis("tg", (index(C) // 2 + 15) // 16)
    tile = Axis("to", index(1), limit=index(C) // 32 - groups)
    rows_of = Axis("ng", (index(N) * 4 + 15) // 16)
    rowtile = Axis("no", index(1), limit=(index(N) * 4) // 16 - rows_of)
    return {
        "row of a flattened pair": (index(flat) // T, index(N)),
        "column of a flattened pair": (index(flat) % T, index(T)),
        "row of a constant split": (index(constant) // 8, index(M)),
        "offset of a reshaped row": (
            index(flat) // T * T * C + index(flat) % T * C + feature,
            index(N) * T * C,
        ),
        "reshape to another factor": ((index(flat) * C + feature) // (index(T) * C), index(N)),
        "ragged split": (index(co) * 16 + ci, index(C)),
        "full tiles of a peeled loop": (index(full) * 16 + lane, index(C)),
        "first of the ceiling": (index(0), (index(C) + 15) // 16),
        "roll": ((index(plain) + 3) % 8, index(8)),
        "roll of blocks": ((block + 1) % 3 * 8 + plain, index(24)),
        "roll of a rolled digit": ((digit + 3) % 5, index(5)),
        "roll of blocks of rolled digits": (
            index(many) * 8 - quad * 30 - (quad + 1) // 4 * 8 + 18,
            index(40),
        ),
        "roll of a symbolic axis": ((index(symbolic) + 3) % T, index(T)),
        "flip": (index(T) - 1 - index(symbolic), index(T)),
        "every other element": (index(Axis("h", index(T) // 2)) * 2, index(T)),
        "sliding window": (index(plain) + Axis("w", index(3)), index(10)),
        "peeled tiles of a flattened row": (
            index(flat) // T * T * C + index(flat) % T * C + index(peeled) * 16 + lane,
            index(N) * T * C,
        ),
        "peeled tiles in chunks": (index(chunk) * 48 + index(piece) * 16 + lane, index(C)),
        "half of what may be empty": (index(halves) // (index(C) // 2), index(2)),
        "head of a size in quarters": (index(heads) // quarter, index(4)),
        "feature of a size in quarters": (index(heads) % quarter, quarter),
        "row of tokens but the last": (index(shifted) // (index(T) - 1), index(N)),
        "token but the last": (
            index(shifted) // (index(T) - 1) * T + index(shifted) % (index(T) - 1),
            index(N) * T,
        ),
        "row of pieces of eight": ((index(pairs) * 8 + pair) // T, index(N)),
        "ten axes": (sum((index(x) for x in ten), index(0)), index(11)),
        "interleaved heads": (index(Axis("q", rank)) % 3 * N + index(Axis("p", rank)) // 3, rank),
        "second half of a row": (index(row) * half + index(Axis("h", half)), half * N),
        "full tiles of half a row": (
            index(row) * C + index(groups) * 16 + index(tile) * 16 + lane,
            index(N) * C,
        ),
        "full tiles of rows of quarters": (
            (index(rows_of) * 16 + index(rowtile) * 16 + lane) * quarters + column,
            quarters * N * 4,
        ),
        "last element": (index(N) * T * C - 1, index(N) * T * C),
    }


@pytest.mark.parametrize("name", realistic_facts())
def test_true_facts_of_real_graphs_are_provable(name: str) -> None:
    value, extent = realistic_facts()[name]
    assert is_in_range(value, extent)


def test_polynomials_that_are_negative_somewhere_are_not_proved() -> None:
    # Dominated term by term and 0 at all sizes 1, yet -1 at N=2, M=1.
    assert not is_nonnegative(index(N) * N * M - index(N) * N - index(N) * M + 1)
    assert is_nonnegative(index(N) * M - index(N) - index(M) + 1)
    assert not is_nonnegative(index(N) - M)
    assert not is_in_range(index(A) + 1, index(6))


def test_a_size_that_is_known_to_be_small_bounds_products_with_it() -> None:
    small, shift = Size("S", 3, 1, 5), Size("I", 3, None)
    assert is_nonnegative(index(N) * 5 - index(N) * small)
    assert not is_nonnegative(index(N) * 4 - index(N) * small)
    assert not is_nonnegative(index(shift) * 5 - index(shift) * small)


def test_a_diagonal_is_in_a_matrix_of_any_two_sizes() -> None:
    rows, columns = index(Size("rows", 5, 2)), index(Size("columns", 7, 2))
    i = index(Axis("i", index(Minimum("min_0", 5, 2, None, (rows, columns)))))
    assert is_in_range(i * columns + i, rows * columns)
    assert not is_in_range(i * columns + i * 2, rows * columns)


def test_tiles_of_a_quotient_end_where_it_does() -> None:
    """Each of m groups has n*n//m elements; tiles of 16 that are whole end before these."""
    n, m = index(Size("n", 40, 2)), index(Size("m", 3, 2))
    total = n * n
    group, lane = index(Axis("g", m)), index(Axis("l", index(16)))
    tile = index(Axis("t", total // (m * 16)))
    assert is_in_range(group * (total // m) + tile * 16 + lane, total)
    assert is_in_range(tile * 16 + lane, total // m)
    assert not is_in_range(tile * 17 + lane, total // m)


def test_an_exact_quotient_of_what_may_be_zero_may_be_zero() -> None:
    some, none = Size("S", 8, 1), Size("Z", 8, 0)
    assert is_nonnegative(index(Quotient(index(some), index(4))) - 1)
    assert not is_nonnegative(index(Quotient(index(none), index(4))) - 1)
    assert is_nonnegative(index(Quotient(index(none), index(4))))
    negative = Size("I", -8, None)  # an integer argument
    assert not is_nonnegative(index(Quotient(index(negative), index(4))))


def test_an_index_is_divided_by_an_exact_quotient_as_by_its_dividend() -> None:
    """Rows of 2*n elements are m groups of q each: row a, group g, element e of it."""
    q = index(Quotient(index(N) * 2, index(M)))
    a, group, element = index(A), Axis("g", index(M)), Axis("e", q)
    value = a * q * M + q * group + element
    assert (value // q, value % q) == (a * M + group, index(element))
    assert (value // (index(N) * 2), value % (index(N) * 2)) == (a, q * group + element)
    assert (index(N) * 2) // q is index(M) and index(N) % q is not index(0)


def test_proofs_about_divisions_inside_of_each_other_end() -> None:
    s, axis = index(Size("S", 4, 2, 5)), index(Axis("b", index(5)))
    inner = index(5) // (s + 1)
    assert not is_nonnegative((5 - inner) // s - inner)
    assert not is_nonnegative(2 - (axis + 1) * (index(2) // (axis + 1)))
    sizes = [index(Size(f"S{k}", 7)) for k in range(8)]
    total = index(1)
    for k, size in enumerate(sizes):
        total = total - size // (index(Axis("q", sizes[k - 1])) + k + 2)
    assert not is_nonnegative(total)


def test_sizes_of_either_sign_and_of_zero_are_not_taken_for_extents() -> None:
    any_integer, empty, pair = Size("I", 3, None), Size("Z", 3, 0), Size("P", 3, 2)
    assert not is_nonnegative(index(any_integer))
    assert not is_nonnegative(index(A) + any_integer)
    assert is_nonnegative(index(empty)) and not is_nonnegative(index(empty) - 1)
    assert is_nonnegative(index(pair) - 2) and not is_nonnegative(index(pair) - 3)
    assert Size("P", 3, 2) is pair and Size("P", 3) is not pair


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (index(0), "0"),
        (index(A) * 2 - B + 3, "2*a - b + 3"),
        (-index(A) * N, "-a*N"),
        (index(D) // 4, "(d)//(4)"),
    ],
)
def test_printed_form(value: Index, text: str) -> None:
    assert repr(value) == text
