"""Programs that differ in numbers alone run one function, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusec
from fusec.codegen.parametrize import (
    FunctionCall,
    Functions,
    describe_call,
    one_each,
    parametrize,
    print_entries,
    print_functions,
    verify_functions,
)
from fusec.errors import InvalidIR
from fusec.ir.dtype import BOOL, F32, I32, I64
from fusec.ir.index import Axis, IntoIndex, Size, index
from fusec.ir.program import For, Program, statements
from tests.codegen.programs import Builder, buffer, f32
from tests.support import compile_with

W = 16


def scaled(name: str, rows: IntoIndex, columns: int, *sizes: Size, start: int = 0) -> Program:
    """``y[m, c] = x[m, c + start] * w[c]`` with whole vectors of columns."""
    m, lane, co = (Axis("m", index(rows)), Axis("ci", index(W)), Axis("co", index(columns // W)))
    b = Builder(name, (m,), (lane,))
    x, y = buffer("x", F32, rows, columns + start), buffer("y", F32, rows, columns)
    w = buffer("w", F32, columns)
    with b.loop(co, columns // W):
        c = index(co) * W + lane
        at = index(m) * (columns + start) + c + start
        b.put(y, index(m) * columns + c, b.op("mul", b.load(x, at), b.load(w, c)))
    return replace(b.program(*sizes), work=index(rows) * columns)


FAMILY = (scaled("k0", 32, 192), scaled("k1", 32, 320), scaled("k2", 32, 256))


def shared(*programs: Program, multiple: int = 1) -> Functions:
    """Return functions of programs by their names, verified."""
    functions = parametrize(one_each({p.name: p for p in programs}), multiple)
    verify_functions(functions)
    return functions


def test_numbers_in_one_proportion_are_one_argument() -> None:
    made = shared(*FAMILY)
    assert list(made.functions) == ["k0"]
    assert [made.calls[k].number for k in ("k0", "k1", "k2")] == [3, 5, 4]
    assert describe_call(made, "k1") == "the function of k0, with n = 5 for 3"
    assert made.functions["k0"].notation[-1] == "n is 3 in k0, 5 in k1, 4 in k2"
    (n,) = made.functions["k0"].sizes
    (loop,) = (s for s in statements(made.functions["k0"].body) if isinstance(s, For))
    assert loop.stops == (4 * index(n),)  # what divides all columns is still known
    assert made.functions["k0"].work is index(n) * 2048


def test_numbers_on_a_line_are_one_argument() -> None:
    """Rows of 192, 320 and 256 columns lie 16 more apart: what is in proportion has no summand."""
    made = shared(*(scaled(f"k{c}", 32, c, start=W) for c in (192, 320, 256)))
    assert list(made.functions) == ["k192"]
    assert [call.number for call in made.calls.values()] == [3, 5, 4]
    assert "x[ci + 16*m + 64*m*n" in print_functions(made)


def test_what_differs_by_another_factor_is_of_another_family() -> None:
    others = [scaled(f"k{k}", 64, 64 * k) for k in (3, 4, 5)]
    made = shared(*FAMILY, *others)
    assert list(made.functions) == ["k0", "k3"]
    assert [made.calls[p.name].number for p in others] == [3, 4, 5]


def test_programs_without_two_others_keep_their_numbers() -> None:
    programs = one_each({p.name: p for p in FAMILY[:2]})
    assert parametrize(programs) is programs


def test_programs_with_other_loops_masks_or_statements_stay_apart() -> None:
    others = (
        scaled("k3", 32, 64),  # a loop that the compiler takes apart
        scaled("k3", 32, 192, start=W),  # an index with one term more
        replace(scaled("k3", 32, 448), table=True),
    )
    for other in others:
        made = shared(*FAMILY, other)
        assert list(made.functions) == ["k0", "k3"] and made.calls["k3"] == FunctionCall("k3")


def test_a_number_stands_behind_the_sizes_of_a_program() -> None:
    n = Size("n", 8)
    made = shared(*(scaled(f"k{k}", n, 64 * k, n) for k in (3, 4, 5)))
    (own, number) = made.functions["k3"].sizes
    assert own is n and number.name != "n"
    assert print_entries(made, made.functions)["k5"].endswith(
        "(p_x, p_w, p_y, n_n, 5, status); }\n"
    )


def strided(name: str, step: int, divisor: int) -> Program:
    """``y[i] = x[step * i] + x[i // divisor]`` in lanes."""
    lane, io = Axis("ii", index(W)), Axis("io", index(9))
    b = Builder(name, (), (lane,))
    x, y = buffer("x", F32, 9 * W * step), buffer("y", F32, 9 * W)
    with b.loop(io, 9):
        i = index(io) * W + lane
        near, far = b.load(x, i // divisor), b.load(x, i * step)
        b.put(y, i, b.op("add", near, b.op("maximum", far, f32(0.0))))
    return b.program()


def test_what_says_how_lanes_walk_memory_and_divisors_are_no_arguments() -> None:
    assert len(shared(*(strided(f"k{k}", k, 3) for k in (2, 3, 4))).functions) == 3
    assert len(shared(*(strided(f"k{k}", 2, k) for k in (3, 5, 7))).functions) == 3


def rows(name: str, channels: int, step: int = 1, taken: int = 0) -> Program:
    """``y[b, c, k] = x[b, c, step * k]`` for 4 rows b of a tile: the step between rows differs.

    Args:
        taken: so many of the channels are stored, if not all.
    """
    c, b_axis, lane = Axis("c", index(taken or channels)), Axis("b", index(4)), Axis("k", index(W))
    b = Builder(name, (c,), (b_axis, lane))
    x, y = buffer("x", F32, 4, channels, step * W), buffer("y", F32, 4, channels, W)
    place = index(b_axis) * channels + c
    b.put(y, place * W + lane, b.load(x, place * (step * W) + index(lane) * step))
    return b.program()


def test_steps_between_rows_of_a_tile_are_arguments() -> None:
    made = shared(*(rows(f"k{n}", 32 * n) for n in (3, 5, 4)))
    (function,) = made.functions.values()
    (n,) = function.sizes
    assert (n.hint, n.least, n.most) == (1, 3, 5)  # no launch is to promise a multiple of 16
    assert [b.flat().shape for b in function.buffers] == [(index(4 * 160 * W),)] * 2
    assert "x[512*b*n + k + 16*c]" in print_functions(made)


def test_a_step_of_one_along_any_lane_is_no_argument() -> None:
    """Where one of the rows beside each other became five apart, no access would be whole."""
    programs = [rows(f"k{n}", n, taken=1) for n in (1, 2, 3)]
    turned = [replace(p, lanes=tuple(reversed(p.lanes))) for p in map(_turned, (1, 2, 3))]
    assert len(shared(*programs).functions) == 1
    assert len(shared(*turned).functions) == 3


def _turned(step: int) -> Program:
    """``y[k, b] = x[step * k + 64 * b]``: the lanes that lie beside each other come first."""
    lane, b_axis = Axis("k", index(W)), Axis("b", index(4))
    b = Builder(f"t{step}", (), (b_axis, lane))
    x, y = buffer("x", F32, 512), buffer("y", F32, 64)
    b.put(y, index(lane) * 4 + b_axis, b.load(x, index(lane) * step + index(b_axis) * 64))
    return b.program()


def test_what_is_passed_is_an_argument_of_32_bits() -> None:
    """The start of an ``arange`` is the same number, were there room for it."""

    def starts(name: str, start: int) -> Program:
        m = Axis("m", index(8))
        b = Builder(name, (m,), ())
        b.put(buffer("y", I64, 8), index(m), b.position(index(m) + start, I64))
        return b.program()

    for base, passed in ((1000, [1001, 1002, 1003]), (2**40, [1, 2, 3])):
        made = shared(*(starts(f"k{k}", base + k) for k in (1, 2, 3)))
        assert [call.number for call in made.calls.values()] == passed
    far = shared(*(starts(f"k{k}", k) for k in (1, 2, 2**40)))
    assert len(far.functions) == 3


def test_rows_that_begin_at_other_multiples_stay_apart() -> None:
    """A GPU reads rows of 104 by 8 elements at a time, rows of 100 and 108 by 4."""
    programs = [scaled(f"k{c}", 32, W, start=c - W) for c in (100, 104, 108, 116)]
    assert list(shared(*programs).functions) == ["k100"]
    assert list(shared(*programs, multiple=16).functions) == ["k100", "k104"]


def stepped(name: str, step: int, count: int) -> Program:
    """``y[i, k] = x[step * i, k]`` for rows of a vector, of 28 that there are."""
    lane, io = Axis("ii", index(W)), Axis("io", index(count))
    b = Builder(name, (), (lane,))
    x, y = buffer("x", F32, 28 * W), buffer("y", F32, count * W)
    with b.loop(io, count):
        at = index(io) * W
        b.put(y, at + lane, b.load(x, at * step + lane))
    return b.program()


def test_what_is_in_range_by_no_proof_keeps_its_number() -> None:
    """The last row that is read is one of a square of n."""
    assert len(shared(*(stepped(f"k{n}", n, 9) for n in (1, 2, 3))).functions) == 1
    assert len(shared(*(stepped(f"k{n}", n, 13 - n) for n in (1, 2, 3))).functions) == 3


def test_axes_made_in_another_order_are_the_same() -> None:
    """Terms of an index are in the order in which its axes were made."""

    def copied(name: str, extents: tuple[int, int], *, turned: bool) -> Program:
        made = {key: Axis(key, index(9)) for key in ("ba" if turned else "ab")}
        a, c = made["a"], made["b"]
        b = Builder(name, (a, c), ())
        x, y = buffer("x", F32, 10000), buffer("y", F32, 10000)
        b.put(y, index(a) * 9 + c, b.load(x, index(a) * extents[0] + index(c) * extents[1]))
        return b.program()

    made = shared(
        copied("k0", (700, 70), turned=False),
        copied("k1", (900, 90), turned=True),
        copied("k2", (70, 7), turned=True),
    )
    assert [call.number for call in made.calls.values()] == [70, 90, 7]
    assert list(made.functions) == ["k0"]


@pytest.mark.parametrize("number", [6, 3, None])
def test_a_wrong_number_is_found(number: int | None) -> None:
    made = shared(*FAMILY)
    calls = {**made.calls, "k1": FunctionCall("k0", number)}
    with pytest.raises(InvalidIR):
        verify_functions(replace(made, calls=calls))


def ends(name: str, rows: int) -> Program:
    """``y[m] = m < rows - 2``, whose end is the value of an index."""
    m = Axis("m", index(rows))
    b = Builder(name, (m,), ())
    b.put(
        buffer("y", BOOL, rows), index(m), b.op("lt", b.position(m, I32), b.position(rows - 2, I32))
    )
    return b.program()


def test_a_value_that_is_an_index_is_a_number_too() -> None:
    made = shared(*(ends(f"k{rows}", rows) for rows in (64, 96, 72, 32)))
    assert list(made.functions) == ["k64"]
    assert [call.number for call in made.calls.values()] == [8, 12, 9, 4]
    assert "(8*n - 2):i32" in print_functions(made)


def layers(*values: torch.Tensor) -> list[torch.Tensor]:
    pairs = zip(values[::2], values[1::2], strict=True)
    return [torch.relu(x * w) for x, w in pairs]


def test_an_explanation_says_whose_function_a_kernel_runs() -> None:
    inputs = [torch.randn(shape) for c in (192, 320, 256) for shape in ((24, c), (c,))]
    (graph,) = fusec.explain(layers, *inputs, train=False).graphs
    said = [kernel.function for kernel in graph.kernels]
    assert "" in said and any("with n = 5 for 3" in one for one in said)
    assert "with n = 5 for 3" in str(graph)


def joined(*values: torch.Tensor) -> list[torch.Tensor]:
    pairs = zip(values[::2], values[1::2], strict=True)
    return [torch.cat([x, y], 1).sin() for x, y in pairs]


def test_cats_whose_ends_are_elsewhere_run_one_function() -> None:
    inputs = [torch.randn(24, c) for n in (192, 320, 256) for c in (n, 32)]
    (graph,) = fusec.explain(joined, *inputs, train=False).graphs
    assert sum("the function of" in kernel.function for kernel in graph.kernels) == 2
    for value, expected in zip(compile_with(joined)(*inputs), joined(*inputs), strict=True):
        torch.testing.assert_close(value, expected)


def test_layers_of_several_widths_compute_what_they_do_apart() -> None:
    """One function runs all, with sizes of its own where the batch is one."""
    inputs = [torch.randn(shape) for c in (192, 320, 256) for shape in ((24, c), (c,))]
    for dynamic in (False, True):
        for value, expected in zip(
            compile_with(layers, dynamic=dynamic)(*inputs), layers(*inputs), strict=True
        ):
            torch.testing.assert_close(value, expected)
