"""The time of kernels whose warps have roles: who hides what, and what was published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.lowering.lower import lower
from fusec.codegen.targets import find_target
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.ir.program import Program
from fusec.passes.schedule.plan import Plan
from fusec.tools.report.kernel_time import Expectation, Work
from fusec.tools.report.role_time import _uneven, expect_roles, multiplied_by_tiles
from fusec.tools.static_checks import Section
from tests.codegen.test_contraction_static import causal, offered, staged, tensors
from tests.tools.report.test_kernel_time import H200, Published, modelled
from tests.tools.report.test_static_rules import PRODUCT

WAITING = (Section(-1, 200), Section(0, 30), Section(1, 3), Section(1, 30), Section(3, 40))
"""Triton's loop of other warps, and in it the warp that loads: its walk, and the loop in that."""


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.relu(F.linear(x, w))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def program_of(fn: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Program:
    (one,) = staged(fn, *tensors(*shapes))
    flat, plans = offered(one)
    return lower(flat, next(plan for plan in plans if plan.roles))


def expected(program: Program, walk: int, loop: Section) -> Expectation | None:
    """Return what is said of a program with so many instructions behind its loop."""
    number = len(WAITING)
    code = replace(PRODUCT, sections=(*WAITING, Section(0, walk), replace(loop, inside=number)))
    done = Work(1, (), 1 << 20, multiplied=multiplied_by_tiles(program))
    return expect_roles(program, code, done, H200)


def test_what_stands_behind_its_loop_takes_a_tile_longer() -> None:
    program = program_of(linear, (8192, 4096), (4096, 4096))
    short, long = (
        expected(program, walk, Section(0, 50, barriers=2, products=4)) for walk in (200, 4000)
    )
    assert short is not None and long is not None
    assert long.us / short.us - 1 > 0.1


def test_a_softmax_hides_half_of_the_products() -> None:
    program = program_of(attention, *[(1, 16, 16384, 128)] * 3)
    # an iteration of 128 keys: half of 2048 clocks of products, 100 or 2000, and a chain of 1300
    shares = []
    for instructions in (50, 1000):
        found = expected(program, 1600, Section(0, instructions, products=12))
        assert found is not None
        shares.append(found.share)
    assert shares[0] > 0.9 and 0.5 < shares[1] < 0.6


def test_two_slots_are_full_too_late() -> None:
    three = program_of(linear, (8192, 4096), (4096, 4096))
    loop = Section(0, 50, barriers=2, products=4)
    found = [expected(replace(three, stages=n), 200, loop) for n in (3, 2)]
    enough, few = found
    assert enough is not None and few is not None
    assert few.us > 1.2 * enough.us and "slots" in few.cause


def test_programs_may_get_long_tiles_only() -> None:
    """132 programs, 8 tiles of rows below a diagonal: each takes tiles t and t + 4 of some heads.

    Those of the longest have 8 and 4 of 4.5 steps on the mean: 12 of 9, and a tile more.
    """
    shapes = [(8, 25, 1024, 64)] * 3
    assert _uneven(program_of(causal, *shapes)) == pytest.approx(1.47, abs=0.01)
    assert _uneven(program_of(attention, *shapes)) == 1.0


def test_code_that_is_not_of_roles_has_no_time() -> None:
    program = program_of(linear, (8192, 4096), (4096, 4096))
    alone = replace(PRODUCT, sections=(Section(-1, 300), Section(0, 50, products=4)))
    assert expect_roles(program, alone, Work(1, (), 1 << 20), H200) is None


PUBLISHED = {
    "cuBLAS": Published(linear, ((8192, 8192),) * 2, 0.96, H200),
    "cuBLAS, long": Published(linear, ((4096, 14336),) * 2, 0.99, H200),
}
"""Kernels by others, whose warps have roles, too (docs/performance.md has the sources)."""


@pytest.mark.slow
def test_roles_are_expected_near_what_others_reach_by_them() -> None:
    target = find_target("sm_90")
    theirs = target.codegen.plans

    def plans(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
        return tuple(plan for plan in theirs(kernel, machine) if plan.roles)[:1]

    with_roles = replace(target, codegen=replace(target.codegen, plans=plans))
    errors = {}
    for name, row in PUBLISHED.items():
        (found,) = modelled(row, target=with_roles)
        errors[name] = found.share / row.share - 1
    assert max(map(abs, errors.values())) < 0.1, errors
