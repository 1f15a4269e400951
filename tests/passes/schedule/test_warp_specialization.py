"""Plans in which one warp loads what others multiply: where they are offered, and how large."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusec.codegen.targets import A100_MACHINE, B200_MACHINE, HOPPER_MACHINE
from fusec.ir.dtype import F32
from fusec.ir.graph import Kernel
from fusec.ir.machine import Machine
from fusec.passes.schedule import gpu_plans
from fusec.passes.schedule.contraction import spread
from fusec.passes.schedule.plan import Plan, print_plan
from tests.passes.schedule.flat import attention, products


def with_roles(machine: Machine, *shape: int, count: int = 1) -> list[Plan]:
    return [p for p in gpu_plans(products(*shape, count=count), machine) if p.roles]


def text(plan: Plan) -> str:
    return " ".join(print_plan("k", plan).split()[2:])


def test_a_wide_product_is_offered_roles() -> None:
    assert list(map(text, with_roles(HOPPER_MACHINE, 8192, 16384, 4096))) == [
        "m=grid*128 n=grid*256 k=loop*64 warps=8 stages=3 descriptors cooperative programs=132",
    ]


def test_two_accumulators_have_half_the_columns_each() -> None:
    assert list(map(text, with_roles(HOPPER_MACHINE, 8192, 14336, 4096, count=2))) == [
        "m=grid*128 n=grid*128 k=loop*64 warps=8 stages=4 descriptors cooperative programs=132",
    ]


def test_an_attentions_forward_has_one_group_and_as_many_slots_as_fit() -> None:
    narrow, wide = (
        gpu_plans(attention(32, 8192, 8192, depth), HOPPER_MACHINE) for depth in (64, 128)
    )
    assert [(p.roles, p.stages) for p in narrow if p.roles] == [("cooperative", 6)]
    assert [(p.roles, p.stages) for p in wide if p.roles] == [("cooperative", 2)]


def test_an_attention_of_fewer_keys_than_a_tile_has_has_none() -> None:
    """Its weights of 0 would be constants, which LLVM puts behind a fence."""
    few, enough = (gpu_plans(attention(32, 8192, n, 128), HOPPER_MACHINE) for n in (24, 48))
    assert [p.roles for p in few if p.roles] == []
    assert [p.roles for p in enough if p.roles] == ["cooperative"]


def test_fewer_tiles_are_smaller_ones() -> None:
    tiles = [[b.tile for b in p.bindings] for p in with_roles(HOPPER_MACHINE, 1024, 2048, 1024)]
    assert tiles == [[128, 128, 64]]


def roles(kernel: Kernel) -> list[str]:
    return [p.roles for p in gpu_plans(kernel, HOPPER_MACHINE)]


ALONE, FOURTH = ["cooperative", "", "", ""], ["", "", "", "cooperative"]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8192, 16384, 4096), ALONE),  # 31 waves of tiles of 128 x 256
        ((64 * 197, 4096, 1024), ALONE),  # 12 waves, all full
        ((8192, 1600, 6400), ALONE),  # 3.4 waves, 0.76 of the lanes; others fill 0.87
        ((4096, 2816, 1024), ALONE),  # 2.7 waves, 0.89 of the lanes, as others
        ((4096, 2080, 1024), FOURTH),  # 2.2 waves, 0.66 of the lanes; others fill 0.79
        ((2048, 4096, 1024), FOURTH),  # 1.9 waves: most programs would have one tile, then one
        ((1024, 2048, 1024), FOURTH),  # one wave
    ],
    ids=str,
)
def test_by_rule_one_group_multiplies_where_programs_fill_their_turns(
    shape: tuple[int, int, int], expected: list[str]
) -> None:
    assert roles(products(*shape))[:4] == expected


def test_by_rule_one_group_multiplies_in_an_attention_of_wide_heads() -> None:
    """Two programs of narrower heads share a multiprocessor, and three of few rows."""
    assert roles(attention(64, 4096, 4096, 128))[:4] == ALONE
    assert roles(attention(64, 4096, 4096, 64))[:4] == FOURTH
    assert roles(attention(16, 1024, 1024, 128))[:4] == FOURTH


@pytest.mark.parametrize("count", (1, 2))
def test_a_kernel_with_roles_by_rule_is_priced_by_its_turns(count: int) -> None:
    kernel = products(8192, 1600, 6400, count=count)
    share = spread(kernel, HOPPER_MACHINE)
    assert share is not None and share.roles
    tile = math.prod(b.tile for b in gpu_plans(kernel, HOPPER_MACHINE)[0].bindings[:2])
    waves = math.ceil(share.programs / 132)
    assert share.busy(132) == pytest.approx(8192 * 1600 / (waves * 132 * tile))
    assert not replace(share, roles=False).busy(132) < 1


@pytest.mark.parametrize("machine", (A100_MACHINE, B200_MACHINE), ids=("sm_80", "sm_100"))
def test_machines_without_asynchronous_products_of_groups_have_none(machine: Machine) -> None:
    assert with_roles(machine, 8192, 16384, 4096) == []


def test_few_rows_and_odd_rows_have_none() -> None:
    assert with_roles(HOPPER_MACHINE, 32, 16384, 4096) == []
    assert with_roles(HOPPER_MACHINE, 8192, 16384, 4095) == []


def test_operands_of_f32_have_none() -> None:
    wide = replace(HOPPER_MACHINE, sm=replace(HOPPER_MACHINE.sm, tf32=True))
    kernel = products(8192, 16384, 4096, dtype=F32)
    assert not any(p.roles for p in gpu_plans(kernel, wide))
