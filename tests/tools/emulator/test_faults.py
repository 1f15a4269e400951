"""Faults planted in fusec's own kernels, by a change of their PTX, and what the emulator says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from fusec.tools.emulator.faults import Fault
from tests.tools.emulator import recorded
from tests.tools.emulator.recorded import Launched, changed, first_map, with_instead, without

SOFTMAX, NORM = recorded.softmax, recorded.layer_norm
RACES = ("race with a write", "race with a read", "uninitialised read")


def copied() -> Launched:
    """A product whose tiles come by cp.async."""
    return recorded.linear("never")


def described() -> Launched:
    """A product whose tiles come by descriptors."""
    return recorded.linear("always")


def one_more(text: str, number: int = 0) -> Callable[[str], str]:
    """Return an edit that lets a wait leave one more group than it may."""
    return changed(text, lambda s: re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", s), number)


def unmasked(text: str, number: int) -> Callable[[str], str]:
    return changed(text, lambda line: re.sub(r"@%p\d+ ", "", line), number)


def no_prologue_barriers(ptx: str) -> str:
    """Drop the barriers before the loop, which let all warps know that mbarriers are made."""
    head, label, rest = ptx.partition("$L__BB0_1:")
    return re.sub(r"bar\.sync\s+0;", "", head) + label + rest


def both_copies_uncommitted(ptx: str) -> str:
    return ptx.replace("cp.async.bulk.commit_group;", "")


PLANTED: dict[str, tuple[Callable[[], Launched], dict[str, Any], tuple[str, ...]]] = {
    "a load's mask is removed": (
        SOFTMAX, {"edit": unmasked("ld.global", 3)}, ("out of bounds",)),
    "a store's mask is removed": (
        SOFTMAX, {"edit": unmasked("st.global", 3)}, ("out of bounds", "race between blocks")),
    "an address is not aligned": (
        SOFTMAX, {"edit": with_instead("+ 0 ]", "+ 8 ]", 0)}, ("misaligned",)),
    "the grid has a block too many": (
        NORM, {"grid": (5, 1, 1)}, ("out of bounds", "race between blocks")),
    "the first barrier is removed": (NORM, {"edit": without("bar.sync", 0)}, RACES),
    "the second barrier is removed": (NORM, {"edit": without("bar.sync", 1)}, RACES),
    "the third barrier is removed": (NORM, {"edit": without("bar.sync", 2)}, RACES),
    "nothing is stored where others read": (
        NORM, {"edit": without("st.shared", 0)}, ("uninitialised read",)),
    "cp.async.wait_group leaves one too many": (
        copied, {"edit": one_more("cp.async.wait_group")}, RACES),
    "the loop's barrier is removed": (copied, {"edit": without("bar.sync", 1)}, RACES),
    "a tile's copy is off by 16 bytes": (
        copied, {"edit": with_instead("+ 0 ], [", "+ 16 ], [", 0)},
        (*RACES, "outside of shared memory")),
    "the loop's wgmma.wait_group leaves one too many": (
        copied, {"edit": one_more("wgmma.wait_group", 0)}, RACES),
    "the last wgmma.wait_group leaves one too many": (
        copied, {"edit": one_more("wgmma.wait_group", 1)}, ("register in flight",)),
    "a left operand is computed while wgmma reads the last one": (
        recorded.computed, {"edit": one_more("wgmma.wait_group", 0)},
        ("register in flight", *RACES)),
    "the fence before wgmma is removed": (
        copied, {"edit": without("fence.proxy.async")}, ("no proxy fence",)),
    "wgmma.fence is removed": (copied, {"edit": without("wgmma.fence")}, ("no wgmma fence",)),
    "the fence before a bulk store is removed": (
        described, {"edit": without("fence.proxy.async")}, ("no proxy fence",)),
    "expect_tx expects half": (
        described, {"edit": with_instead("32768;", "16384;", 0)}, RACES),
    "expect_tx expects twice as much": (
        described, {"edit": with_instead("32768;", "65536;", 0)}, ("deadlock",)),
    "a wait has the wrong phase": (
        described, {"edit": changed("try_wait", lambda s: re.sub(r"%r\d+;", "1;", s), 0)},
        (*RACES, "deadlock")),
    "an mbarrier expects two arrivals": (
        described, {"edit": changed("mbarrier.init", lambda s: s.replace(", 1;", ", 2;"), 0)},
        ("deadlock",)),
    "an mbarrier is not made": (
        described, {"edit": without("mbarrier.init", 0)}, ("no such mbarrier",)),
    "no barrier follows the making of mbarriers": (
        described, {"edit": no_prologue_barriers}, ("mbarrier race", "no such mbarrier")),
    "a bulk store is not waited for": (
        described, {"edit": without("cp.async.bulk.wait_group")}, ("not waited for", *RACES)),
    "a bulk store is not committed": (
        described, {"edit": both_copies_uncommitted}, ("not waited for", *RACES)),
    "a descriptor's box is half as high": (
        described, {"given": first_map(box=lambda b: (b[0], b[1] // 2))}, ("deadlock",)),
    "a descriptor has a row too many": (
        described, {"given": first_map(dims=lambda d: (d[0], d[1] + 1))}, ("out of bounds",)),
    "a descriptor's rows are too far apart": (
        described, {"given": first_map(strides=lambda s: (s[0], s[1] + 16))}, ("out of bounds",)),
    "a descriptor has another rank": (
        described,
        {"given": first_map(dims=lambda d: (*d, 1), strides=lambda s: (*s, 1 << 20),
                            box=lambda b: (*b, 1))},
        ("no such tensor map",)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_in_each_order_of_warps(name: str, seed: int) -> None:
    launched, change, kinds = PLANTED[name]
    found = launched().fault(seed=seed, **change)
    assert found is not None, "nothing was found"
    assert found.kind in kinds, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("launched", [SOFTMAX, NORM, copied, described, recorded.computed])
def test_kernels_as_they_are_have_no_fault(launched: Callable[[], Launched], seed: int) -> None:
    assert launched().fault(seed=seed) is None


def test_a_fault_says_where_it_is_in_each_language() -> None:
    found = SOFTMAX().fault(unmasked("ld.global", 3))
    assert isinstance(found, Fault)
    assert (found.kernel, found.kind) == ("softmax_k0", "out of bounds")
    assert found.place.text.startswith("ld.global.v4.b32")
    assert "tl.load" in found.place.source
    assert found.notation[0].startswith("kernel k0 -> ")
    text = str(found)
    assert f"PTX line {found.place.line}: ld.global" in text
    assert f"Triton line {found.place.source_line}: " in text


def test_a_race_names_both_instructions() -> None:
    found = NORM().fault(without("bar.sync", 1), seed=1)
    assert found is not None and found.other is not None
    assert ".shared" in found.place.text and ".shared" in found.other.text
