"""The plan of memory: what it reuses and frees, and that a wrong one is found twice.

``verify_memory`` finds it by rule; the interpreter, which overwrites what is freed or lain over, by
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
from fusec.ir.index import Axis, Size, index
from fusec.ir.interp.graph import run_schedule
from fusec.ir.memory import (
    Allocation,
    Memory,
    NativeRun,
    bytes_of,
    footprint,
    overwritable,
    peak_bytes,
    print_memory,
    trivial_plan,
    verify_memory,
)
from fusec.ir.monoid import MAX, SUM
from fusec.passes.fusion.fuse import fuse, separate
from fusec.passes.memory.buffers import plan_memory
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
    schedule = chain_of(4)
    assert print_memory(schedule, plan_memory(schedule)).splitlines() == [
        "new t0; free x",
        "new t1",
        "t2 over t0",
        "t3 over t1; free t2",
    ]


def test_a_peak_counts_what_is_in_memory_at_once() -> None:
    """Two of a chain's results are, its input aside; of one that lies over another, one."""
    four, over = chain_of(4), reading(lambda t, m, c: load(t, m, c))
    size = bytes_of(four.kernels[0].writes[0])
    assert peak_bytes(four, plan_memory(four)) == 2 * size
    assert peak_bytes(four, trivial_plan(four)) == 4 * size
    assert peak_bytes(over, plan_memory(over)) == 2 * 4 * 8 * 8
    assert peak_bytes(over, plan_memory(over, overwritable)) == 4 * 8 * 8


def test_small_kernels_between_calls_are_runs() -> None:
    chained = chain_of(5)
    size = bytes_of(buffers_of(chained)["t0"])
    (run,) = plan_memory(chained, run_bytes=1 << 18).runs
    assert (run.first, run.last, run.kernels) == (0, 4, ("k0", "k1", "k2", "k3", "k4"))
    assert plan_memory(chained, run_bytes=0).runs == ()
    for most, kernels in ((size, ("k1", "k2", "k3", "k4")), (size - 1, ("k2", "k3", "k4"))):
        (run,) = plan_memory(chained, run_bytes=most).runs
        assert run.kernels == kernels  # the last three need no memory of their own
    called = with_call(Fresh())
    assert [run.kernels for run in plan_memory(called, run_bytes=1 << 18).runs] == [("k1", "k2")]


def test_what_a_run_allocates_is_there_from_its_beginning_to_its_end() -> None:
    schedule = chain_of(5)
    memory = trivial_plan(schedule)
    size = bytes_of(buffers_of(schedule)["t0"])
    freeing = replace(
        memory,
        steps=tuple(
            replace(step, freed=tuple(b for b in kernel.reads if b.name != "x"))
            for step, kernel in zip(memory.steps, schedule.steps, strict=True)
        ),
    )
    verify_memory(schedule, freeing)
    assert peak_bytes(schedule, freeing) == 2 * size
    whole = replace(freeing, runs=(NativeRun(1, ("k1", "k2", "k3")),))
    verify_memory(schedule, whole)
    assert peak_bytes(schedule, whole) == 4 * size
    assert print_memory(schedule, whole).splitlines()[-1] == "run k1, k2, k3"


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ((NativeRun(0, ("k0",)),), "no kernels that follow"),
        ((NativeRun(0, ("k0", "k2")),), "other steps than its kernels"),
        ((NativeRun(1, ("k0", "k1")),), "other steps than its kernels"),
        ((NativeRun(3, ("k3", "k4", "k5")),), "other steps than its kernels"),
        ((NativeRun(0, ("k0", "k1")), NativeRun(1, ("k1", "k2"))), "no kernels that follow"),
    ],
)
def test_a_wrong_run_is_refused(runs: tuple[NativeRun, ...], problem: str) -> None:
    schedule = chain_of(5)
    memory = replace(plan_memory(schedule), runs=runs)
    with pytest.raises(InvalidIR, match=problem):
        verify_memory(schedule, memory)


def test_an_input_that_nobody_reads_goes_at_once() -> None:
    x, y = buffer("x", 4, 6), buffer("y", 4, 6)
    line = unary("t0", x)
    schedule = separate(graph((x, y), (line,), line.buffer))
    assert plan_memory(schedule).unread == (y,)


