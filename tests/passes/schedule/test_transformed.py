"""Blocks of transformed products: whole ones for the cache, enough of them for all cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tests.triton_backend  # noqa: F401 (registers the backends)
from fusec.codegen.targets import CPU_MACHINE
from fusec.ir.expr import Load
from fusec.ir.index import index
from fusec.ir.rewrite import rewrite
from fusec.passes.schedule import accepts_cpu
from fusec.passes.schedule.transformed import accepts, plans
from tests.passes.schedule.flat import bindings
from tests.passes.schedule.short_filters import filtered
from tests.support import check

MACHINE = replace(CPU_MACHINE, vector=16)


def plan_of(lines: int, places: int, channels: int, outputs: int) -> str:
    kernel, _ = filtered(lines, places, channels, outputs)
    (plan,) = plans(kernel, MACHINE)
    return bindings(plan)


@pytest.mark.parametrize(
    ("sizes", "tiles", "groups"),
    [
        ((8, 512, 64, 64), 48, 4),
        ((1, 384, 64, 512), 48, 32),
        ((1, 160, 64, 128), 24, 8),
        ((1, 40, 64, 256), 24, 4),
        ((1, 40, 64, 64), 24, 4),
    ],
    ids=["many", "wide results", "few", "so few that columns are shared", "one part"],
)
def test_blocks_fit_the_cache_and_are_enough(
    sizes: tuple[int, ...], tiles: int, groups: int
) -> None:
    text = plan_of(*sizes)
    assert f" by {tiles}" in text
    assert f"=grid by {groups}" in text


def test_an_axis_that_is_not_divided_is_cut_in_tiles() -> None:
    assert "w=grid*2 by 24" in plan_of(1, 7, 16, 16)
    assert "grid*2" not in plan_of(1, 8, 16, 16)


def test_lanes_are_a_panel() -> None:
    kernel, _ = filtered(2, 8, 32, 32, panel=8)
    assert not accepts(kernel, MACHINE)
    assert accepts(kernel, replace(CPU_MACHINE, vector=8))
    assert not accepts_cpu(kernel, MACHINE)


def test_channels_are_whole_vectors_side_by_side() -> None:
    assert not accepts(filtered(2, 8, 24, 32)[0], MACHINE)
    kernel, (x, *_) = filtered(2, 8, 32, 32)
    assert accepts(kernel, MACHINE)

    def turned(node):
        if isinstance(node, Load) and node.buffer.base is x:
            return Load(node.buffer, (node.indices[0] * index(2),), node.guard)
        return node

    apart = kernel.map(lambda exprs: rewrite(exprs, turned))
    assert not accepts(apart, MACHINE)


def test_on_a_gpu_weights_by_position_are_a_sum_like_any_other() -> None:
    """Tiles of transformed products are a CPU's; a kernel that looks so had no program on a GPU."""
    weighted = lambda x, w: ((x @ w) * torch.arange(4.0)[:, None, None]).sum(0)  # noqa: E731
    check(weighted, torch.randn(4, 32, 16), torch.randn(4, 16, 24), backend="triton_fused")
