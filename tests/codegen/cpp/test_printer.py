"""The C++ printer: kernels of random graphs, built once, against the interpreter; bad input."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.codegen.cpp import printer as cpp
from fusec.codegen.cpp.prelude import prelude_of
from fusec.codegen.lowering.lower import lower
from fusec.codegen.targets import find_target
from fusec.driver.pipeline import generate
from fusec.errors import InvalidIR
from fusec.ir.dtype import F32, I64
from fusec.ir.expr import Buffer, Load, Op, Var
from fusec.ir.graph import Def, Kernel, Schedule, Store
from fusec.ir.index import Axis, Runtime, Size, index
from fusec.ir.machine import CodeTuning
from fusec.ir.program import For, Let, Program, Put, Scratch
from fusec.options import Options
from fusec.passes.fusion.fuse import separate
from fusec.passes.kernel.coalesce import flatten
from fusec.passes.schedule.plan import Binding, LoopKind, Plan
from fusec.runtime.kernels import cpp_kernel
from fusec.tools.interpreter.graph import run_graph
from tests.fuzz.graphs import Example, copy_extern, example
from tests.fuzz.kernels import compile_example, run_kernels
from tests.fuzz.pipeline import context, small_target
from tests.ir.graphs import axes, buffer, graph, load
from tests.support import compile_with

SEEDS = range(2000, 2040)
Library = dict[str, cpp_kernel.CppKernel]


def build(programs: list[Program]) -> Library:
    """Build programs with different names in one translation unit, and load it."""
    width = cpp_kernel.vector_width()
    unit = prelude_of(width, programs)
    unit += "\n".join(cpp.print_kernel(p) for p in programs)
    library = cpp_kernel.build(unit, Options())
    folder = Path(tempfile.mkdtemp(prefix="fusec-test-"))
    (folder / "kernels.so").write_bytes(library)
    rows = [
        {
            "name": p.name,
            "function": p.name,
            "buffers": len(p.buffers),
            "sizes": len(p.sizes),
            "parts": [(p.name, "test.py:1")],
            "blocks": None,
        }
        for p in programs
    ]
    return cpp_kernel.load(folder / "kernels.so", rows)


def compiled(seed: int, width: int) -> tuple[Example, Schedule, dict[str, Program]]:
    drawn = example(seed, count=2 + seed % 6)
    schedule, lowered = compile_example(drawn, small_target("cpu", width))
    programs = {k: replace(p, name=f"g{seed}_{k}") for k, p in lowered.items()}
    return drawn, schedule, programs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def test_kernels_of_random_graphs_compute_what_the_graphs_do() -> None:
    cases = {}
    for seed in SEEDS:
        try:
            cases[seed] = compiled(seed, cpp_kernel.vector_width())
        except InvalidIR as error:  # the prover's limits, on some gathers below divisions
            assert "not provably" in str(error)
    library = build([p for _, _, programs in cases.values() for p in programs.values()])
    wrong = []
    for seed, (drawn, schedule, programs) in cases.items():
        expected = run_graph(drawn.graph, drawn.inputs, copy_extern)
        found = run_kernels(schedule, programs, drawn.inputs, lambda p: library[p.name])
        if not all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True)):
            wrong.append(seed)
    assert wrong == []


def gather_kernel(tile: int) -> Program:
    table, ids, out = buffer("table", 5, 3), buffer("ids", 20, dtype=I64), buffer("out", 20)
    (i,) = axes("i", 20)
    row = index(Runtime(load(ids, i), index(5)))
    kernel = Kernel("gather", (i,), (), (Store(out, (index(i),), Load(table, (row, index(1)))),))
    plan = Plan((Binding(i, LoopKind.GRID, tile, 2),))
    return replace(lower(flatten(kernel), plan), name=f"gather_{tile}")


def test_gather_out_of_range_raises_and_touches_no_memory() -> None:
    width = cpp_kernel.vector_width()
    programs = [gather_kernel(1), gather_kernel(width)]
    library = build(programs)
    table = torch.arange(15.0)
    for program in programs:
        for bad in (-1, 5, 2**62, -(2**62)):
            ids = torch.arange(20) % 5
            ids[13] = bad
            out = torch.zeros(20)
            arrays = {"table": table, "ids": ids, "out": out}
            with pytest.raises(IndexError, match=r"test\.py:1"):
                library[program.name](*(arrays[b.name] for b in program.buffers))
        ids = torch.arange(20) % 5
        arrays = {"table": table, "ids": ids, "out": out}
        library[program.name](*(arrays[b.name] for b in program.buffers))
        assert torch.equal(out, table.view(5, 3)[ids, 1])


def test_an_array_that_a_loop_declares_is_freed_in_it() -> None:
    n = Size("n", 5)
    x, y, kept = (Buffer(k, (3 * index(n),), (index(1),), F32) for k in ("x", "y", "kept"))
    row, j, t, u = axes("row j t u", 1, 3, n, n)
    read, again = (Var(k, F32, frozenset()) for k in ("v_x", "v_kept"))

    def each(axis: Axis, *body: Let | Put) -> For:
        return For(axis, index(0), (index(n),), body)

    place = n * index(j)
    fill = Let(read, Load(x.flat(), (place + t,))), Put(kept.flat(), index(t), read, None)
    empty = Let(again, Load(kept.flat(), (index(u),))), Put(y.flat(), place + u, again, None)
    body = Scratch(kept, 3 * index(n)), each(t, *fill), each(u, *empty)
    loop = For(j, index(0), (index(3),), body)
    program = Program("nested", (x,), (y,), (n,), (row,), (), (loop,))
    a, b = torch.arange(15.0), torch.zeros(15)
    build([program])["nested"](a, b, 5)
    assert torch.equal(a, b)


def test_quotients_of_sizes_are_computed_once_in_front_of_all_loops() -> None:
    n, (i,) = index(Size("n", 24)), axes("i", 5)
    step = n // 4 + (n // 4) % 3 * ((n // 4) // 5) + index(7) // (n // 8)
    x, y = (Buffer(name, (index(120),), (index(1),), F32) for name in ("x", "y"))
    kernel = Kernel(
        "quotients", (i,), (), (Store(y, (index(i) * step,), load(x, index(i) * step)),)
    )
    program = lower(flatten(kernel), Plan((Binding(i, LoopKind.GRID),)))
    source = cpp.print_kernel(program)
    body = source[source.index("for (") :]
    assert source.count("fusec_floordiv(n_n, 4)") == 1 and "fusec_" not in body
    a, b = torch.arange(120.0), torch.zeros(120)
    library = build([program])
    for size, stride in ((24, 8), (4, 1)):  # 4 // 8 is 0, by which nothing is divided
        library["quotients"](a, b.zero_(), size)
        assert b.nonzero().flatten().tolist() == [k * stride for k in range(1, 5)]


HOSTILE = (
    "newline \n #error a",
    "carriage \r #error b",
    "close */ #error c",
    "backslash \\",
    "trigraph ??/",
    "quotes \"\"\" ''' ${x}",
    "separators \u2028 #error d \x0b #error e \x0c #error f",
    "nul \0 end",
)


def test_only_buffers_that_lie_apart_are_said_to() -> None:
    """A result may lie over an operand: the compiler may not swap its loads and the stores."""
    x, w, y = buffer("x", 4, 6), buffer("w", 6), buffer("y", 4, 6)
    (m, c) = axes("m c", 4, 6)
    first = Def(buffer("t", 4, 6), (m, c), Op("neg", (load(x, m, c),)))
    last = Def(y, (m, c), Op("add", (load(first.buffer, m, c), load(w, c))))
    schedule = separate(graph((x, w), (first, last), y))
    compiled = generate(schedule, context(find_target("cpu")))
    head = next(line for line in compiled.sources["k1"].splitlines() if "void k1" in line)
    assert "(const m_f32 *__restrict p_w, const m_f32 *p_t, m_f32 *p_y, int *status)" in head
    assert "y = t  # memory reused\n    k0_to_k1(" in compiled.wrapper


def test_hostile_names_and_comments_stay_comments() -> None:
    x, y = Buffer('x\n";#error', (index(4),), (index(1),), F32), buffer("y */ //", 4)
    (i,) = axes("i", 4)
    kernel = Kernel("hostile", (i,), (), (Store(y, (index(i),), load(x, i)),))
    program = lower(flatten(kernel), Plan((Binding(i, LoopKind.GRID),)))
    program = replace(program, notation=HOSTILE)
    program = replace(program, source=HOSTILE)
    library = build([program])
    a, b = torch.arange(4.0), torch.zeros(4)
    library["hostile"](a, b)
    assert torch.equal(a, b)


def test_the_places_of_a_window_are_taken_apart_and_long_loops_are_not() -> None:
    [kernel] = fusec.kernels(lambda x: F.max_pool2d(x, 3, 2, 1), torch.ones(2, 4, 16, 512))
    assert kernel.source.count("#pragma GCC unroll") == 2
    [kernel] = fusec.kernels(lambda x: x.tanh().sum(1), torch.ones(64, 40, 512))
    assert "unroll" not in kernel.source


def test_transposed_reads_are_turned_in_blocks_whatever_their_type_and_their_ends() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.permute(0, 3, 1, 2).contiguous(), y.mT + z, y.mT.bool(), (y > 0).mT.contiguous()

    torch.manual_seed(0)
    shapes = (2, 5, 7, 19), (3, 37, 50), (3, 50, 37)
    kernels = fusec.kernels(fn, *(torch.ones(s) for s in shapes))
    assert all("  ldt_f32" in kernel.source for kernel in kernels)
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.uint8):
        inputs = tuple(torch.randint(0, 9, shape).to(dtype) for shape in shapes)
        for found, expected in zip(compile_with(fn)(*inputs), fn(*inputs), strict=True):
            assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("classes", [16, 21, 50])
def test_a_softmax_of_channels_that_are_last_turns_what_it_reads(classes: int) -> None:
    x = torch.randn(2, classes, 5, 7).contiguous(memory_format=torch.channels_last)
    [kernel] = fusec.kernels(lambda x: x.softmax(1), x)
    assert kernel.source.count("  ldt_f32") == 2
    exact = x.double().softmax(1)
    error = (compile_with(lambda x: x.softmax(1))(x) - exact).abs().max()
    assert error <= 2 * (x.softmax(1) - exact).abs().max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("many", [False, True])
def test_many_gathers_are_calls_that_read_what_copies_do(many: bool) -> None:
    """Rows that are padded and then cut elsewhere: where a lane reads takes a division."""
    widths = range(1, CodeTuning().gathers + 2 if many else 3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        parts = [F.pad(x, (k, 1)).flatten()[:36] for k in widths]
        return functools.reduce(torch.add, parts)

    x = torch.randn(4, 9)
    [kernel] = fusec.kernels(fn, x)
    assert ("called_ldim_f32(" in kernel.source) is many
    torch.testing.assert_close(compile_with(fn)(x), fn(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gelu_in_16_bits_takes_a_shorter_form_and_an_exponential_does_not(
    dtype: torch.dtype,
) -> None:
    x = torch.linspace(-12, 12, 4001).to(dtype)
    for fn, form in ((F.gelu, "f_ndtr_rounded(v"), (torch.exp, "f_exp(v")):
        torch._dynamo.reset()
        (kernel,) = fusec.kernels(fn, x)
        assert (form in kernel.source) is (fn is torch.exp or dtype is not torch.float32)
        found = torch.compile(fn, backend="fusec", options={"strict": True})(x)
        torch.testing.assert_close(found, fn(x.double()).to(dtype), check_dtype=True)
