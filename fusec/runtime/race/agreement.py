"""Whether the outputs of two candidates agree: the check before a candidate may win.

The rule is docs/numerics.md's: integers equal; NaN and infinities where the reference has them, or
an fp64 result (eager's GELU of an infinity in bf16 is NaN); floats close to the reference's, or
about as close to an fp64 result as the reference is. Besides the root mean square, which a single
wrong element in millions does not move, the largest error counts.

Closeness is relative to the magnitude of a tensor as well as of an element, for a small element may
be what is left of large terms. It asks whether a kernel is wrong, by an axis, a mask or a race; it
does not judge the last bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger("fusec.race")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative difference of two correct candidates; for other floats, a rounding step of the type."""

TF32_TOLERANCE = 1.5e-3
"""For fp32 where products may round their inputs to 10 bits."""

LOOSE = 4.0
"""Tolerances are this much wider without an fp64 result: candidates round at different points."""

LARGEST = 0.5
"""How far an element may be apart, relative, where 16-bit numbers go in and no fp64 result decides:
a score of 30 is rounded to a multiple of 1/8, which changes its exponential by 6 %. Then it is the
root mean square that has to be close; what a mask or an axis makes wrong is apart by all of it."""

RMS_FACTOR = {torch.float64: 2.0, torch.float32: 2.0}
"""How many times the reference's error against fp64 is allowed: 3 for other types. As in torch's
benchmark suite, `torch._dynamo.utils.same`."""

MAX_FACTOR = 10.0
"""The same for the largest error of an element."""

CHUNK = 1 << 24
"""Elements that are compared at once, which bounds the memory of the fp64 copies."""


def disagreement(
    got: Sequence[Tensor],
    reference: Sequence[Tensor],
    exact: Callable[[], Sequence[Tensor]] | None = None,
    inputs: Sequence[Tensor] = (),
) -> str | None:
    """Return how a candidate's outputs disagree with the reference's, or None.

    Args:
        exact: makes the same outputs in fp64; called only if some are not close to the reference.
        inputs: of both candidates: results of 16-bit inputs have their errors, also in f32.
    """
    if len(got) != len(reference):
        return f"{len(got)} outputs, not {len(reference)}"
    apart: dict[int, str] = {}
    elsewhere: set[int] = set()
    for number, (ours, theirs) in enumerate(zip(got, reference, strict=True)):
        what = _unlike(ours, theirs)
        if what is not None:
            return f"output {number}: {what}"
        what = _not_finite_elsewhere(ours, theirs)
        if what is not None:
            apart[number] = f"output {number}: {what}"
            elsewhere.add(number)
            continue
        error = _error(ours, theirs)
        if (
            _is_apart(error, theirs, inputs)
            if exact is None
            else error.relative > _tolerance(theirs)
        ):
            apart[number] = f"output {number}: max error {error.largest:.3g}, rms {error.rms:.3g}"
    if not apart or exact is None:
        return next(iter(apart.values()), None)
    try:
        truth = exact()
    except Exception as failure:  # out of memory, or an operation that has no fp64
        logger.debug("no fp64 result to compare with: %s", failure)
        return disagreement(got, reference, inputs=inputs)
    for number in elsewhere:
        if _not_finite_elsewhere(got[number], truth[number].to(got[number].dtype)) is not None:
            return apart[number]
    wrong = (n for n in apart if not _as_exact(got[n], reference[n], truth[n]))
    return next((apart[number] for number in wrong), None)


def _is_apart(error: _Error, reference: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return True if an error exceeds the difference of two correct candidates."""
    floats = [t for t in inputs if t.is_floating_point()]
    tolerance = LOOSE * max(map(_tolerance, (reference, *floats)))
    if any(t.dtype in (torch.bfloat16, torch.float16) for t in (reference, *floats)):
        return error.relative > LARGEST or error.rms > tolerance * error.scale
    return error.relative > tolerance


def _unlike(got: Tensor, reference: Tensor) -> str | None:
    """Return a difference that no tolerance excuses, or None."""
    if got.shape != reference.shape:
        return f"shape {list(got.shape)}, not {list(reference.shape)}"
    if got.dtype is not reference.dtype:
        return f"type {got.dtype}, not {reference.dtype}"
    if not (reference.is_floating_point() or reference.is_complex()):
        unequal = int((got != reference).sum())
        return f"{unequal} of {got.numel()} elements differ" if unequal else None
    return None


def _not_finite_elsewhere(got: Tensor, reference: Tensor) -> str | None:
    """Return that NaN or infinities are at other places than the reference's, or None."""
    if not (reference.is_floating_point() or reference.is_complex()):
        return None
    for a, b in _chunks(got, reference):
        if not torch.equal(a.isnan(), b.isnan()):
            return "NaN at other places"
        infinite = b.isinf()
        if not torch.equal(a.isinf(), infinite) or not torch.equal(a[infinite], b[infinite]):
            return "infinities at other places"
    return None


def _as_exact(got: Tensor, reference: Tensor, exact: Tensor) -> bool:
    """Return whether `got` is about as close to `exact` as `reference` is."""
    ours, theirs = _error(got, exact), _error(reference, exact)
    factor, tolerance = RMS_FACTOR.get(got.dtype, 3.0), _tolerance(got)
    # The tolerance's share is for references that happen to be exact, as small integers are.
    return (
        ours.rms <= factor * theirs.rms + tolerance / 4 * ours.scale
        and ours.largest <= MAX_FACTOR * theirs.largest + 2 * tolerance * ours.scale
    )


@dataclass(frozen=True, slots=True)
class _Error:
    """How far a tensor is from another, b, where both are finite.

    Attributes:
        largest, rms: the largest, and the root mean square of the differences.
        scale: root mean square of b.
        relative: the largest of |a - b| / (|b| + scale).
    """

    largest: float
    rms: float
    scale: float
    relative: float


def _error(got: Tensor, wanted: Tensor) -> _Error:
    if not wanted.is_floating_point() and not wanted.is_complex():
        return _Error(0.0, 0.0, 0.0, 0.0)  # equal, as `_unlike` found
    count, squares, sizes = 0, 0.0, 0.0
    for a, b in _finite(got, wanted):
        count += b.numel()
        squares += float((a - b).square().sum())
        sizes += float(b.square().sum())
    scale = math.sqrt(sizes / max(count, 1))
    largest = relative = 0.0
    for a, b in _finite(got, wanted):
        difference = (a - b).abs()
        largest = max(largest, float(difference.max()))
        # Where both are 0, so is the quotient: the smallest normal number stands in for 0.
        bound = (b.abs() + scale).clamp(min=torch.finfo(torch.float64).tiny)
        relative = max(relative, float((difference / bound).max()))
    return _Error(largest, math.sqrt(squares / max(count, 1)), scale, relative)


def _finite(got: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements that are finite in both, in chunks that are not empty."""
    for a, b in _chunks(got, wanted):
        finite = a.isfinite() & b.isfinite()
        if finite.all():
            yield a, b
        elif finite.any():
            yield a[finite], b[finite]


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same elements of each tensor, flat and in fp64, a bounded number at a time."""
    flat = [_real(tensor).reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), CHUNK):
        yield tuple(tensor[start : start + CHUNK].double() for tensor in flat)


def _real(tensor: Tensor) -> Tensor:
    # Not the imaginary part's conjugate bit, which a view as real numbers would refuse.
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _tolerance(tensor: Tensor) -> float:
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return TF32_TOLERANCE
    return TOLERANCE.get(dtype, torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
