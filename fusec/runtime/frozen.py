"""Constants of a graph that follow from a model's weights: computed before the first call.

A call compares the weights with those that the constants were computed of: the same objects, at
the same addresses, in the same version. Others are computed again, into the same memory. What is
written past torch, through ``.data`` or NumPy, changes none of these: ``refreeze`` is for that.

What the comparison costs: 0.3 us a weight (2026-11).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[list[Any]], Any]
_frozen: weakref.WeakSet[Frozen] = weakref.WeakSet()


class Frozen:
    """A compiled graph's call, and the constants that it reads.

    Args:
        compute: from some of the inputs to the constants' values.
        positions: of those inputs.
        constants: where the graph reads the values.
    """

    _boxed_call = True

    def __init__(
        self,
        call: Call,
        compute: Callable[..., Sequence[Tensor]],
        positions: Sequence[int],
        constants: Sequence[Tensor],
    ) -> None:
        self.call, self.compute = call, compute
        self.positions, self.constants = tuple(positions), tuple(constants)
        self.seen: list[tuple[int, int, int]] = []
        _frozen.add(self)

    def __call__(self, args: list[Any]) -> Any:
        weights = [args[k] for k in self.positions]
        now = [(id(w), w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if now != self.seen:
            self.seen = []
            with torch.no_grad():
                for constant, value in zip(self.constants, self.compute(*weights), strict=True):
                    constant.copy_(value)
            self.seen = now
        return self.call(args)

    def reads(self, tensors: Iterable[int]) -> bool:
        """Whether constants were computed of one of some tensors, by their identity."""
        return not {number for number, _, _ in self.seen}.isdisjoint(tensors)


def refreeze(model: torch.nn.Module) -> int:
    """Compute the constants of a frozen model again, before its next call.

    For weights that were written through ``.data`` or NumPy, which cannot be seen.

    Returns:
        How many compiled graphs have constants of its parameters and buffers.
    """
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found = [frozen for frozen in _frozen if frozen.reads(tensors)]
    for frozen in found:
        frozen.seen = []
    return len(found)
