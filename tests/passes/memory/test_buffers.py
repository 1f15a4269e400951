"""Host programs: what they reuse, free and launch together, and that a wrong one is found twice.

``verify_host`` finds it by rule; the interpreter, which overwrites what is freed or lain over, by
wrong values. Both see each planted fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from fusec.codegen.targets import find_target
from fusec.errors import InternalError, InvalidIR
from fusec.ir.expr import Buffer, Expr, Op, loads
from fusec.ir.extern import Effect, Fresh, Unknown
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule, Store
from fusec.ir.host import (
    Allocation,
    FreeBuffers,
    HostProgram,
    HostStatement,
    NativeRun,
    print_host,
    verify_host,
)
from fusec.ir.index import Axis, Size, index
from fusec.ir.memory import bytes_of, footprint, overwritable
from fusec.ir.monoid import MAX, SUM
from fusec.passes.fusion.fuse import fuse, separate
from fusec.passes.memory.buffers import plan_host
from fusec.tools.interpreter.graph import run_graph
from fusec.tools.report.traffic import peak_bytes
from tests.codegen.host.test_wrapper import chain, unary
from tests.fuzz.graphs import Example, copy_extern
from tests.fuzz.pipeline import lower_all, run_programs, small_target
from tests.ir.graphs import F32, axes, buffer, graph, load, mm, total, whole
from tests.passes.pipelines import BOUNDED, random_graphs

INPUT = np.arange(24.0, dtype=np.float32).reshape(4, 6)


def chain_of(count: int) -> Schedule:
    """x -> t0 -> t1 -> ...: t1 and those after it lie over the one before the last."""
    return separate(chain(*[F32] * count)[0])


def with_call(effect: Effect) -> Schedule:
    """x -> t0 -> call -> e -> t1 -> t2; returns e as well: t1 has t0's layout."""
    x, e = buffer("x", 4, 6), buffer("e", 4, 6)
    first = unary("t0", x)
    call = Extern("e", "aten.f", (whole(first.buffer),), (), (e,), "", effect=effect)
    second = unary("t1", e)
    last = unary("t2", second.buffer)
    return separate(graph((x,), (first, call, second, last), last.buffer, e))


