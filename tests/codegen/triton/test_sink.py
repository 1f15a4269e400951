"""Values sink to their first use, and programs keep their meaning."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from fusec.codegen.triton.sink import sink
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Dot, Op
from fusec.ir.index import Axis, Size, index
from fusec.ir.monoid import SUM
from fusec.ir.program import Program, print_program
from fusec.ir.verify_program import verify_program
from fusec.tools.interpreter.program import run_program
from fusec.tools.interpreter.scalar import numpy_type
from tests.codegen import programs
from tests.codegen.programs import Builder, buffer, f32


def shape(program: Program) -> list[str]:
    """Return the program's statements without numbers in names."""
    text = "".join(c for c in print_program(program) if not c.isdigit())
    return [line.strip() for line in text.splitlines()[1:]]


def scaled_row(*, scale_first: bool) -> Program:
    c = Axis("c", index(8))
    b = Builder("k", (), (c,))
    w = b.load(buffer("w", F32, 8), c)
    x = b.load(buffer("x", F32, 8), c)
    b.op("exp", x)
    total = b.reduce(SUM, (c,), x)
    b.put(buffer("y", F32, 8), c, b.op("mul", *((w, total) if scale_first else (total, w))))
    return b.program()


@pytest.mark.parametrize("scale_first", [False, True])
def test_load_moves_behind_the_reduction_it_does_not_need(scale_first: bool) -> None:
    product = "w * sum" if scale_first else "sum * w"
    assert shape(sink(scaled_row(scale_first=scale_first))) == [
        "x<c> = x[c]",
        "sum = sum(c: x)",
        "w<c> = w[c]",
        f"t<c> = {product}",
        "y[c] = t",
    ]


def test_load_stays_above_a_store_to_its_buffer() -> None:
    c = Axis("c", index(8))
    b = Builder("swap", (), (c,))
    x, y = buffer("x", F32, 8), buffer("y", F32, 8)
    old_x, old_y = b.load(x, c), b.load(y, c)
    b.put(x, c, old_y)
    b.put(y, c, old_x)
    assert shape(sink(b.program())) == ["y<c> = y[c]", "x<c> = x[c]", "x[c] = y", "y[c] = x"]


def test_use_of_a_carry_stays_above_its_update() -> None:
    k = Axis("k", index(3))
    b = Builder("fibonacci", (), ())
    last, this = b.carry(f32(0.0)), b.carry(f32(1.0))
    with b.loop(k, 3):
        following = b.op("add", last, this)
        b.update(last, this)
        b.update(this, following)
    b.put(buffer("y", F32, 1), 0, this)
    program = b.program()
    assert run(sink(program))["y"].tolist() == run(program)["y"].tolist() == [3.0]


def test_value_used_in_a_loop_is_computed_before_it() -> None:
    k = Axis("k", index(3))
    b = Builder("k", (), ())
    acc = b.carry(f32(0.0))
    step = b.load(buffer("x", F32, 1), 0)
    with b.loop(k, 3):
        b.update(acc, Op("add", (acc, step)))
    b.put(buffer("y", F32, 1), 0, acc)
    assert shape(sink(b.program()))[1] == "x = x[]"


@pytest.mark.parametrize(
    "program",
    [
        programs.layer_norm(3, 64),
        programs.softmax(6, 50, 64, 2),
        programs.looped_row_sum(3, 90, 32),
        programs.bias_tile(64, 32, (16, 32)),
        programs.relu_chain(BF16, 100, 64, masked=True),
        scaled_row(scale_first=True),
    ],
    ids=lambda p: p.name,
)
def test_meaning_is_kept(program: Program) -> None:
    before, after = run(program), run(sink(program))
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)


def gated_product(kind: str) -> Program:
    """h = exp(x), then y = (a @ b) * exp(x), where ``kind`` says what stands in h's way."""
    m, n, k = (Axis(name, index(size)) for name, size in (("m", 4), ("n", 8), ("k", 2)))
    ko, here = Axis("ko", index(3)), index(m) * 8 + n
    x, h, y = (buffer(name, F32, 4, 8) for name in "xhy")
    b = Builder("gated", (), (m, n, k))
    gate = b.op("exp", b.load(x, here))
    acc = b.carry(f32(0.0), m, n)
    b.put(x if kind == "loaded" else h, here, gate)
    with b.loop(ko, 3):
        left = b.load(buffer("a", F32, 4, 6), index(m) * 6 + index(ko) * 2 + k)
        right = b.load(buffer("b", F32, 6, 8), (index(ko) * 2 + k) * 8 + n)
        if kind == "needed":
            right = b.op("mul", right, b.load(x, here))
            b.put(buffer("z", F32, 4, 8), here, b.op("neg", gate))
        if kind == "loaded":
            b.put(buffer("z", F32, 4, 8), here, b.load(x, here))
        b.update(acc, Dot(left, right, (k,), acc, False))
    b.put(y, here, b.op("mul", acc, b.op("neg", gate) if kind == "short" else gate))
    return b.program()


