"""Warps with roles of their own: registers that are handed over, mbarriers, overlap of tiles."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusec.tools.emulator.faults import EmulationError
from fusec.tools.emulator.launch import launch
from tests.tools.emulator import roles
from tests.tools.emulator.events import Event, trace
from tests.tools.emulator.recorded import normal, with_instead, without

LIMIT = 5_000_000
LOADER, GROUP = range(4, 8), range(4)
"""Warps of a block by role; three of the loader's only idle."""


def tensors(rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    x, w = normal(rows, depth), normal(columns, depth, scale=depth**-0.5)
    return x, w, torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rows", "columns", "depth"), [(130, 136, 72), (64, 8, 8), (1, 200, 40)])
def test_values_are_right(rows: int, columns: int, depth: int, seed: int) -> None:
    code, (x, w, y) = roles.compiled().code(), tensors(rows, columns, depth)
    launch(code, (2, 1, 1), roles.compiled().arguments(code, x, w, y), seed, LIMIT)
    torch.testing.assert_close(y.double(), roles.expected(x, w), rtol=2**-8, atol=1e-3)


def traced(seed: int) -> tuple[Event, ...]:
    """Four tiles of three steps each, in one block."""
    code, (x, w, y) = roles.compiled().code(), tensors(128, 128, 96)
    return trace(code, (1, 1, 1), roles.compiled().arguments(code, x, w, y), seed)


def test_a_trace_says_which_warp_did_what() -> None:
    loads, stores, products = (
        Counter(one.warp for one in traced(0) if one.operation == operation)
        for operation in ("bulk_load", "bulk_store", "wgmma")
    )
    assert loads.keys() < set(LOADER) and loads.total() == 4 * 3 * 2
    assert stores.keys() < set(GROUP) and stores.total() == 4
    assert products == dict.fromkeys(GROUP, 4 * 3 * 2)


def loaded_before_stores(events: tuple[Event, ...]) -> list[int]:
    """Return for each tile's store how many loads had been issued before it."""
    found, loads = [], 0
    for event in events:
        loads += event.operation == "bulk_load"
        if event.operation == "bulk_store":
            found.append(loads)
    return found


def test_the_next_tiles_loads_may_be_issued_before_a_tile_is_stored() -> None:
    """The loader waits for a free stage and for nothing else: three stages ahead at most."""
    seen = [loaded_before_stores(traced(seed)) for seed in range(4)]
    least, most = ([f(counts) for counts in zip(*seen, strict=True)] for f in (min, max))
    assert all(loads >= 6 * (tile + 1) for tile, loads in enumerate(least))
    assert most == [12, 18, 24, 24]


def test_a_trace_keeps_no_more_than_it_has_room_for() -> None:
    code, (x, w, y) = roles.compiled().code(), tensors(64, 64, 32)
    arguments = roles.compiled().arguments(code, x, w, y)
    whole = trace(code, (1, 1, 1), arguments, 0)
    assert trace(code, (1, 1, 1), arguments, 0, room=5) == whole[:5]


PLANTED = {
    "the loader keeps registers that others wait for": (
        without("setmaxnreg.dec", 0), ("deadlock", "register count")),
    "registers are given back by the wrong instruction": (
        with_instead("setmaxnreg.dec", "setmaxnreg.inc", 0), ("register count",)),
    "a stage is never freed": (without("mbarrier.arrive.shared", 0), ("deadlock",)),
    "a load expects nothing": (without("mbarrier.arrive.expect_tx", 0), ("race with a write",
        "too many arrivals", "deadlock", "uninitialised read")),
    "the result's store is not fenced": (without("fence.proxy.async", 0), ("no proxy fence",)),
    "the result is overwritten while it leaves": (
        without("cp.async.bulk.wait_group.read", 0), ("race with a read",)),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_between_roles_is_found(name: str, seed: int) -> None:
    edit, kinds = PLANTED[name]
    made = replace(roles.compiled(), ptx=edit(roles.compiled().ptx))
    code, (x, w, y) = made.code(), tensors(256, 128, 96)
    with pytest.raises(EmulationError) as caught:
        launch(code, (1, 1, 1), made.arguments(code, x, w, y), seed, LIMIT)
    assert caught.value.fault.kind in kinds, caught.value
