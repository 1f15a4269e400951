"""How wide accesses could be, told from programs, and how wide the compiled code makes them."""

from __future__ import annotations

import pytest

from fusec.ir.dtype import BF16, F32
from fusec.ir.index import Size, index
from fusec.ir.program import Program
from fusec.tools.assembly import assembly_of
from fusec.tools.report.static_rules import (
    MASKED,
    SCALAR,
    SCATTERED,
    SMALL,
    UNALIGNED,
    demands,
    match_accesses,
)
from fusec.tools.static_checks import inspect_kernel
from tests.codegen import programs
from tests.codegen.kernels import triton_source


def reasons(program: Program) -> dict[str, str]:
    return {demand.buffer: demand.left_out for demand in demands(program)}


def test_rows_of_a_multiple_of_16_bytes_are_held_to_16_bytes() -> None:
    assert set(reasons(programs.layer_norm(4096, 1024)).values()) == {""}


def test_rows_that_begin_anywhere_are_left_out() -> None:
    found = reasons(programs.softmax(64, 1000, 1024, 4))
    assert found == {"x": "", "y": ""}
    assert set(reasons(programs.softmax(64, 1001, 1024, 4)).values()) == {UNALIGNED}


def test_masks_end_at_a_multiple_of_16_bytes_or_are_left_out() -> None:
    even = programs.relu_chain(BF16, index(Size("N", 2**20)), 2048, masked=True)
    odd = programs.relu_chain(BF16, index(Size("N", 2**20 + 1)), 2048, masked=True)
    assert set(reasons(even).values()) == {""}
    assert set(reasons(odd).values()) == {MASKED}


def test_tiles_smaller_than_the_threads_and_single_values_are_left_out() -> None:
    assert set(reasons(programs.relu_chain(F32, 1024, 64, masked=False)).values()) == {SMALL}
    found = reasons(programs.looped_row_sum(4, 2**20, 4096))
    assert found == {"x": "", "y": SCALAR}


def test_gathered_rows_are_held_to_16_bytes_and_turned_ones_along_their_own_axis() -> None:
    assert reasons(programs.embedding(3, 50_000, 1024)) == {"ids": SCALAR, "table": "", "y": ""}
    turned = {d.buffer: d.axis for d in demands(programs.bias_tile(4096, 4096, (64, 64)))}
    assert turned["x"] is not turned["y"]


def test_lanes_that_step_over_elements_are_left_out() -> None:
    lane = programs.Axis("i", index(1024))
    b = programs.Builder("every_other", (), (lane,))
    b.put(
        programs.buffer("y", F32, 1024),
        lane,
        b.load(programs.buffer("x", F32, 2048), index(lane) * 2),
    )
    assert reasons(b.program()) == {"x": SCATTERED, "y": ""}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "program",
    [
        programs.layer_norm(4096, 1024),
        programs.softmax(64, 1001, 1024, 4),
        programs.looped_row_sum(4, 100_000, 4096),
        programs.embedding(3, 50_000, 1024),
        programs.relu_chain(BF16, index(Size("N", 2**20)), 2048, masked=True),
    ],
    ids=lambda program: program.name,
)
def test_compiled_widths_are_those_of_the_program(program: Program) -> None:
    """An access is 16 bytes wide if and only if it could be."""
    kernel = triton_source(program)
    report = inspect_kernel(assembly_of(kernel, "sm_90"))
    accesses = match_accesses(program, kernel.source, report.accesses)
    assert [a.demand for a in accesses] == list(demands(program))
    for access in accesses:
        assert f"tl.{access.demand.kind}({access.demand.buffer} " in access.text.replace(")", " ")
        assert access.found
        assert {a.kind for a in access.found} == {access.demand.kind}
        assert (access.narrow_bytes == 0) == (access.demand.left_out == ""), access
    assert sum(a.bytes for a in accesses) == sum(a.bytes for a in report.accesses)


def test_nothing_is_matched_where_the_source_has_other_accesses() -> None:
    program = programs.layer_norm(4096, 1024)
    kernel = triton_source(program)
    report = inspect_kernel(assembly_of(kernel, "sm_90"))
    last = next(line for line in kernel.source.splitlines() if "tl.store(y" in line)
    assert match_accesses(program, kernel.source.replace(last, ""), report.accesses) == ()
    assert match_accesses(program, kernel.source, ()) == ()
