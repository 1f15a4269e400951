"""Constants of a graph that depend on a model's weights alone: computed before the first call.

Each call checks that its weights are the ones that the constants were computed from: the same
objects, at the same addresses, in the same version. If not, the constants are computed again, into
the same memory, once no thread reads it. Writes through ``.data``, NumPy, or a fused optimizer
(which increments no version) are not detected: ``refreeze`` is for these.

The check costs 0.2 us a weight, and 1 us a call (2026-11).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusec.errors import UsageError
from fusec.runtime.calls.executable import BoxedCall

_frozen: weakref.WeakSet[Frozen] = weakref.WeakSet()


class Frozen:
    """A compiled graph's call, and the constants that it reads.

    Args:
        compute: returns the constants' values from some of the inputs.
        positions: the positions of these inputs.
        keep: stores the values where the graph reads them.
    """

    _boxed_call = True

    def __init__(
        self,
        call: BoxedCall,
        compute: Callable[..., Sequence[Tensor]],
        positions: Sequence[int],
        keep: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self.call, self.compute, self.keep = call, compute, keep
        self.positions = tuple(positions)
        self.seen: list[tuple[weakref.ref[Tensor], int, int]] = []
        self.running = 0
        self.turn, self.lock = threading.Lock(), threading.Lock()
        self.idle = threading.Condition(self.lock)
        _frozen.add(self)

    def __call__(self, args: list[Any]) -> Any:
        with self.turn:
            weights = [args[k] for k in self.positions]
            if not self.holds(weights):
                with self.idle:  # calls with other weights: of another model, or before a change
                    self.idle.wait_for(lambda: not self.running)
                self.freeze(weights)
            with self.lock:
                self.running += 1
        try:
            return self.call(args)
        finally:
            with self.lock:
                self.running -= 1
                if not self.running:
                    self.idle.notify()

    def holds(self, weights: Sequence[Tensor]) -> bool:
        """Return True if the constants were computed from these versions of these weights."""
        return len(self.seen) == len(weights) and all(
            ref() is w and address == w.data_ptr() and version == w._version
            for w, (ref, address, version) in zip(weights, self.seen, strict=True)
        )

    def freeze(self, weights: Sequence[Tensor]) -> None:
        """Compute the constants from some weights."""
        self.seen = []
        with torch.no_grad():
            self.keep(self.compute(*weights))
        # A weak reference tells a weight from a later one that took its place in memory.
        self.seen = [(weakref.ref(w), w.data_ptr(), w._version) for w in weights]

    def reads(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if constants were computed from any of some tensors."""
        numbers = set(map(id, tensors))
        return any(id(ref()) in numbers for ref, _, _ in self.seen)


def refreeze(model: torch.nn.Module) -> int:
    """Compute the constants of a frozen model again, before its next call.

    For weights that were written through ``.data``, NumPy or an optimizer with ``fused=True``:
    these cannot be seen.

    Returns:
        How many compiled graphs have constants of its parameters and buffers.
    Raises:
        UsageError: if it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"refreeze takes the module whose weights changed, not {type(model).__name__}."
        )
    tensors = (*model.parameters(), *model.buffers())
    found = [frozen for frozen in _frozen if frozen.reads(tensors)]
    for frozen in found:  # no version counter is -1
        frozen.seen = [(ref, address, -1) for ref, address, _ in frozen.seen]
    return len(found)