def test_what_an_eager_kernel_may_see_is_not_written_again() -> None:
    for effect, reused in ((Unknown(), False), (Fresh(), True)):
        schedule = with_call(effect)
        assert ("t1 over t0" in print_memory(schedule, plan_memory(schedule))) == reused


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
    assert print_memory(schedule, plan_memory(schedule)).splitlines() == [
        "new t0; free x",
        "new t1; free t0",
        "new t2; free t1",
        "new t3; free t2",
        "new t4; free t3",
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
    assert print_memory(schedule, plan_memory(schedule, overwritable)).splitlines() == [
        "new t0; free x",
        "t1 over t0; free t0",
        "t2 over t1; free t1",
        "t3 over t2; free t2",
    ]


def test_what_an_eager_kernel_made_is_written_over_if_nobody_else_sees_it() -> None:
    for effect, over in ((Fresh(), True), (Unknown(), False)):
        x, e = buffer("x", 4, 6), buffer("e", 4, 6)
        call = Extern("e", "aten.f", (whole(x),), (), (e,), "", effect=effect)
        last = unary("t0", e)
        schedule = separate(graph((x,), (call, last), last.buffer))
        memory = plan_memory(schedule, overwritable)
        verify_memory(schedule, memory)
        assert ("t0 over e; free e" in print_memory(schedule, memory)) == over


def test_a_kernel_writes_over_a_product_of_another_shape() -> None:
    """A library multiplies matrices: what reads the rows as [batch, time] stores over them."""
    x, w, p = buffer("x", 6, 8), buffer("w", 8, 8), buffer("p", 6, 8)
    b, t, c = axes("b t c", 2, 3, 8)
    y = Def(buffer("y", 2, 3, 8), (b, t, c), Op("neg", (load(p, index(b) * 3 + t, c),)))
    schedule = separate(graph((x, w), (mm("p", whole(x), whole(w), p), y), y.buffer))
    memory = plan_memory(schedule, overwritable)
    verify_memory(schedule, memory)
    assert print_memory(schedule, memory).splitlines()[1] == "y over p; free p"


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
    over = (Allocation(b["y"], b["t"]), Allocation(b["s"], None))
    memory = planted(plan_memory(schedule), 1, allocated=over, freed=(b["t"],))
    wanted, found = run_over(schedule, memory)
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
    memory = plan_memory(schedule, overwritable)
    verify_memory(schedule, memory)
    assert "y over t" in print_memory(schedule, memory)
    np.testing.assert_allclose(*run_over(schedule, memory), rtol=1e-5)


def run_over(schedule: Schedule, memory: Memory) -> tuple[Any, Any]:
    """What is to be computed at last, and what programs compute, one point after another."""
    inputs = (np.arange(64.0, dtype=np.float32).reshape(8, 8),)
    programs = lower_all(schedule, find_target("cpu", 4))
    *_, wanted = run_schedule(schedule, inputs)
    *_, found = run_programs(schedule, programs, inputs, None, memory)
    return wanted, found


@pytest.mark.parametrize("value", [less_the_mean, less_the_column])
def test_what_was_reduced_before_is_written_over(
    value: Callable[[Buffer, Axis, Axis], Expr],
) -> None:
    schedule = reading(value)
    memory = plan_memory(schedule, overwritable)
    assert print_memory(schedule, memory).splitlines()[1] == "t1 over t0; free t0"
    np.testing.assert_array_equal(*run_over(schedule, memory))


@pytest.mark.parametrize("value", [flipped, transposed])
def test_what_is_read_elsewhere_is_not_written_over(
    value: Callable[[Buffer, Axis, Axis], Expr],
) -> None:
    schedule = reading(value)
    memory = plan_memory(schedule, overwritable)
    assert print_memory(schedule, memory).splitlines()[1] == "new t1; free t0"
    b = buffers_of(schedule)
    wrong = planted(memory, 1, allocated=(Allocation(b["t1"], b["t0"]),))
    with pytest.raises(InvalidIR, match="t1 lies over t0, which may be read after t1 is written"):
        verify_memory(schedule, wrong)
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
    memory = plan_memory(schedule, overwritable)
    verify_memory(schedule, memory)
    assert [a.over for a in memory.steps[1].allocated] == [t, None]
    wrong = planted(memory, 1, allocated=tuple(Allocation(b, t) for b in made))
    with pytest.raises(InvalidIR, match="two buffers lie over one"):
        verify_memory(schedule, wrong)


# -- faults ----------------------------------------------------------------------------------------


def planted(memory: Memory, position: int, **change: Any) -> Memory:
    steps = list(memory.steps)
    steps[position] = replace(steps[position], **change)
    return replace(memory, steps=tuple(steps))


def buffers_of(schedule: Schedule) -> dict[str, Buffer]:
    found = [b for step in schedule.steps for b in (*step.reads, *step.writes)]
    return {b.name: b for b in found}


def reuse_too_early(schedule: Schedule, memory: Memory) -> Memory:
    b = buffers_of(schedule)
    early = planted(memory, 1, allocated=(Allocation(b["t1"], b["t0"]),))
    return planted(early, 2, allocated=(Allocation(b["t2"], None),))


def free_too_early(schedule: Schedule, memory: Memory) -> Memory:
    return planted(memory, 1, freed=(buffers_of(schedule)["t1"],))


def an_input_too_early(schedule: Schedule, memory: Memory) -> Memory:
    return replace(planted(memory, 0, freed=()), unread=(buffers_of(schedule)["x"],))


def no_memory(schedule: Schedule, memory: Memory) -> Memory:
    return planted(memory, 0, allocated=())


def over_the_result(schedule: Schedule, memory: Memory) -> Memory:
    return planted(memory, 3, freed=(buffers_of(schedule)["t3"],))


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (reuse_too_early, "t0 is read, and has no memory"),
        (free_too_early, "t1 is read, and has no memory"),
        (an_input_too_early, "x is read, and has no memory"),
        (no_memory, "t0 is written, and has no memory"),
        (over_the_result, "t3 is read, and has no memory"),
    ],
)
def test_a_wrong_plan_is_refused_and_makes_wrong_values(
    plant: Callable[[Schedule, Memory], Memory], problem: str
) -> None:
    schedule = chain_of(4)
    memory = plan_memory(schedule)
    verify_memory(schedule, memory)
    wrong = plant(schedule, memory)
    with pytest.raises(InvalidIR, match=problem):
        verify_memory(schedule, wrong)
    (value,) = run_schedule(schedule, [INPUT], memory=memory)
    np.testing.assert_array_equal(value, INPUT)
    try:
        (value,) = run_schedule(schedule, [INPUT], memory=wrong)
    except InternalError as error:
        assert "has no memory" in str(error)
    else:
        assert np.isnan(value).any()