def same(call: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """A call that returns its argument, as a view."""
    return [args[0]]


# -- plans -----------------------------------------------------------------------------------------


def test_a_chain_lies_in_two_places() -> None:
    assert print_host(plan_host(chain_of(4))).splitlines() == [
        "new t0",
        "k0: x -> t0",
        "free x",
        "new t1",
        "k1: t0 -> t1",
        "t2 over t0",
        "k2: t1 -> t2",
        "free t0",
        "t3 over t1",
        "k3: t2 -> t3",
        "free t1, t2",
    ]


def test_a_peak_counts_what_is_in_memory_at_once() -> None:
    """Two of a chain's results are, its input aside; of one that lies over another, one."""
    four, over = chain_of(4), reading(lambda t, m, c: load(t, m, c))
    size = bytes_of(four.kernels[0].writes[0])
    assert peak_bytes(plan_host(four)) == 2 * size
    assert peak_bytes(plan_host(over)) == 2 * 4 * 8 * 8
    assert peak_bytes(plan_host(over, overwritable)) == 4 * 8 * 8


def runs_of(schedule: Schedule, run_bytes: int) -> list[tuple[str, ...]]:
    """The names of the kernels of each run."""
    statements = plan_host(schedule, run_bytes=run_bytes).statements
    runs = (s for s in statements if isinstance(s, NativeRun))
    return [tuple(kernel.name for kernel in run.kernels) for run in runs]


def test_small_kernels_between_calls_are_runs() -> None:
    chained = chain_of(5)
    size = bytes_of(buffers_of(chained)["t0"])
    assert runs_of(chained, 1 << 18) == [("k0", "k1", "k2", "k3", "k4")]
    assert runs_of(chained, 0) == []
    assert runs_of(chained, size) == [("k1", "k2", "k3", "k4")]
    assert runs_of(chained, size - 1) == [("k2", "k3", "k4")]  # they need no memory of their own
    assert runs_of(with_call(Fresh()), 1 << 18) == [("k1", "k2")]


def test_what_a_run_allocates_is_there_from_its_beginning_to_its_end() -> None:
    schedule = chain_of(5)
    apart, together = (plan_host(schedule, run_bytes=most) for most in (0, 1 << 18))
    size = bytes_of(buffers_of(schedule)["t0"])
    for host in (apart, together):
        verify_host(host)
        assert peak_bytes(host) == 2 * size
    assert print_host(together).splitlines() == [
        "new t0",
        "new t1",
        "t2 over t0",
        "t3 over t1",
        "t4 over t2",
        "run k0, k1, k2, k3, k4: x -> t0, t1, t2, t3, t4",
        "free t0, t1, t2, x, t3",
    ]


def test_a_run_of_one_kernel_is_refused() -> None:
    host = plan_host(chain_of(4))
    one = NativeRun((host.statements[1],))
    with pytest.raises(InvalidIR, match="a run of fewer than two kernels"):
        verify_host(planted(host, host.statements[1], one))


def test_an_input_that_nobody_reads_goes_at_once() -> None:
    x, y = buffer("x", 4, 6), buffer("y", 4, 6)
    line = unary("t0", x)
    schedule = separate(graph((x, y), (line,), line.buffer))
    assert plan_host(schedule).statements[0] == FreeBuffers((y,))


def test_what_an_eager_kernel_may_see_is_not_written_again() -> None:
    for effect, reused in ((Unknown(), False), (Fresh(), True)):
        schedule = with_call(effect)
        assert ("t1 over t0" in print_host(plan_host(schedule))) == reused


def test_waiting_never_needs_more_memory() -> None:
    """t4 would fit t0, which is dead long before; but t0 would wait while the large ones live."""
    x = buffer("x", 4, 6)
    first = unary("t0", x)
    large = [buffer(name, 4, 600) for name in ("t1", "t2")]
    i, j, m, n = axes("i j m n", 4, 600, 4, 6)
    spread = Def(large[0], (i, j), load(first.buffer, i, 0))
    between = unary("t2", large[0])
    gathered = Def(buffer("t3", 4, 6), (m, n), load(between.buffer, m, n))
    last = unary("t4", gathered.buffer)
    lines = (first, spread, between, gathered, last)
    schedule = separate(graph((x,), lines, last.buffer))
    assert memory_lines(plan_host(schedule)) == [
        *("new t0", "free x", "new t1", "free t0", "new t2", "free t1"),
        *("new t3", "free t2", "new t4", "free t3"),
    ]


# -- over what dies in the step --------------------------------------------------------------------


def reading(value: Callable[[Buffer, Axis, Axis], Expr]) -> Schedule:
    """x -> t0 -> t1, by a value of t0 at (m, c); one kernel a line."""
    first = unary("t0", buffer("x", 8, 8))
    m, c = axes("m c", 8, 8)
    last = Def(buffer("t1", 8, 8), (m, c), value(first.buffer, m, c))
    return separate(graph((buffer_of(first),), (first, last), last.buffer))


def buffer_of(line: Def) -> Buffer:
    """The buffer that a line reads."""
    (read,) = {load.buffer for load in loads((line.expr,))}
    return read


def less_the_mean(t: Buffer, m: Axis, c: Axis) -> Expr:
    (k,) = axes("k", 8)
    return Op("sub", (load(t, m, c), total(SUM, k, load(t, m, k))))


def less_the_column(t: Buffer, m: Axis, c: Axis) -> Expr:
    (k,) = axes("k", 8)
    return Op("sub", (load(t, m, c), total(SUM, k, load(t, k, c))))


def transposed(t: Buffer, m: Axis, c: Axis) -> Expr:
    return load(t, c, m)


def flipped(t: Buffer, m: Axis, c: Axis) -> Expr:
    return load(t, 7 - index(m), c)


def test_a_kernel_writes_over_what_dies_in_it() -> None:
    schedule = chain_of(4)
    assert memory_lines(plan_host(schedule, overwritable)) == [
        *("new t0", "free x", "t1 over t0", "free t0"),
        *("t2 over t1", "free t1", "t3 over t2", "free t2"),
    ]


def test_what_an_eager_kernel_made_is_written_over_if_nobody_else_sees_it() -> None:
    for effect, over in ((Fresh(), True), (Unknown(), False)):
        x, e = buffer("x", 4, 6), buffer("e", 4, 6)
        call = Extern("e", "aten.f", (whole(x),), (), (e,), "", effect=effect)
        last = unary("t0", e)
        schedule = separate(graph((x,), (call, last), last.buffer))
        host = plan_host(schedule, overwritable)
        verify_host(host)
        assert ("t0 over e" in memory_lines(host)) == over


def test_a_kernel_writes_over_a_product_of_another_shape() -> None:
    """A library multiplies matrices: what reads the rows as [batch, time] stores over them."""
    x, w, p = buffer("x", 6, 8), buffer("w", 8, 8), buffer("p", 6, 8)
    b, t, c = axes("b t c", 2, 3, 8)
    y = Def(buffer("y", 2, 3, 8), (b, t, c), Op("neg", (load(p, index(b) * 3 + t, c),)))
    schedule = separate(graph((x, w), (mm("p", whole(x), whole(w), p), y), y.buffer))
    host = plan_host(schedule, overwritable)
    verify_host(host)
    assert memory_lines(host)[-2:] == ["y over p", "free p"]


def test_memory_of_nothing_is_not_written_again() -> None:
    """[3, 0] has the extent of [2] by its strides."""
    assert footprint(buffer("a", 3, 0)) != footprint(buffer("b", 2))


def summed_beside(late: bool) -> Schedule:
    """t = -x, y = -t, and s[c], a sum of t over m: in a later loop where it is of a maximum."""
    x = buffer("x", 8, 8)
    first = unary("t", x)
    m, c, k = axes("m c k", 8, 8, 8)
    at = (index(m), index(c))
    value: Expr = load(first.buffer, m, c)
    summed = Op("mul", (value, total(MAX, k, load(x, k, c)))) if late else value
    stores = (
        Store(buffer("y", 8, 8), at, Op("neg", (value,))),
        Store(buffer("s", 8), (index(c),), total(SUM, m, summed)),
    )
    kernel = Kernel("k9", (c,), (m, k) if late else (m,), stores)
    apart = separate(graph((x,), (first,), first.buffer))
    outputs = tuple(whole(b) for b in kernel.writes)
    return replace(apart, steps=(*apart.steps, kernel), graph=replace(apart.graph, outputs=outputs))


@pytest.mark.parametrize("late", [False, True])
def test_what_is_summed_where_a_result_is_stored_is_loaded_once_for_both(late: bool) -> None:
    """A bias's gradient beside the gradient behind it. A sum in a later loop would load y for t."""
    schedule = summed_beside(late)
    b = buffers_of(schedule)
    assert overwritable(schedule.kernels[-1]) == ({} if late else {b["y"]: (b["t"],)})
    host = planted(plan_host(schedule), Allocation(b["y"]), Allocation(b["y"], b["t"]))
    wanted, found = run_over(schedule, host)
    assert (found != wanted).any() == late


def test_a_sum_beside_a_store_waits_for_what_the_store_does() -> None:
    """The gradient of a softmax, and that of a bias of its scores: both need the sum of a row."""
    x = buffer("x", 8, 8)
    first = unary("t", x)
    m, c = axes("m c", 8, 8)
    value = load(first.buffer, m, c)
    centred = Op("sub", (value, total(SUM, c, Op("mul", (value, load(x, m, c))))))
    stores = (
        Store(buffer("y", 8, 8), (index(m), index(c)), centred),
        Store(buffer("s", 8), (index(c),), total(SUM, m, centred)),
    )
    kernel = Kernel("k9", (), (m, c), stores)
    apart = separate(graph((x,), (first,), first.buffer))
    outputs = tuple(whole(b) for b in reversed(kernel.writes))
    schedule = replace(
        apart, steps=(*apart.steps, kernel), graph=replace(apart.graph, outputs=outputs)
    )
    host = plan_host(schedule, overwritable)
    verify_host(host)
    assert "y over t" in memory_lines(host)
    np.testing.assert_allclose(*run_over(schedule, host), rtol=1e-5)


def run_over(schedule: Schedule, host: HostProgram) -> tuple[Any, Any]:
    """What is to be computed at last, and what programs compute, one point after another."""
    inputs = (np.arange(64.0, dtype=np.float32).reshape(8, 8),)
    programs = lower_all(schedule, find_target("cpu", 4))
    *_, wanted = run_graph(schedule, inputs)
    *_, found = run_programs(host, programs, inputs, None)
    return wanted, found


@pytest.mark.parametrize("value", [less_the_mean, less_the_column])
def test_what_was_reduced_before_is_written_over(
    value: Callable[[Buffer, Axis, Axis], Expr],
) -> None:
    schedule = reading(value)
    host = plan_host(schedule, overwritable)
    assert memory_lines(host)[-2:] == ["t1 over t0", "free t0"]
    np.testing.assert_array_equal(*run_over(schedule, host))


@pytest.mark.parametrize("value", [flipped, transposed])
def test_what_is_read_elsewhere_is_not_written_over(
    value: Callable[[Buffer, Axis, Axis], Expr],
) -> None:
    schedule = reading(value)
    host = plan_host(schedule, overwritable)
    assert memory_lines(host)[-2:] == ["new t1", "free t0"]
    b = buffers_of(schedule)
    wrong = planted(host, Allocation(b["t1"]), Allocation(b["t1"], b["t0"]))
    with pytest.raises(InvalidIR, match="t1 lies over t0, which may be read after t1 is written"):
        verify_host(wrong)
    wanted, found = run_over(schedule, wrong)
    assert (found != wanted).any()


def test_a_sweep_writes_over_what_the_ones_before_it_have_read() -> None:
    t, s, y = (buffer(n, 4, 6) for n in ("t", "s", "y"))
    m, c = axes("m c", 4, 6)
    spread = Op("sub", (load(t, m, c), total(SUM, c, load(t, m, c))))
    for extra, over in (
        ((), True),
        ((Store(s, (index(m), index(c)), Op("neg", (load(t, m, c),))),), False),
    ):
        store = Store(y, (index(m), index(c)), spread)
        kernel = Kernel("k0", (m,), (c,), (store, *extra))
        assert overwritable(kernel) == ({y: (t,)} if over else {})


def test_two_results_do_not_lie_over_one_operand() -> None:
    x, t = buffer("x", 4, 6), buffer("t", 4, 6)
    m, c = axes("m c", 4, 6)
    made = [buffer(name, 4, 6) for name in ("y", "z")]
    at = (index(m), index(c))
    first = Kernel("k0", (m, c), (), (Store(t, at, Op("neg", (load(x, m, c),))),))
    stores = tuple(
        Store(b, at, Op(op, (load(t, m, c),))) for b, op in zip(made, ("neg", "exp"), strict=True)
    )
    second = Kernel("k1", (m, c), (), stores)
    lines = separate(graph((x,), (unary("t", x),), x))
    schedule = replace(
        lines, steps=(first, second), graph=replace(lines.graph, outputs=tuple(map(whole, made)))
    )
    host = plan_host(schedule, overwritable)
    verify_host(host)
    y, z = made
    assert [Allocation(y, t), Allocation(z)] == list(host.statements[3:5])
    wrong = planted(host, Allocation(z), Allocation(z, t))
    with pytest.raises(InvalidIR, match="y is read where z was written"):
        verify_host(wrong)


# -- faults ----------------------------------------------------------------------------------------


def planted(host: HostProgram, old: HostStatement, *new: HostStatement) -> HostProgram:
    """A program with one statement replaced."""
    assert old in host.statements
    return replace(
        host,
        statements=tuple(x for s in host.statements for x in (new if s == old else (s,))),
    )


def memory_lines(host: HostProgram) -> list[str]:
    """The lines of a program's text that allocate and free."""
    return [line for line in print_host(host).splitlines() if ": " not in line]


def buffers_of(schedule: Schedule) -> dict[str, Buffer]:
    found = [b for step in schedule.steps for b in (*step.reads, *step.writes)]
    return {b.name: b for b in found}


Buffers = dict[str, Buffer]


def free_too_early(host: HostProgram, b: Buffers) -> HostProgram:
    return planted(host, FreeBuffers((b["x"],)), FreeBuffers((b["x"], b["t0"])))


def an_input_too_early(host: HostProgram, b: Buffers) -> HostProgram:
    return replace(host, statements=(FreeBuffers((b["x"],)), *host.statements))


def no_memory(host: HostProgram, b: Buffers) -> HostProgram:
    return planted(host, Allocation(b["t0"]))


def over_the_result(host: HostProgram, b: Buffers) -> HostProgram:
    return planted(host, FreeBuffers((b["t1"], b["t2"])), FreeBuffers((b["t3"],)))


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (free_too_early, "t0 is read, and has no memory"),
        (an_input_too_early, "x is read, and has no memory"),
        (no_memory, "t0 is written, and has no memory"),
        (over_the_result, "t3 is read, and has no memory"),
    ],
)
def test_a_wrong_plan_is_refused_and_makes_wrong_values(
    plant: Callable[[HostProgram, Buffers], HostProgram], problem: str
) -> None:
    schedule = chain_of(4)
    host = plan_host(schedule)
    verify_host(host)
    wrong = plant(host, buffers_of(schedule))
    with pytest.raises(InvalidIR, match=problem):
        verify_host(wrong)
    (value,) = run_graph(host, [INPUT])
    np.testing.assert_array_equal(value, INPUT)
    try:
        (value,) = run_graph(wrong, [INPUT])
    except InternalError as error:
        assert "has no memory" in str(error)
    else:
        assert np.isnan(value).any()


