"""How far a peer's results are from fp64, and whether that is within the community's rule."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import same

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float64: 1e-9}


def relative_error(outputs: tuple[torch.Tensor, ...], reference: tuple[torch.Tensor, ...]) -> float:
    """The largest over all tensors of rms(output - reference) / rms(reference)."""
    errors = [0.0]
    for out, exact in zip(outputs, reference, strict=True):
        size = exact.double().square().mean().sqrt().clamp(min=1e-30)
        errors.append(float((out.double() - exact).square().mean().sqrt() / size))
    return max(errors)


def within_rule(
    eager: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    reference: tuple[torch.Tensor, ...],
) -> bool:
    """`torch._dynamo.utils.same`: close to eager, or about as close to fp64 as eager is."""

    def close(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> bool:
        tol = TOLERANCE.get(a.dtype, 1e-4)
        return same(a, b, r, tol=tol, equal_nan=True, log_error=_silent)

    triples = zip(eager, outputs, reference, strict=True)
    return all(a.shape == b.shape and close(a, b, r) for a, b, r in triples)


def _silent(*_: Any) -> None:
    """`same` logs each miss; the table names the peer."""