def test_memory_of_which_a_call_kept_a_view_is_not_written_again() -> None:
    schedule = with_call(Unknown())
    b = buffers_of(schedule)
    memory = plan_memory(schedule)
    wrong = planted(memory, 2, allocated=(Allocation(b["t1"], b["t0"]),))
    wrong = planted(wrong, 1, freed=())
    with pytest.raises(InvalidIR, match="t1 lies over t0, which others may see"):
        verify_memory(schedule, wrong)
    _, right = run_schedule(schedule, [INPUT], same, memory=memory)
    np.testing.assert_array_equal(right, -INPUT)
    _, value = run_schedule(schedule, [INPUT], same, memory=wrong)
    assert (value != -INPUT).any()


@pytest.mark.parametrize(
    ("over", "problem"),
    [("x", "the memory of others"), ("e", "the memory of others"), ("none", "has no memory")],
)
def test_only_memory_of_the_plan_is_written_again(over: str, problem: str) -> None:
    schedule = with_call(Unknown())
    b = {**buffers_of(schedule), "none": buffer("none", 4, 6)}
    memory = planted(plan_memory(schedule), 3, allocated=(Allocation(b["t2"], b[over]),), freed=())
    memory = planted(memory, 0, freed=())
    with pytest.raises(InvalidIR, match=problem):
        verify_memory(schedule, memory)


def test_a_buffer_of_another_layout_does_not_fit() -> None:
    x = buffer("x", 4, 6)
    first = unary("t0", x)
    second = unary("t1", first.buffer)
    m, n = axes("m n", 4, 3)
    half = Def(buffer("t2", 4, 3), (m, n), load(second.buffer, m, n))
    schedule = separate(graph((x,), (first, second, half), half.buffer))
    memory = planted(plan_memory(schedule), 1, freed=())
    wrong = planted(memory, 2, allocated=(Allocation(half.buffer, first.buffer),))
    with pytest.raises(InvalidIR, match="t2 does not fit over t0"):
        verify_memory(schedule, wrong)


def test_a_size_is_known_before_memory_of_it_is_allocated() -> None:
    n = Size("N", 4)
    x = buffer("x", 4, 6)
    line = unary("t0", buffer("y", n, 6))
    schedule = separate(Graph("g", (line.expr.args[0].buffer,), (line,), (whole(line.buffer),)))
    verify_memory(schedule, plan_memory(schedule))
    unknown = replace(schedule, graph=replace(schedule.graph, inputs=(x,)))
    with pytest.raises(InvalidIR, match="the size N is not known yet"):
        verify_memory(unknown, plan_memory(schedule))


@BOUNDED
@given(drawn=random_graphs(symbols=True))
def test_plans_of_random_graphs_keep_values(drawn: Example) -> None:
    with np.errstate(all="ignore"):
        target = small_target("cpu")
        fused = fuse(drawn.graph, target.machine, target.accepts)
        for schedule in (separate(drawn.graph), fused):
            memory = plan_memory(schedule, overwritable)
            verify_memory(schedule, memory)
            wanted = run_schedule(schedule, drawn.inputs, copy_extern)
            found = run_schedule(schedule, drawn.inputs, copy_extern, memory=memory)
            for a, b in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(a, b)
