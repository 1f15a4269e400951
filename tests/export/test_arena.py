"""Places in one block of memory: as few bytes as the most that live at once, and none shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fusec.errors import InvalidIR
from fusec.export.arena import ALIGNMENT, Arena, plan_arena, verify_arena
from fusec.ir.expr import Buffer
from fusec.ir.host import Allocation, HostProgram
from fusec.ir.memory import bytes_of, overwritable
from fusec.passes.fusion.fuse import separate
from fusec.passes.memory.buffers import plan_host
from fusec.tools.report.traffic import peak_bytes
from tests.codegen.host.test_wrapper import chain
from tests.fuzz.graphs import Example
from tests.ir.graphs import F32
from tests.passes.pipelines import BOUNDED, random_graphs


def chain_of(count: int) -> HostProgram:
    """x -> t0 -> t1 -> ..., of which the last is returned."""
    return plan_host(separate(chain(*[F32] * count)[0]))


def rounded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def test_a_chain_takes_two_places() -> None:
    host = chain_of(6)
    arena = plan_arena(host, {})
    verify_arena(host, arena)
    assert len(set(arena.offsets.values())) == 2
    assert arena.bytes == 2 * rounded(peak_bytes(host) // 2)


def test_a_result_lies_where_the_caller_wants_it_with_what_lies_under_it() -> None:
    host = chain_of(4)
    (returned,) = host.graph.returned
    arena = plan_arena(host, {returned: 3})
    verify_arena(host, arena)
    allocations = [s for s in host.statements if isinstance(s, Allocation)]
    (under,) = (one.over for one in allocations if one.buffer is returned)
    assert under is not None
    assert arena.results == {returned: 3, under: 3}
    assert returned not in arena.offsets


@BOUNDED
@given(random_graphs())
def test_no_two_buffers_that_live_at_once_share_a_byte(drawn: Example) -> None:
    host = plan_host(separate(drawn.graph), overwritable)
    arena = plan_arena(host, {})
    verify_arena(host, arena)
    for buffer, offset in arena.offsets.items():
        ends = (arena.offsets[b] + rounded(bytes_of(b)) for b in arena.below[buffer])
        assert offset == max(ends, default=0), "more than the order asks for"


def moved(arena: Arena, buffer: Buffer, offset: int) -> Arena:
    return replace(arena, offsets={**arena.offsets, buffer: offset})


def test_planted_faults_are_found() -> None:
    host = chain_of(4)
    arena = plan_arena(host, {})
    first = next(iter(arena.offsets))
    second = next(b for b in arena.offsets if arena.offsets[b] != arena.offsets[first])
    apart = replace(arena, below=dict.fromkeys(arena.offsets, ()))
    nowhere = {b: o for b, o in arena.offsets.items() if b is not first}
    for wrong, problem in (
        (moved(apart, second, arena.offsets[first]), "lies where"),
        (moved(arena, second, arena.offsets[first]), "does not begin behind"),
        (apart, "neither .* is below the other"),
        (moved(apart, second, 1), "begins at 1"),
        (replace(arena, bytes=8), "of 8 bytes"),
        (replace(apart, offsets=nowhere), "is nowhere"),
        (replace(arena, offsets={}, results=dict.fromkeys(arena.offsets, 0)), "in one result"),
    ):
        with pytest.raises(InvalidIR, match=problem):
            verify_arena(host, wrong)