def test_a_value_that_is_read_later_is_not_written_over() -> None:
    x = buffer("x", 4, 6)
    first = unary("t0", x)
    second = unary("t1", first.buffer)
    m, c = axes("m c", 4, 6)
    both = Op("add", (load(first.buffer, m, c), load(second.buffer, m, c)))
    last = Def(buffer("t2", 4, 6), (m, c), both)
    schedule = separate(graph((x,), (first, second, last), last.buffer))
    host, b = plan_host(schedule, overwritable), buffers_of(schedule)
    verify_host(host)
    wrong = planted(host, Allocation(b["t1"]), Allocation(b["t1"], b["t0"]))
    with pytest.raises(InvalidIR, match="t0 is read where t1 was written"):
        verify_host(wrong)
    assert (run_graph(wrong, [INPUT])[0] != run_graph(host, [INPUT])[0]).any()


def test_memory_of_which_a_call_kept_a_view_is_not_written_again() -> None:
    schedule = with_call(Unknown())
    b = buffers_of(schedule)
    host = plan_host(schedule)
    wrong = planted(host, Allocation(b["t1"]), Allocation(b["t1"], b["t0"]))
    wrong = planted(wrong, FreeBuffers((b["t0"],)))
    with pytest.raises(InvalidIR, match="t1 lies over t0, which others may see"):
        verify_host(wrong)
    _, right = run_graph(host, [INPUT], same)
    np.testing.assert_array_equal(right, -INPUT)
    _, value = run_graph(wrong, [INPUT], same)
    assert (value != -INPUT).any()


