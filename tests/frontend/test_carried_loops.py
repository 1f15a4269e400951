"""Loops that carry state, ``torch.scan`` and ``torch.while_loop``: all that they do is eager's."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import fusec
from fusec.codegen.host.runs import print_run, run_codes
from fusec.codegen.targets import find_target
from fusec.driver.compiler import RECENT
from fusec.errors import InvalidIR
from fusec.ir.expr import Buffer
from fusec.ir.graph import Schedule
from fusec.ir.host import verify_host
from fusec.ir.index import index
from fusec.ir.text import print_schedule
from fusec.ir.verify import verify_schedule
from fusec.passes.fusion.fuse import separate
from fusec.passes.graph.chunk import cut_loops
from fusec.passes.memory.buffers import plan_host
from fusec.tools.interpreter.graph import run_graph
from tests.frontend.tracing import graph_of
from tests.fuzz.pipeline import lower_all
from tests.support import check, externs, since_2_13, trains_scans, values

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Function: TypeAlias = Callable[..., Any]


def wrapper_of(fn: Function, *inputs: torch.Tensor, **options: Any) -> str:
    """Return the one wrapper of a function, which is compiled and compared with eager."""
    check(fn, *inputs, **options)
    assert [trace.problem for trace in RECENT] == [None] * len(RECENT)
    return "\n".join(trace.wrapper for trace in RECENT)


def rnn(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    return scan(lambda h, r: ((r + h @ w).tanh(), (h * 2).sin()), h, x)


H, X, W = values(4, 8), values(6, 4, 8, seed=1), values(8, 8, seed=2)


def test_a_scan_is_one_native_call_without_copies():
    wrapper = wrapper_of(rnn, H, X, W)
    assert wrapper.count("scan(") == 1 and "copy" not in wrapper and "for " not in wrapper
    assert externs(rnn, H, X, W) == []


def test_values_that_are_carried_take_turns_in_two_buffers():
    def fibonacci(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
        return scan(lambda c, x: ((c[1] + 0, c[0] + c[1] + x), c[0] - x), (a, b), x)

    one, x = torch.ones(3, dtype=torch.int64), torch.zeros(9, 3, dtype=torch.int64)
    for steps in (1, 2, 3, 8, 9):
        check(fibonacci, one, one.clone(), x[:steps])


def sum_of_squares(h: torch.Tensor, x: torch.Tensor) -> Any:
    return scan(lambda h, r: (h + r * r, h.clone()), h, x)


LAYOUTS: dict[str, Tensors] = {
    "plain": (values(3, 4), values(5, 3, 4)),
    "rows apart": (values(3, 4), values(5, 4, 3).transpose(1, 2)),
    "rows along the last axis": (values(3, 4), values(3, 4, 5).movedim(2, 0)),
    "equal rows": (values(3, 4), values(3, 4).expand(5, 3, 4)),
    "every other row": (values(3, 4), values(10, 3, 4)[::2]),
    "one row": (values(3, 4), values(1, 3, 4)),
    "numbers": (values(1)[0], values(7)),
    "halves": (values(3, 4).bfloat16(), values(5, 3, 4).bfloat16()),
    "doubles": (values(3, 4).double(), values(5, 3, 4).double()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loop_takes_tensors_of_any_layout(name):
    assert "scan" not in dict(externs(sum_of_squares, *LAYOUTS[name]))
    check(sum_of_squares, *LAYOUTS[name], train=name != "numbers")


@pytest.mark.parametrize("dim, reverse", ((0, True), (1, False), (2, True)))
def test_a_loop_runs_backwards_and_along_other_axes(dim, reverse):
    def fn(h: torch.Tensor, x: torch.Tensor) -> Any:
        return scan(lambda h, r: (h * 0.5 + r, h + r), h, x, dim=dim, reverse=reverse)

    check(fn, values(4, 4, seed=1), values(4, 4, 4), train=True)


def test_a_loop_of_symbolic_length_has_symbolic_steps():
    def fn(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        return scan(lambda h, r: ((r * x.shape[0] + h @ w).tanh(), h.exp() + x.shape[1]), h, x)

    check(fn, H, X, W, dynamic=True)


def test_a_loop_inside_a_loop_is_lowered():
    def fn(h: torch.Tensor, x: torch.Tensor) -> Any:
        def outer(h: torch.Tensor, rows: torch.Tensor) -> Any:
            return scan(lambda h, r: ((h + r).cos(), h.sin()), h, rows)

        return scan(outer, h, x)

    check(fn, values(3), values(4, 5, 3))
    assert externs(fn, values(3), values(4, 5, 3)) == []


@pytest.mark.slow
@pytest.mark.parametrize("reduced", (False, True), ids=("expanded", "dense"))
def test_a_scan_takes_a_gradient_that_is_expanded(reduced):
    def fn(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        last, each = scan(lambda c, row: (c * 0.9 + row, (c * 2).sin()), start, x)
        return (each * each).sum() + last.sum() if reduced else each.sum() + last.sum()

    check(fn, values(6, 5), values(5, seed=1), train=True)


def gru(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    def step(h: torch.Tensor, r: torch.Tensor) -> Any:
        gates = r @ w + h @ v
        z, n = gates[:, :8].sigmoid(), gates[:, 8:].tanh()
        following = z * h + (1 - z) * n
        return following, following * 1

    return scan(step, h, x)


def two_products(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    def step(h: torch.Tensor, r: torch.Tensor) -> Any:
        following = (r + h @ w).tanh()
        return following, following @ w

    return scan(step, h, x)


LAYERS: dict[str, tuple[Function, Tensors]] = {
    "rnn": (rnn, (H, X, W)),
    "gru": (gru, (H, X, values(8, 16), values(8, 16, seed=1))),
    "two products": (two_products, (H, X, W)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_train_by_native_loops_that_save_no_weights(name):
    fn, inputs = LAYERS[name]
    wrapper = wrapper_of(fn, *inputs, train=True)
    assert "for start" not in wrapper and "constant(" not in wrapper
    assert (
        "(6, 8, 8)" not in wrapper and "(6, 16, 8)" not in wrapper and "(6, 8, 16)" not in wrapper
    )


def draws(h: torch.Tensor, x: torch.Tensor) -> Any:
    return scan(lambda h, r: (h + torch.nn.functional.dropout(r, 0.5), h * 2), h, x)


def complex_numbers(h: torch.Tensor, x: torch.Tensor) -> Any:
    return scan(lambda h, r: (h * r, h + r), h.to(torch.complex64), x.to(torch.complex64))


@pytest.mark.parametrize("fn", (draws, complex_numbers), ids=lambda fn: fn.__name__)
def test_what_cannot_be_lowered_stays_torchs_loop_with_the_reason(fn):
    reasons = [reason for target, reason in externs(fn, H, X) if target == "scan"]
    assert len(reasons) == 1 and reasons[0].startswith("the higher-order operation scan: ")
    if fn is not draws:
        check(fn, H, X)


def test_a_body_with_a_librarys_call_is_a_loop_of_python():
    def fn(h: torch.Tensor, x: torch.Tensor) -> Any:
        return scan(lambda h, r: (h + r.sort(-1).values, h * 2), h, x)

    wrapper = wrapper_of(fn, H, X)
    assert "for start in range(0, 6, 1)" in wrapper and "aten.sort" in wrapper


def test_a_body_that_differs_is_another_entry_of_the_cache():
    for factor in (2.0, 3.0):
        check(lambda h, x, k=factor: scan(lambda h, r: (h * k + r, h - r), h, x), H, X)


def test_a_loop_is_explained_by_its_kernels():
    explained = fusec.explain(rnn, H, X, W)
    (graph,) = explained.graphs
    (loop,) = graph.loops
    assert loop.rounds == 6 and loop.kernels and not loop.externs
    assert graph.launches == (len(loop.kernels) if loop.native else 6 * len(loop.kernels))
    assert loop.native and "6 times, in one native call" in str(graph)
    assert graph.launches_eager == 6 * 5


def test_a_rolled_loop_cites_its_steps():
    def states(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h, found = x[0], []
        for r in x:
            h = torch.tanh(h @ w + r)
            found.append(h)
        return torch.stack(found)

    explained = str(fusec.explain(states, values(12, 5, 8), W))
    assert "torch.tanh(h @ w + r)" in explained


# -- each form of a loop ---------------------------------------------------------------------------


def counts(h: torch.Tensor, x: torch.Tensor) -> Any:
    return scan(lambda h, r: (h * 2 + r, h - r), h, x)


def fused(length: int) -> tuple[list[Any], list[Any], Schedule]:
    """Return the inputs, the results and the schedule of a loop over integers."""
    inputs = torch.arange(3), torch.arange(3 * length).view(length, 3)
    graph = graph_of(counts, *inputs)
    given = [value.numpy() for value in inputs]
    results = [value.numpy() for value in counts(*inputs)]
    for found, wanted in zip(run_graph(graph, given), results, strict=True):
        assert (found == wanted).all()
    return given, results, cut_loops(separate(graph), separate)


@pytest.mark.parametrize("length", (2, 5))
def test_schedules_and_host_programs_carry_state_in_the_interpreter(length):
    given, results, schedule = fused(length)
    verify_schedule(schedule)
    host = plan_host(schedule, run_bytes=1 << 18)
    verify_host(host)
    assert [loop.native for loop in host.loops] == [True]
    for found in (run_graph(schedule, given), run_graph(host, given)):
        assert all((a == b).all() for a, b in zip(found, results, strict=True))


def test_a_state_in_the_wrong_buffer_is_found():
    given, results, schedule = fused(5)
    (loop,) = schedule.loops
    (one,) = loop.carried
    swapped = replace(loop, carried=(replace(one, final=one.other, other=one.final),))
    steps = tuple(swapped if step is loop else step for step in schedule.steps)
    found = run_graph(replace(schedule, steps=steps), given)
    assert not all((a == b).all() for a, b in zip(found, results, strict=True))
    wide = Buffer.row_major("wide", (index(4),), one.other.dtype)
    with pytest.raises(InvalidIR, match="carried in several layouts"):
        bad = replace(loop, carried=(replace(one, other=wide),))
        verify_schedule(replace(schedule, steps=(bad,)))


def test_a_loop_is_printed_with_what_it_carries_and_how_its_function_moves():
    _, _, schedule = fused(5)
    lines = [line.strip() for line in print_schedule(schedule).splitlines()]
    assert "carried h: i64[3] from h, then scan_next into scan_0 and scan_0_other in turn" in [
        line.replace("arg0_1_v1", "h").replace("arg0_1", "h") for line in lines
    ]
    programs = lower_all(schedule, find_target("cpu"))
    host = plan_host(schedule, run_bytes=1 << 18)
    ((_, code),) = run_codes(host, programs, {k: k for k in programs}).items()
    printed = [line.strip() for line in print_run(code, programs).splitlines()]
    (final,) = (line for line in printed if line.startswith("any f"))
    number = final.removeprefix("any f").partition(" ")[0]
    assert f"any f{number} = b{number};" in printed and "for (; rounds > 0; --rounds) {" in printed
    assert sum("rounds % 2 ?" in line for line in printed) == 1
    assert sum(".address +" in line for line in printed) == 2  # x and the rows of the result


# -- conditions ------------------------------------------------------------------------------------


def halved(h: torch.Tensor, least: torch.Tensor) -> Any:
    """Halve until the sum is small: as often as the logarithm of a sum of 32 says."""
    step = (lambda n, h: h.sum() > least), (lambda n, h: (n + 1, h * 0.5))
    return while_loop(*step, (torch.full((), 7), h))


def sorted_and_halved(h: torch.Tensor, least: torch.Tensor) -> Any:
    step = (lambda n, h: h.sum() > least), (lambda n, h: (n + 1, h.sort(-1)[0] * 0.5))
    return while_loop(*step, (torch.full((), 7), h))


def root(h: torch.Tensor, least: torch.Tensor) -> Any:
    """Approximate a square root by Newton's steps; a tuple of carried states is nested."""

    def body(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor]]:
        better = (state["x"] + h / state["x"]) / 2
        return ({"x": better, "error": (better - state["x"]).abs().max()},)

    start = {"x": h + 1, "error": h.new_ones(())}
    return while_loop(lambda state: state["error"] > 1e-3, body, (start,))[0]["x"]


