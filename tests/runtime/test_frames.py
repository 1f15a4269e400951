"""Calls of a compile find room for their frames, however deep the program stands."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from fusec.driver import backend
from fusec.runtime.frames import SLOTS, with_room
from tests.calls import calls_of

CALLS = 300


def leaf() -> None:
    """Be called: a frame of its own."""


def most_faults(depth: int) -> int:
    """Return the page faults of ``CALLS`` calls at the depth, up to this one, that has most."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt  # others map memory, too
    for _ in range(CALLS):
        leaf()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return max(faults, most_faults(depth - 1)) if depth else faults


def test_no_depth_has_calls_that_map_memory() -> None:
    assert with_room(most_faults, 400) < CALLS / 2


@pytest.mark.skipif(
    not (3, 11) <= sys.version_info < (3, 13), reason="3.10 has no chunks, later 3.13 keep one"
)
def test_without_room_some_depth_maps_memory_at_each_call() -> None:
    assert most_faults(400) >= CALLS


def test_values_and_errors_pass() -> None:
    assert with_room(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        with_room(divmod, 7, 0)


def has_room() -> bool:
    """Return True if a frame below which this one stands has asked for room."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_stacksize < SLOTS:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@pytest.mark.parametrize("called", ("start", "compile_graph"))
def test_forward_and_backward_are_compiled_with_room(
    called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEC_CACHE", "0")
    torch._dynamo.reset()
    x = torch.randn(8, requires_grad=True)
    with calls_of(getattr(backend, called), note=has_room) as calls:
        torch.compile(lambda x: (x.sin() * 2).sum(), backend="fusec")(x).backward()
    assert calls and all(call.noted for call in calls)