@pytest.mark.parametrize(
    ("over", "problem"),
    [("x", "the memory of others"), ("e", "the memory of others"), ("none", "has no memory")],
)
def test_only_memory_of_the_plan_is_written_again(over: str, problem: str) -> None:
    schedule = with_call(Unknown())
    b = {**buffers_of(schedule), "none": buffer("none", 4, 6)}
    host = planted(plan_host(schedule), Allocation(b["t2"]), Allocation(b["t2"], b[over]))
    host = planted(host, FreeBuffers((b["x"],)))
    with pytest.raises(InvalidIR, match=problem):
        verify_host(host)


def test_a_buffer_of_another_layout_does_not_fit() -> None:
    x = buffer("x", 4, 6)
    first = unary("t0", x)
    second = unary("t1", first.buffer)
    m, n = axes("m n", 4, 3)
    half = Def(buffer("t2", 4, 3), (m, n), load(second.buffer, m, n))
    schedule = separate(graph((x,), (first, second, half), half.buffer))
    host = planted(plan_host(schedule), FreeBuffers((first.buffer,)))
    wrong = planted(host, Allocation(half.buffer), Allocation(half.buffer, first.buffer))
    with pytest.raises(InvalidIR, match="t2 does not fit over t0"):
        verify_host(wrong)


def test_a_size_is_known_before_memory_of_it_is_allocated() -> None:
    n = Size("N", 4)
    x = buffer("x", 4, 6)
    line = unary("t0", buffer("y", n, 6))
    schedule = separate(Graph("g", (line.expr.args[0].buffer,), (line,), (whole(line.buffer),)))
    host = plan_host(schedule)
    verify_host(host)
    unknown = replace(host, graph=replace(schedule.graph, inputs=(x,)))
    with pytest.raises(InvalidIR, match="the size N is not known yet"):
        verify_host(unknown)


@BOUNDED
@given(drawn=random_graphs(symbols=True))
def test_plans_of_random_graphs_keep_values(drawn: Example) -> None:
    with np.errstate(all="ignore"):
        target = small_target("cpu")
        fused = fuse(drawn.graph, target.machine, target.accepts)
        for schedule in (separate(drawn.graph), fused):
            host = plan_host(schedule, overwritable, run_bytes=1 << 18)
            verify_host(host)
            wanted = run_graph(schedule, drawn.inputs, copy_extern)
            found = run_graph(host, drawn.inputs, copy_extern)
            for a, b in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(a, b)
