"""Faults planted in fusec's own kernels, by a change of their PTX, and what the emulator says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F

from fusec.tools.emulator.decode import unordered
from fusec.tools.emulator.faults import Fault
from fusec.tools.emulator.parse import parse
from tests.tools.emulator import recorded
from tests.tools.emulator.recorded import Launched, changed, first_map, with_instead, without

SOFTMAX, NORM = recorded.softmax, recorded.layer_norm
RACES = ("race with a write", "race with a read", "uninitialised read")


def copied(target: str) -> Launched:
    """A product whose tiles come by cp.async."""
    return recorded.linear("never", target)


def described(target: str) -> Launched:
    """A product whose tiles come by descriptors."""
    return recorded.linear("always", target)


def one_more(text: str, number: int = 0) -> Callable[[str], str]:
    """Return an edit that lets a wait leave one more group than it may."""
    return changed(text, lambda s: re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", s), number)


def unmasked(text: str, number: int) -> Callable[[str], str]:
    return changed(text, lambda line: re.sub(r"@%p\d+ ", "", line), number)


def no_prologue_barriers(ptx: str) -> str:
    """Drop the barriers before the loop, which let all warps know that mbarriers are made."""
    made = ptx.index("mbarrier.init")
    label = re.compile(r"\$L__BB0_\d+:").search(ptx, made)
    assert label is not None
    return ptx[:made] + re.sub(r"bar\.sync\s+0;", "", ptx[made : label.end()]) + ptx[label.end() :]


def unawaited(number: int) -> Callable[[str], str]:
    """Return an edit that goes on without waiting for an mbarrier's phase."""
    return changed("try_wait", lambda line: "setp.eq.s32 complete, 0, 0;", number)


def without_barrier_behind(text: str) -> Callable[[str], str]:
    """Return an edit that drops the first barrier behind a text."""

    def edit(ptx: str) -> str:
        at = ptx.index(text)
        return ptx[:at] + re.sub(r"bar\.sync\s+0;", "", ptx[at:], count=1)

    return edit


def both_copies_uncommitted(ptx: str) -> str:
    return ptx.replace("cp.async.bulk.commit_group;", "")


def overlapping(target: str) -> Launched:
    """A row over several warps, launched to start while the launch before it ends."""
    return recorded.layer_norm(target, "always")


def overlapping_copies(target: str) -> Launched:
    """A product whose tiles come by cp.async, launched likewise."""
    return recorded.linear("never", target, "always")


def overlapping_boxes(target: str) -> Launched:
    """A product whose tiles come by descriptors, launched likewise."""
    return recorded.linear("always", target, "always")


def waits_behind(text: str) -> Callable[[str], str]:
    """Return an edit that lets the wait for the launch before come behind a line with a text."""

    def edit(ptx: str) -> str:
        kept = re.sub(r"griddepcontrol\.\w+\s*;", "", ptx)
        return changed(text, lambda line: f"{line}\ngriddepcontrol.wait;", 0)(kept)

    return edit


def only_first_warp_waits(ptx: str) -> str:
    """Let all warps but the first pass the wait, and nothing order them behind it."""
    first = "mov.u32 thread, %tid.x; setp.lt.u32 waits, thread, 32;"
    declared = f"{{ .reg .b32 thread; .reg .pred waits; {first} @waits griddepcontrol.wait; }}"
    kept = re.sub(r"griddepcontrol\.launch_dependents\s*;", "", ptx)
    return re.sub(r"griddepcontrol\.wait\s*;", declared, kept)


def exchanged(ptx: str) -> str:
    """Exchange the wait and the start of the next launch."""
    names = {"wait": "launch_dependents", "launch_dependents": "wait"}
    return re.sub(r"griddepcontrol\.(\w+)\s*;", lambda m: f"griddepcontrol.{names[m[1]]};", ptx)


Planted = dict[str, tuple[Callable[[str], Launched], dict[str, Any], tuple[str, ...]]]