def test_a_store_that_shares_a_tile_with_one_behind_the_loop_stands_before_that() -> None:
    assert shape(sink(gated_product("free")))[-5:] == [
        "x<m, n> = x[*m + n]",
        "t<m, n> = exp(x)",
        "t<m, n> = acc * t",
        "h[*m + n] = t",
        "y[*m + n] = t",
    ]


@pytest.mark.parametrize("kind", ["needed", "loaded"])
def test_a_store_stays_where_others_need_its_tile_or_its_buffer(kind: str) -> None:
    lines = shape(sink(gated_product(kind)))
    store = next(n for n, line in enumerate(lines) if line.startswith(("h[", "x[")))
    assert store < next(n for n, line in enumerate(lines) if line.startswith("for "))


@pytest.mark.parametrize("kind", ["free", "needed", "loaded", "short"])
def test_meaning_is_kept_beside_products(kind: str) -> None:
    program = gated_product(kind)
    before, after = run(program), run(sink(program))
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)


def test_sinking_twice_changes_nothing_more() -> None:
    once = sink(programs.layer_norm(Size("M", 8), 64))
    assert print_program(sink(once)) == print_program(once)


def run(program: Program) -> dict[str, np.ndarray]:
    storage = {}
    for position, b in enumerate(program.reads):
        count = b.flat().shape[0].const
        generator = np.random.default_rng(position)
        storage[b] = generator.standard_normal(count).astype(numpy_type(b.dtype))
    run_program(program, storage, {})
    return {b.name: storage[b] for b in program.writes}


@pytest.mark.parametrize("width", (8, 9), ids=("in vectors", "one by one"))
def test_a_number_of_each_packed_row_in_f32_keeps_its_name(width: int) -> None:
    """Two of 16 bits are combined in a register: the backward of a norm did not build."""
    m, c, r = Axis("m", index(2)), Axis("c", index(8)), Axis("r", index(2))
    b = Builder("rows", (), (r, c))
    with b.loop(m, 2):
        row = index(m) * 2 + index(r)
        x = b.load(buffer("x", BF16, 4 * width), row * width + c)
        scaled = b.op("mul", b.cast(x, F32), b.load(buffer("s", F32, 4), row))
        total = b.reduce(SUM, (c,), scaled)
        b.put(buffer("y", F32, 4 * width), row * width + c, b.op("mul", scaled, total))
    program = replace(b.program(), packed=True)
    text = print_program(sink(program))
    assert re.search(r"x\d+_again<", text) and not re.search(r"s\d+_(again|loaded)<", text)
    assert ("_loaded<" in text) is (width == 9)
    found, expected = (run(p)["y"].reshape(4, width)[:, :8] for p in (sink(program), program))
    assert (found == expected).all()


def test_what_stands_behind_the_sums_of_packed_rows_is_computed_again() -> None:
    m, c = Axis("m", index(3)), Axis("c", index(8))
    b = Builder("rows", (), (c,))
    with b.loop(m, 3):
        x = b.load(buffer("x", BF16, 24), index(m) * 8 + c)
        wide = b.cast(x, F32)
        total = b.reduce(SUM, (c,), b.op("mul", wide, wide))
        result = b.op("exp", b.op("mul", wide, total))
        b.put(buffer("y", F32, 24), index(m) * 8 + c, result)
    program = replace(b.program(), packed=True)
    assert shape(sink(program))[1:] == [
        *("x<c> = x[*m + c]", "t<c> = f(x)", "t<c> = t * t", "sum = sum(c: t)"),
        *("x_again<c> = x", "t_again<c> = f(x_again)", "t<c> = t_again * sum"),
        *("t<c> = exp(t)", "y[*m + c] = t"),
    ]
    verify_program(sink(program))
    assert (run(sink(program))["y"] == run(program)["y"]).all()
