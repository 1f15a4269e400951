"""What a backward is given, which no guard covers: tensors that hooks packed, and tangents.

Kernels read tensors where they lie by the trace. A hook of saved tensors may give back another
layout: ``save_on_cpu(pin_memory=True)`` makes each contiguous. A tangent may have the negative bit,
or no memory at all.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from fusec.runtime.calls.ranges import BoxedCall
from fusec.runtime.interior import internal_overlap, top_hooks

Traced: TypeAlias = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], torch.dtype]
"""A tensor, and its shape, strides and type by the trace."""

_seen = False


def note_hooks() -> None:
    """Remember that what a forward saves passes hooks: backwards compare layouts from now on."""
    global _seen
    _seen = _seen or top_hooks(True) is not None


def noting_hooks(forward: BoxedCall) -> BoxedCall:
    """Return a forward that notes hooks when it is called."""

    def run(args: list[Any]) -> Any:
        note_hooks()
        return forward(args)

    return run


def hooked() -> bool:
    """Return True if any forward of this process ran with hooks for saved tensors."""
    return _seen


def relaid(*saved: Traced) -> list[torch.Tensor]:
    """Return saved tensors with the strides of the trace and no negative bit, copied if needed.

    Raises:
        RuntimeError: for another shape or type than was saved.
    """
    return [_relaid(*one) for one in saved]


def _relaid(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    tensor = plain(tensor)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise RuntimeError(
            f"a hook of saved tensors gave back {tensor.dtype} of {tuple(tensor.shape)}; "
            f"{dtype} of {shape} was saved"
        )
    if tensor.stride() == strides:
        return tensor
    made = torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device)
    if internal_overlap(made) == 0:
        return made.copy_(tensor)
    # Expanded, or windows of one memory: elements at one place are equal.
    memory = made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,), 0)
    places = torch.arange(memory.numel(), device=tensor.device).as_strided(shape, strides)
    memory[places.reshape(-1)] = tensor.reshape(-1)
    return made


def plain(given: Any) -> Any:
    """Return a tensor without the negative bit, and with memory: copied where it is not so."""
    if given is not None and (given.is_neg() or given._is_zerotensor()):
        return torch.empty_like(given).copy_(given)
    return given
