"""A compile's collections pass over what was there before it, and leave the heap as it was."""

from __future__ import annotations

import gc

import pytest

from fusec.runtime import heap
from fusec.runtime.heap import OBJECTS, settled_heap
from tests.calls import calls_of

pytestmark = pytest.mark.usefixtures("unfrozen_heap")


class Young:
    """An object made just now: frozen with all others, which takes seconds to count."""

    def is_frozen(self) -> bool:
        return not any(self is one for age in (0, 1) for one in gc.get_objects(age))


def test_what_was_there_is_frozen_inside_and_not_behind() -> None:
    before, young = gc.get_threshold(), Young()
    assert not young.is_frozen()
    with settled_heap():
        assert young.is_frozen()
        assert gc.get_threshold() == (OBJECTS, *before[1:])
    assert not gc.get_freeze_count()
    assert gc.get_threshold() == before


def test_the_outermost_block_ends_it() -> None:
    young = Young()
    with settled_heap():
        with settled_heap():
            pass
        assert young.is_frozen()
    assert not gc.get_freeze_count()


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="x"), settled_heap():
        raise ValueError("x")
    assert not gc.get_freeze_count()


def test_a_heap_that_the_user_froze_stays_frozen_and_is_counted_once() -> None:
    young = Young()
    gc.freeze()
    with calls_of(gc.get_freeze_count) as counts:
        for _ in range(3):
            with settled_heap():
                pass
    assert young.is_frozen()
    assert len(counts) == 1


def test_who_collects_by_hand_is_left_alone() -> None:
    gc.disable()
    with settled_heap():
        assert not gc.get_freeze_count()
    gc.enable()
    gc.set_threshold(0)
    with settled_heap():
        assert gc.get_threshold()[0] == 0


@pytest.mark.slow
def test_no_full_collection_stands_right_behind_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "OBJECTS", 10_000)
    full: list[str] = []
    kept: list[list[object]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(phase)

    def make(count: int) -> None:
        kept.extend([] for _ in range(count))

    gc.set_threshold(100, 5, 5)
    with settled_heap():
        make(40 * heap.OBJECTS)  # enough for a full collection, had they been made outside
    gc.callbacks.append(note)
    try:
        make(2000)
        assert not full
        make(5000)
        assert full  # that it begins to count anew is all
    finally:
        gc.callbacks.remove(note)
