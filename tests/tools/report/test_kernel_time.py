"""The model of a kernel's time: planted causes are named, published kernels are met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.lowering.lower import lower
from fusec.codegen.targets import Target, find_target
from fusec.ir.expr import Load, Var
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, Index, index
from fusec.ir.machine import Machine
from fusec.ir.program import For, Let, Program, Statement
from fusec.options import Options
from fusec.passes.schedule.plan import Plan
from fusec.tools.report.kernel_time import (
    RELEASE_US,
    START_US,
    Expectation,
    Work,
    expect,
    loop_runs,
    section_runs,
)
from fusec.tools.report.observe import new_fake_mode, observe
from fusec.tools.report.stages import take_through
from fusec.tools.report.static_report import check_kernels
from fusec.tools.static_checks import DotTile, GlobalAccess, Section, StaticReport
from tests.codegen.test_contraction_static import (
    causal,
    gradient,
    grouped,
    offered,
    staged,
    tensors,
)
from tests.ir.graphs import buffer
from tests.tools.report.test_static_rules import CLEAN, PRODUCT

H200 = find_target("sm_90").machine
H100 = find_target("sm_90", bytes_per_us=3.02e6).machine

STREAM = replace(CLEAN, sections=(Section(-1, 40, loaded=32, stored=32, waits=1),), blocks=16)
"""A pointwise kernel: 128 threads, two loads of 16 bytes each."""
STREAMED = Work(32768, (1.0,), 32768 * 128 * 64)
NARROW = (GlobalAccess(1, "load", 2, 16), GlobalAccess(2, "store", 2, 16))
LOOPING = Work(8192, (1.0, 64.0), 8192 * 64 * 128 * 16)


def looping(blocks: int = 12, **fields: int) -> StaticReport:
    section = replace(Section(0, 40, loaded=16, waits=1), **fields)
    return replace(CLEAN, sections=(Section(-1, 100), section), blocks=blocks, loops=1)


ATTENTION = replace(
    PRODUCT, threads=256, blocks=1, dots=(DotTile(128, 64, 128, "bf16"),) * 2,
    sections=(Section(-1, 1000), Section(0, 445, specials=34, barriers=4, products=12)),
)  # fmt: skip
ATTENDED = Work(4096, (1.0, 64.0), 1 << 27, multiplied=4096 * 64 * 2.0 * 128 * 64 * 128)

Planted = tuple[StaticReport, Work, str]
PLANTED: dict[str, Planted] = {
    "few bytes in flight": (
        looping(2), LOOPING, "few bytes in flight: 4 KB on a multiprocessor"),
    "barriers in its loop": (
        looping(barriers=12), LOOPING, "barriers of the block in its loop: 12 each time"),
    "narrow accesses": (
        replace(STREAM, accesses=NARROW, sections=(
            Section(-1, 700, loaded=32, stored=32, waits=1),)),
        STREAMED, "narrow accesses: 0% of the bytes move 16 at a time"),
    "instructions": (
        replace(STREAM, sections=(Section(-1, 900, loaded=32, stored=32),)), STREAMED,
        "instructions: 14.1 a byte"),
    "functions by table": (
        replace(STREAM, sections=(Section(-1, 300, specials=150, loaded=32, stored=32),)),
        STREAMED, "functions by table"),
    "loads one after another": (
        looping(8, waits=7), LOOPING, "loads of an iteration wait for one another: 7 times"),
    "a block alone": (
        replace(STREAM, threads=512, blocks=1, sections=(
            Section(-1, 1376, barriers=5, loaded=144, stored=136, waits=3),)),
        Work(2048, (1.0,), 2048 * 128000),
        "one block a multiprocessor: it loads, computes and stores in turn"),
    "a short launch": (
        STREAM, Work(64, (1.0,), 1 << 19), "the launch itself: it is short"),
    "one block a multiprocessor": (
        ATTENTION, ATTENDED, "one block a multiprocessor: softmax and products alternate"),
    "a tile that is too small": (
        replace(PRODUCT, threads=256, sections=(Section(-1, 300), Section(0, 80, products=8))),
        Work(4096, (1.0, 64.0), 1 << 28, multiplied=4096 * 64.0 * 128 * 128 * 64),
        "shared memory feeds tensor cores too slowly: a wider tile reads less"),
    "an empty wave": (
        ATTENTION, replace(ATTENDED, programs=140, multiplied=140 * 64 * 2.0 * 128 * 64 * 128),
        "the last wave of blocks fills a part of the multiprocessors"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named(name: str) -> None:
    static, work, cause = PLANTED[name]
    found = expect(static, work, H200)
    assert found.cause == cause, found
    assert found.share < 0.8


def test_a_cache_that_adds_to_memory_takes_the_time_of_the_parts() -> None:
    whole = expect(ATTENTION, ATTENDED, H200)
    added = expect(ATTENTION, replace(ATTENDED, added=3e3 * whole.us * 7.0), H200)
    assert added.us > whole.us and added.cause == whole.cause
    busy = expect(ATTENTION, replace(ATTENDED, added=4e6 * whole.us * 7.0), H200)
    assert busy.cause == "the second cache, which adds to memory"


def test_rows_that_are_read_again_take_the_time_of_their_bytes() -> None:
    """The floor knows of them, and the sentence says so."""
    static = replace(
        CLEAN,
        blocks=8,
        sections=(
            *(Section(-1, 50), Section(0, 40, loaded=64)),
            Section(0, 40, loaded=64, stored=64),
        ),
    )
    moved = 8192 * 3 << 19
    found = expect(static, Work(8192, (1.0, 64.0, 64.0), moved, moved // 3), H200)
    assert found.cause == "rows are read again, and do not stay in the cache"
    assert found.floor_us == pytest.approx(moved / H200.bytes_per_us)


def test_copies_before_a_loop_are_those_that_its_last_iterations_do_without() -> None:
    """Of 4 iterations two are copied before the first one: 4 are copied in all, not 6."""

    def copying(ahead: int, loaded: int) -> StaticReport:
        around = Section(-1, 50, loaded=ahead + loaded, copied=ahead, waits=1)
        return replace(CLEAN, blocks=8, sections=(around, Section(0, 40, loaded=16, copied=16)))

    moved = 8192 * 128 * 4 * 16
    work = Work(8192, (1.0, 4.0), moved // 2, small=1 << 20)
    alone, ahead, more = (expect(copying(*of), work, H200) for of in ((0, 0), (32, 0), (0, 32)))
    assert alone.us == ahead.us < more.us


def test_a_block_that_copies_tiles_by_descriptors_does_not_load_in_turn() -> None:
    work = Work(64, (1.0,), 1 << 26)
    whole, tiles = (replace(STREAM, blocks=1, tma=n) for n in (0, 4))
    assert expect(whole, work, H200).cause.startswith("one block a multiprocessor: it loads")
    assert expect(tiles, work, H200).us < expect(whole, work, H200).us


def test_a_launch_that_overlaps_hides_most_of_its_start() -> None:
    short = Work(64, (1.0,), 1 << 19)
    alone = expect(STREAM, short, H200)
    overlapping = expect(replace(STREAM, dependent=True), short, H200)
    assert alone.us - overlapping.us == pytest.approx(START_US - RELEASE_US)
    assert "without overlap" not in str(alone)
    assert f"{overlapping.us:.3g} us ({alone.us:.3g} us without overlap)" in str(overlapping)


def test_a_kernel_that_only_waits_for_memory_is_near_the_floor() -> None:
    assert expect(STREAM, STREAMED, H200).share > 0.95


def test_a_loop_of_one_iteration_is_none_in_the_code() -> None:
    """Of a causal attention the loop over the diagonal, whose tiles are squares."""
    (one,) = staged(causal, *tensors(*[(8, 25, 1024, 64)] * 3), roles="never")
    flat, plans = offered(one)
    program = lower(flat, plans[0])
    assert [n for _, n in loop_runs(program)] == [7.5, 1.0]
    assert section_runs(program, looping(4, products=8), 0.0, 0.0) == (1.0, 7.5)


def test_a_loop_around_one_loop_is_none_in_the_code() -> None:
    """The inner loop of a gradient of heads that share keys runs for all heads and rows."""
    keys = (2, 8, 4096, 64)
    one = gradient(grouped, (2, 32, 4096, 64), keys, keys)
    (program,) = (p for p in one.compiled.programs.values() if p.added)
    assert [n for _, n in loop_runs(program)] == [4.0, 4 * 16.5]
    assert section_runs(program, looping(5, products=8), 0.0, 0.0) == (1.0, 4 * 16.5)


def looped(name: str, *body: Statement, stops: tuple[Index, ...]) -> For:
    return For(Axis(name, stops[0]), index(0), stops, body)


def program_of(*body: Statement, lanes: tuple[Axis, ...] = ()) -> Program:
    return Program("k", (), (), (), (), lanes, body)


def test_a_loop_that_was_unrolled_is_none_in_the_code() -> None:
    """Of elements, in a loop with a computed end; loops that stay ran once, by the bytes."""
    inner = looped("r3", stops=(index(28),))
    rows = looped("r2", inner, stops=(index(3), index(Axis("po", index(32))) + 2))
    program = program_of(looped("po", rows, stops=(index(32),)), looped("i", stops=(index(8),)))
    loops = (Section(0, 18), Section(1, 121, loaded=56, waits=3), Section(0, 69, stored=16))
    static = replace(CLEAN, threads=512, sections=(Section(-1, 195), *loops), loops=3)
    assert section_runs(program, static, 1e5, 0.0) == (1.0, 32.0, 96.0, 8.0)


def test_of_loops_that_may_have_been_unrolled_the_longest_ones_stay() -> None:
    program = program_of(*(looped("i", stops=(index(n),)) for n in (4, 8)))
    assert section_runs(program, looping(), 0.0, 0.0) == (1.0, 8.0)


def test_loops_that_are_not_the_programs_run_for_its_bytes_or_nobody_knows() -> None:
    """Nothing tells if threads load the same element, or less than an iteration loads."""
    place, lane = Axis("i", index(64)), Axis("c", index(1024))
    x = buffer("x", 1 << 16).flat()

    def program(offset: Index) -> Program:
        load = Let(Var("v", x.dtype, offset.axes), Load(x, (offset,)))
        return program_of(looped("i", load, stops=(place.extent,)), lanes=(lane,))

    static = replace(looping(), sections=(Section(-1, 9), *[Section(0, 40, loaded=8)] * 2))
    own, same = program(index(place) * 1024 + index(lane)), program(index(place))
    assert section_runs(own, static, 32 * 128 * 16.0, 0.0) == (1.0, 32.0, 32.0)
    assert section_runs(own, static, 1024.0, 0.0) is None
    assert section_runs(same, static, 32 * 128 * 16.0, 0.0) is None


def test_no_time_is_shorter_than_its_floor() -> None:
    for runs in ((1.0, 1.0), (1.0, 64.0)):
        found = expect(ATTENTION, replace(ATTENDED, runs=runs), H200)
        assert found.us > found.floor_us


def test_an_iteration_before_a_loop_takes_as_long_as_one_in_it() -> None:
    """As that over the diagonal, which is straight code."""
    (around, loop), dots = ATTENTION.sections, ATTENTION.dots
    first = replace(around, instructions=around.instructions + loop.instructions, products=12)
    ahead = replace(ATTENTION, sections=(first, loop), dots=(*dots, *dots))
    in_it = expect(ATTENTION, replace(ATTENDED, runs=(1.0, 65.0)), H200)
    assert expect(ahead, ATTENDED, H200).us == pytest.approx(in_it.us)


def test_a_second_block_multiplies_while_the_first_one_is_at_its_softmax() -> None:
    alone, beside = (expect(replace(ATTENTION, blocks=n), ATTENDED, H200).share for n in (1, 2))
    assert 0.4 < alone < 0.5 < beside < 0.8


def test_an_expectation_is_a_sentence() -> None:
    said = str(Expectation(200.0, 150.0, "instructions: 7.0 a byte"))
    assert said == "expected 200 us, 0.75 of the floor: instructions: 7.0 a byte"


# -- published measurements ------------------------------------------------------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Published:
    """A kernel that somebody measured, and one of fusec's that is built alike.

    Attributes:
        share: of what a copy moves, or of 790 TFLOP/s (docs/performance.md has the sources).
        number: of the plan that is like theirs, among those without roles.
    """

    fn: Callable[..., Any]
    shapes: tuple[Shape, ...]
    share: float
    device: Machine = H100
    dtype: torch.dtype = torch.bfloat16
    number: int = 0


F32 = torch.float32
SQUARE, WIDE = (8192, 8192), (4096, 16384)
PUBLISHED = {
    "a + b": Published(torch.add, (SQUARE, SQUARE), 0.99, H200),
    "RMSNorm of 16384": Published(
        lambda x, w: F.rms_norm(x, (16384,), w), (WIDE, WIDE[1:]), 0.94),
    "RMSNorm of 4096": Published(
        lambda x, w: F.rms_norm(x, (4096,), w), ((4096, 4096), (4096,)), 0.77),
    "a sum and its RMSNorm": Published(
        lambda x, r, w: (x + r, F.rms_norm(x + r, (16384,), w)),
        ((2048, 16384), (2048, 16384), (16384,)), 0.97, dtype=F32),
    "LayerNorm of 16384": Published(
        lambda x, w, b: F.layer_norm(x, (16384,), w, b), (WIDE, WIDE[1:], WIDE[1:]), 0.97,
        dtype=F32),
    "softmax of 131072": Published(  # 0.65 where the floor had one reading
        lambda x: x.softmax(-1), ((16384, 131072),), 0.65 * 3 / 2, dtype=F32),
    "a product by descriptors": Published(
        lambda x, w, b: F.relu(F.linear(x, w, b)), ((8192, 4096), (14336, 4096), (14336,)), 0.93,
        number=2),
    "attention of 16384": Published(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), ((1, 16, 16384, 128),) * 3, 0.55,
        number=1),
}  # fmt: skip


def choosing(target: Target, number: int) -> Target:
    """Return a target that offers the n-th plan of each kernel alone, of those without roles."""
    theirs = target.codegen.plans

    def plans(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
        plain = tuple(plan for plan in theirs(kernel, machine) if not plan.roles)
        return plain[number : number + 1]

    return replace(target, codegen=replace(target.codegen, plans=plans)) if number else target


def modelled(
    row: Published, *, train: bool = False, labels: int = 0, target: Target | None = None
) -> list[Expectation]:
    """Return what the model says of a function's kernels, but those of less than 10 us.

    Args:
        target: by default the one that takes the row's configuration.
    """
    torch._dynamo.reset()
    target = replace(target or choosing(find_target("sm_90"), row.number), machine=row.device)
    options, mode = Options(race="fused", autotune=False, cache=False), new_fake_mode()
    with mode:
        inputs = [torch.empty(shape, dtype=row.dtype, requires_grad=train) for shape in row.shapes]
        inputs += [torch.empty(labels, dtype=torch.int64)] if labels else []
    seen = observe(row.fn, inputs, train=train, mode=mode, options=options, target=target)
    report = check_kernels([take_through(one, target, options) for one in seen])
    found = [one.expected for one in report.kernels if one.expected is not None]
    return [one for one in found if one.floor_us > 10]


@pytest.mark.slow
def test_the_model_meets_what_was_published() -> None:
    errors = {}
    for name, row in PUBLISHED.items():
        (found,) = modelled(row)
        errors[name] = found.share / row.share - 1
    assert max(map(abs, errors.values())) < 0.25, errors
    assert fmean(map(abs, errors.values())) < 0.08, errors


@pytest.mark.slow
def test_cross_entropy_of_long_rows_is_expected_near_the_floor() -> None:
    row = Published(F.cross_entropy, ((8192, 128256),), 0.0, H200)
    found = modelled(row, train=True, labels=8192)
    assert len(found) == 2
    assert all(one.share >= 0.85 for one in found), found
