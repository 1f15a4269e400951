"""The libraries beside ATen's ``mm`` that compute a product of two matrices: candidates of a race.

Each is one function, registered by ``linear``, that returns the call for given operands, or None
where the library does not compute them. docs/add_a_candidate.md adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from fusec.frontend.fx_passes.packing import PACKED_MKL, PACKED_ONEDNN, has_onednn
from fusec.ir.argument import View
from fusec.ir.dtype import BF16, F16, F32
from fusec.ir.extern import Constant, Linear

ONEDNN = "mkldnn._linear_pointwise.default"
"""oneDNN's product; torch's namespace has the library's former name, MKL-DNN."""
MKL = "mkl._mkl_linear.default"
_PLAIN = ("none", (), "")
"""oneDNN's arguments for a product without an activation."""

NewLinear: TypeAlias = Callable[[View, View, Mapping[str, Constant]], Linear | None]
"""From ``a[m, k]``, ``w[k, n]`` of one dtype, and the weights packed by library, to a call."""

_CANDIDATES: list[NewLinear] = []


def linear(candidate: NewLinear) -> NewLinear:
    """Register a candidate for products of two matrices on CPUs."""
    _CANDIDATES.append(candidate)
    return candidate


def linears(a: View, w: View, packed: Mapping[str, Constant]) -> tuple[Linear, ...]:
    """Return the calls of other libraries for ``a @ w``."""
    if a.buffer.dtype is not w.buffer.dtype:
        return ()
    made = (candidate(a, w, packed) for candidate in _CANDIDATES)
    return tuple(call for call in made if call is not None)


def registered() -> str:
    """Return the names of the registered candidates: graphs in the cache may call any of them."""
    return " ".join(f"{one.__module__}.{one.__qualname__}" for one in _CANDIDATES)


def _has_onednn(a: View) -> bool:
    return has_onednn() and a.buffer.dtype in (F32, BF16, F16)


@linear
def onednn(a: View, w: View, packed: Mapping[str, Constant]) -> Linear | None:
    """Return oneDNN's call, if the weight is dense.

    For a weight with gaps it has no optimised kernel: its reference kernel takes 700 times as long
    as ATen's (32 x 256 by 256 x 512, ``f32`` and ``bf16``, torch 2.13, 2026-11).
    """
    return Linear("oneDNN", ONEDNN, _PLAIN) if _has_onednn(a) and w.is_dense else None


@linear
def packed_onednn(a: View, w: View, packed: Mapping[str, Constant]) -> Linear | None:
    """Return oneDNN's call on a frozen weight in its own layout."""
    weight = packed.get(PACKED_ONEDNN)
    return Linear(PACKED_ONEDNN, ONEDNN, _PLAIN, weight) if weight and _has_onednn(a) else None


@linear
def packed_mkl(a: View, w: View, packed: Mapping[str, Constant]) -> Linear | None:
    """Return MKL's call on a frozen weight packed for one number of rows."""
    weight = packed.get(PACKED_MKL)
    return Linear(PACKED_MKL, MKL, (), weight, sized=True) if weight and _has_onednn(a) else None