ENDED = {f.__name__: f for f in (halved, sorted_and_halved, root)}
ONES = torch.ones(4, 8)
LEAST = [(ONES, torch.tensor(number)) for number in (40.0, 20.0, 10.0, 3.0, float("nan"))]
"""No iteration, one, two, and four; none, since nothing is greater than NaN."""


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", ENDED)
def test_a_loop_runs_as_long_as_its_condition_holds(name, dynamic):
    check(ENDED[name], H.abs(), torch.tensor(1.0), more=LEAST, dynamic=dynamic)
    sorts = name == "sorted_and_halved"
    assert [op for op, _ in externs(ENDED[name], ONES, LEAST[0][1])] == ["sort.default"] * sorts


def test_a_condition_is_read_by_the_native_call():
    wrapper = wrapper_of(halved, H.abs(), torch.tensor(1.0))
    assert wrapper.count("while_loop(") == 1 and "while " not in wrapper
    assert "while " in wrapper_of(sorted_and_halved, H.abs(), torch.tensor(1.0))


def counted(h: torch.Tensor, most: torch.Tensor) -> Any:
    return while_loop(lambda n, h: h < most, lambda n, h: (n + 2, h + 1), (torch.full((), 3), h))


@contextmanager
def alarm(handler: Callable[..., None]) -> Iterator[None]:
    """Call a function of signals after a fifth of a second."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_native_loop_lets_python_handle_signals_and_goes_on():
    """Two signals are handled before the loop ends, which it does since the second one says so."""
    compiled, h = torch.compile(counted, backend="fusec"), torch.zeros((), dtype=torch.float64)
    most, seen = torch.tensor(3), []
    compiled(h, most)

    def handle(*_: object) -> None:
        seen.append(1)
        if len(seen) == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            most.zero_()

    most.fill_(10**15)  # days
    with alarm(handle):
        n, made = compiled(h, most)
    assert len(seen) == 2 and h == 0
    assert n == 3 + 2 * made and made > 1000  # of more than a second: it has not begun anew


def test_a_native_loop_stops_at_a_signal():
    compiled, h = torch.compile(counted, backend="fusec"), torch.zeros((), dtype=torch.float64)
    compiled(h, torch.tensor(3))

    def stop(*_: object) -> None:
        raise InterruptedError

    with alarm(stop), pytest.raises(InterruptedError):
        compiled(h, torch.tensor(10**15))  # days


def test_what_a_loop_returns_is_memory_of_its_own():
    def fn(h: torch.Tensor, least: torch.Tensor) -> Any:
        n, made = halved(h, least)
        return n, made.add_(1), h

    check(fn, H.abs(), torch.tensor(1.0), more=LEAST)


def test_a_loop_in_a_loop_keeps_both_conditions():
    def fn(h: torch.Tensor, least: torch.Tensor) -> Any:
        def body(n: torch.Tensor, h: torch.Tensor) -> Any:
            inner, h = halved(h + 1, least)
            return n + inner, h * 2

        return while_loop(lambda n, h: n < 30, body, (torch.full((), 0) * n_of(h), h))

    def n_of(h: torch.Tensor) -> torch.Tensor:
        return (h.sum() > 0).long()

    check(fn, H.abs(), torch.tensor(2.0))
    assert externs(fn, H.abs(), torch.tensor(2.0)) == []


@since_2_13
def test_a_body_that_writes_what_it_captures_writes_it_as_often_as_eager():
    def fn(h: torch.Tensor, total: torch.Tensor) -> Any:
        def body(n: torch.Tensor, h: torch.Tensor) -> Any:
            total.add_(h)
            return n + 1, h * 0.5

        return while_loop(lambda n, h: h.sum() > 1, body, (torch.full((), 0), h)), total * 2

    check(fn, H.abs(), H.clone())


def test_conditions_carry_state_in_the_interpreter_and_are_verified():
    graph = graph_of(lambda h: halved(h, torch.tensor(3.0)), ONES)
    schedule = cut_loops(separate(graph), separate)
    host = plan_host(schedule, run_bytes=1 << 18)
    verify_host(host)
    for value, times in ((1.0, 4), (2.0, 5), (0.0, 0)):
        for program in (graph, schedule, host):
            n, h = run_graph(program, [(ONES * value).numpy()])
            assert n == 7 + times and (h == value / 2**times).all()
    (loop,) = schedule.loops
    bad = replace(loop, carried=loop.carried[1:])
    with pytest.raises(InvalidIR):
        steps = tuple(bad if step is loop else step for step in schedule.steps)
        verify_schedule(replace(schedule, steps=steps))
    assert "    while while_loop_proceeds" in print_schedule(schedule)


# -- random bodies ---------------------------------------------------------------------------------

SHAPE = (3, 4)
OPERATIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: (a + b).tanh(),
    lambda a, b: a * b.sigmoid(),
    lambda a, b: a - b.mean(-1, keepdim=True),
    lambda a, b: torch.softmax(a, -1) @ (b.t() @ b),  # of b.mT Dynamo makes another input
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.cat([a[:, 2:], b[:, :2]], 1).sin(),
    lambda a, b: (a.t() + b.t()).t().cos(),
)
RESULTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda y: y.clone(),
    lambda y: y.sum(-1),
    lambda y: (y * 2).t() + 0,
)


class Body:
    """A random body of a scan over some carries, rows and captured tensors, all of one shape."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.carries, self.rows = self.random.randint(1, 3), self.random.randint(1, 2)
        self.captured, self.results = self.random.randint(0, 2), self.random.randint(0, 3)
        self.length, self.reverse = self.random.choice((1, 2, 3, 6, 7)), self.random.random() < 0.4
        self.plan = [self.random.random() for _ in range(400)]

    def inputs(self) -> Tensors:
        def one(*shape: int, seed: int) -> torch.Tensor:
            made = values(*shape, seed=seed)
            kind = (seed + self.length) % 4
            if kind == 1 and seed >= self.carries:  # torch compares the carries' strides
                made = values(*shape[:-2], *shape[:-3:-1], seed=seed).mT
            return made

        shapes = [SHAPE] * self.carries + [(self.length, *SHAPE)] * self.rows
        shapes += [SHAPE] * self.captured
        return tuple(one(*shape, seed=k) for k, shape in enumerate(shapes))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        carries, rows = tensors[: self.carries], tensors[self.carries :][: self.rows]
        captured = tensors[self.carries + self.rows :]

        def step(state: Tensors, xs: Tensors) -> Any:
            choices = iter(self.plan)
            known = [*state, *xs, *captured]

            def pick() -> torch.Tensor:
                return known[int(next(choices) * len(known))]

            for _ in range(4):
                a, b = pick(), pick()
                known.append(OPERATIONS[int(next(choices) * len(OPERATIONS))](a, b))
            following = tuple((pick() * 0.5 + pick()).contiguous() for _ in range(self.carries))
            rows = (RESULTS[int(next(choices) * len(RESULTS))] for _ in range(self.results))
            return following, tuple(row(pick()) for row in rows)

        return scan(step, carries, rows, reverse=self.reverse)


@trains_scans
@pytest.mark.parametrize(
    "seed", [pytest.param(k, marks=() if k < 6 else pytest.mark.slow) for k in range(60)]
)
def test_random_bodies_match_eager(seed):
    body = Body(seed)
    check(lambda *tensors: body(*tensors), *body.inputs(), train=seed % 2 == 1)
    assert not [trace.problem for trace in RECENT if trace.problem]