EVERYWHERE: Planted = {
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
    "the barrier behind it is removed": (
        copied, {"edit": without_barrier_behind("cp.async.wait_group")}, RACES),
    "a tile's copy is off by 16 bytes": (
        copied, {"edit": with_instead("+ 0 ], [", "+ 16 ], [", 0)},
        (*RACES, "outside of shared memory")),
    "the fence before a bulk store is removed": (
        described, {"edit": without("fence.proxy.async", -1)}, ("no proxy fence",)),
    "expect_tx expects half": (
        described, {"edit": with_instead("32768;", "16384;", 0)}, RACES),
    "expect_tx expects twice as much": (
        described, {"edit": with_instead("32768;", "65536;", 0)}, ("deadlock",)),
    "a wait has the wrong phase": (
        described, {"edit": changed("try_wait", lambda s: re.sub(r"%r\d+;", "1;", s), 0)},
        (*RACES, "deadlock")),
    "a load's phase is not awaited": (described, {"edit": unawaited(0)}, RACES),
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
"""Faults of kernels for each GPU."""

WGMMA: Planted = {
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
}  # fmt: skip

TENSOR = "tensor memory race"
TENSOR_MEMORY: Planted = {
    "a product is not committed": (copied, {"edit": without("tcgen05.commit", 0)}, ("deadlock",)),
    "the last product is not awaited": (copied, {"edit": unawaited(-1)}, (TENSOR,)),
    "a tile is overwritten while it is multiplied": (copied, {"edit": unawaited(0)}, RACES),
    "sums are used before they are loaded": (
        copied, {"edit": without("tcgen05.wait::ld", 0)}, ("register in flight",)),
    "zeros are not stored when a product adds to them": (
        copied, {"edit": without("tcgen05.wait::st", 0)}, (TENSOR,)),
    "a computed operand is not stored when it is multiplied": (
        recorded.computed, {"edit": without("tcgen05.wait::st", 1)}, (TENSOR,)),
    "a computed operand is overwritten while it is multiplied": (
        recorded.computed, {"edit": unawaited(2)}, (TENSOR,)),
    "tensor memory is not given back": (
        copied, {"edit": without("tcgen05.dealloc", 0)}, ("tensor memory leak",)),
    "half of the tensor memory is given back": (
        copied, {"edit": changed("tcgen05.dealloc", lambda s: s.replace(" 128;", " 64;"), 0)},
        ("tensor memory allocation",)),
    "sums are beyond the allocation": (
        copied, {"edit": changed("tcgen05.ld", lambda s: s.replace("+ 0]", "+ 128]"), 0)},
        ("outside of tensor memory",)),
    "the address is read before it is there": (
        copied, {"edit": without_barrier_behind("tcgen05.alloc")}, RACES),
    "the fence before a product is removed": (
        copied, {"edit": without("fence.proxy.async")}, ("no proxy fence",)),
}  # fmt: skip
"""Faults of tcgen05."""

FRAGMENTS: Planted = {
    "the last copies are not awaited": (copied, {"edit": one_more("cp.async.wait_group")}, RACES),
    "tiles are overwritten while they are read": (
        copied, {"edit": without("bar.sync", 2)}, RACES),
    "tiles that are multiplied come too late": (described, {"edit": unawaited(0)}, RACES),
    "a fragment is read from beside its tile": (
        copied, {"edit": changed("ldmatrix", lambda s: s.replace("+4096]", "+4104]"), 1)},
        ("misaligned",)),
    "a fragment is read from beyond shared memory": (
        copied, {"edit": changed("ldmatrix", lambda s: s.replace("+4096]", "+409600]"), 1)},
        ("outside of shared memory",)),
}  # fmt: skip
"""Faults of mma, whose operands warps load from shared memory."""

EARLY = ("access before the wait",)
OVERLAPPING: Planted = {
    "a load comes before the wait": (overlapping, {"edit": waits_behind("ld.global")}, EARLY),
    "a copy is issued before the wait": (
        overlapping_copies, {"edit": waits_behind("cp.async.cg")}, EARLY),
    "a copy of a box is issued before the wait": (
        overlapping_boxes, {"edit": waits_behind("cp.async.bulk.tensor")}, EARLY),
    "nothing waits": (
        overlapping, {"edit": changed("griddepcontrol.wait", lambda line: "ret;", 0)},
        ("no wait",)),
    "some warps do not wait": (
        overlapping, {"edit": only_first_warp_waits}, EARLY),
    "the next launch may start before the wait": (
        overlapping, {"edit": exchanged}, ("dependents before the wait",)),
}  # fmt: skip
"""Faults of launches that overlap."""

PLANTED = {
    (target, name): planted
    for target, own in {"sm_90": WGMMA, "sm_100": TENSOR_MEMORY, "sm_120": FRAGMENTS}.items()
    for name, planted in {**EVERYWHERE, **OVERLAPPING, **own}.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("target", "name"), PLANTED)
def test_a_planted_fault_is_found_in_each_order_of_warps(target: str, name: str, seed: int) -> None:
    launched, change, kinds = PLANTED[target, name]
    found = launched(target).fault(seed=seed, **change)
    assert found is not None, "nothing was found"
    assert found.kind in kinds, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(
    "launched",
    [
        *(SOFTMAX, NORM, copied, described, recorded.computed),
        *(overlapping, overlapping_copies, overlapping_boxes),
    ],
)
def test_kernels_as_they_are_have_no_fault(
    launched: Callable[[str], Launched], target: str, seed: int
) -> None:
    assert launched(target).fault(seed=seed) is None


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


@pytest.mark.slow
def test_each_role_waits_for_the_launch_before() -> None:
    """The loader's wait orders the other warps, too: they touch nothing before its first tile."""
    x, w, b = recorded.normal(136, 80), recorded.normal(264, 80), recorded.normal(264)
    (one,) = recorded.record(
        lambda x: F.gelu(F.linear(x, w, b)),
        x,
        roles="cooperative",
        descriptors="always",
        dependent_launches="always",
    )
    assert "warp_specialize" in one.compiled.kernel.source
    assert unordered(parse(one.compiled.code.ptx)) == () and one.fault() is None

    def without_wait(number: int) -> Callable[[str], str]:
        return lambda ptx: without("griddepcontrol.wait", number)(
            re.sub(r"griddepcontrol\.launch_dependents\s*;", "", ptx)
        )

    multiplier, loader = (one.fault(without_wait(number)) for number in (0, 1))
    assert multiplier is None
    assert loader is not None and loader.kind in EARLY
    assert "load_tile" in loader.place.source
    assert unordered(parse(without_wait(0)(one.compiled.code.ptx)))


@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_waits_too_late_is_seen_without_running_it(name: str) -> None:
    launched, change, _ = OVERLAPPING[name]
    ptx = launched("sm_90").compiled.code.ptx
    assert unordered(parse(ptx)) == () != unordered(parse(change["edit"](ptx)))
