"""What a kernel that streams weights fetches ahead of its loads."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import fusec
from fusec.codegen.cpp.prefetches import (
    iterations_ahead,
    lines_apart,
    lines_of,
    next_tile,
    own_loads,
    points_ahead,
)
from fusec.ir.dtype import F32, I64
from fusec.ir.expr import Buffer, IndexValue, Load, Runtime, Var
from fusec.ir.index import Axis, index
from fusec.ir.program import For, Let, Program
from tests.support import BACKEND, values

LANE = Axis("l", index(8))
POINT, PART, STEP = Axis("n", index(16)), Axis("p", index(8)), Axis("k", index(128))


def stream(*, parts: bool, stages: int = 128) -> tuple[Program, For, Load]:
    """Four columns of weights of 1024 terms, the same for all parts unless these have their own."""
    weights = Buffer("w", (index(1 << 20),), (index(1),), F32)
    first = index(POINT) * 4096 + index(STEP) * 8 + index(LANE)
    first = first if parts else first + index(PART) * (1 << 16)
    loads = [Load(weights, (first + 1024 * column,)) for column in range(4)]
    lets = tuple(Let(Var(f"w{k}", F32, frozenset({LANE})), x) for k, x in enumerate(loads))
    loop = For(STEP, index(0), (STEP.extent,), lets)
    grid = (POINT, PART)
    made = Program("k", (weights,), (), (), grid, (LANE,), (loop,), stages=stages)
    return made, loop, loads[0]


def test_a_tile_s_operand_is_fetched_a_trip_of_the_loop_ahead() -> None:
    """Not what stays where it is, nor what is read with a step."""
    _, _, load = stream(parts=True)
    assert next_tile(load, STEP, LANE) == load.indices[0] - index(LANE) + 8
    assert next_tile(load, PART, LANE) is None
    assert next_tile(load, STEP, None) is None


def test_places_of_one_line_are_fetched_once() -> None:
    _, _, load = stream(parts=True)
    (first,) = load.indices
    other = Load(Buffer("v", (index(64),), (index(1),), F32), (first,))
    places = {
        Load(load.buffer, (first + n,)): None if n == 24 else first + n for n in (32, 0, 8, 24, 16)
    }
    found = lines_of({**places, other: first}, 64)
    assert sorted((at - first).const for at in found.values()) == [0, 0, 16, 32]
    assert other in found


@pytest.mark.parametrize("inside", [False, True])
def test_a_row_is_fetched_ahead_if_its_number_is_known_before_the_loop(inside: bool) -> None:
    """One that an iteration computes has no name before it: SAM's positions did not build."""
    _, loop, first = stream(parts=True)
    row = Let(Var("row", I64, frozenset()), IndexValue(index(POINT)))
    place = index(Runtime(row.var, index(64))) * 1024 + index(STEP) * 8 + index(LANE)
    gathered = Load(first.buffer, (place,))
    read = Let(Var("v", F32, frozenset({LANE})), gathered)
    body = (row, read) if inside else (read,)
    assert own_loads(replace(loop, body=body)) == ([] if inside else [gathered])


@pytest.mark.parametrize("rows", [32, 128])
def test_weights_of_a_tile_are_fetched_while_it_is_multiplied(rows: int) -> None:
    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, w.to(x.dtype))

    x, w = values(rows, 512), torch.zeros(256, 512, dtype=torch.int8)
    *_, kernel = fusec.kernels(linear, x.bfloat16(), w, target="cpu:amx")
    (fetched,) = re.findall(
        r"if \((\w+) % 4 == 0\) __builtin_prefetch\((\S+) .* \+ 256LL", kernel.source
    )
    assert re.search(rf"ld_i8\({re.escape(fetched[1])} .*{fetched[0]}", kernel.source)


def test_points_that_share_weights_fetch_a_part_each_of_those_behind() -> None:
    program, loop, first = stream(parts=True)
    wanted = (index(POINT) + 1) * 4096 + index(PART) * 512 + index(STEP) * 4
    found = points_ahead(loop, replace(program, grid=(Axis("g", index(2)), *program.grid)), LANE)
    assert {load: at for load, at in found.items() if at is not None} == {first: wanted}
    assert len(found) == 4


def test_a_short_loop_fetches_the_next_point_s_weights_as_they_lie() -> None:
    program, loop, first = stream(parts=True)
    alone = replace(program, grid=(POINT,))
    wanted = (index(POINT) + 1) * 4096 + index(STEP) * 32
    assert points_ahead(loop, alone, LANE)[first] == wanted
    assert points_ahead(loop, replace(alone, stages=127), LANE) == {}


@pytest.mark.parametrize("parts", [True, False])
def test_other_points_fetch_for_themselves(parts: bool) -> None:
    program, loop, first = stream(parts=parts, stages=1 if parts else 128)
    assert points_ahead(loop, program, LANE) == {}
    at = iterations_ahead(first, [STEP], program, LANE)
    assert at == first.indices[0] - index(LANE) + 8 * program.stages


@pytest.mark.parametrize(("step", "fetches"), [(8, False), (192, True)])
def test_rows_of_a_matrix_are_fetched_ahead_whoever_shares_them(step: int, fetches: bool) -> None:
    program, _, _ = stream(parts=True)
    weights = Buffer("w", (index(1 << 20),), (index(1),), F32)
    load = Load(weights, (index(PART) * 8 + index(STEP) * step + index(LANE),))  # of no POINT
    at = iterations_ahead(load, [STEP], program, LANE)
    assert (at is not None) is fetches


@pytest.mark.skipif(BACKEND != "fusec", reason="reads fusec's kernels")
def test_parts_of_a_block_of_experts_fetch_the_weights_behind() -> None:
    def experts(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, w.transpose(1, 2), offs)

    pytest.importorskip("transformers.integrations.moe")
    for rows, fetches in ((64, 1), (4, 0)):
        offs = torch.tensor([rows // 2, rows], dtype=torch.int32)
        kernels = fusec.kernels(experts, values(rows, 256), values(2, 64, 256), offs)
        (product,) = (k.source for k in kernels if "inside k:256" in k.source)
        found = re.findall(r"__builtin_prefetch\(p_\w+ \+ \(.*i_i1 \* 128LL", product)
        assert len(found) == fetches


@pytest.mark.parametrize(("step", "every"), [(8, 8), (16, 4), (24, 2), (64, 1), (80, 1), (0, 1)])
def test_one_iteration_of_those_that_share_a_line_fetches_it(step: int, every: int) -> None:
    assert lines_apart(index(POINT) * 4096 + index(STEP) * step, STEP, 64) == every
