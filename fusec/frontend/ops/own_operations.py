"""Operations of fusec's own, for what ATen has no word.

FX passes put them into graphs, lowerings write them in index notation. A graph may also run
eagerly: so each has an eager kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])

LIBRARY = torch.library.Library("fusec", "DEF")


def eager_kernel(
    signature: str, traced: Callable[..., Any], *tags: torch.Tag
) -> Callable[[_Kernel], _Kernel]:
    """Define an operation ``fusec::name``, of which the decorated function is the eager kernel.

    Args:
        signature: ``name(Tensor x, ...) -> Tensor``.
        traced: returns the results for fake tensors.
    """

    def define(kernel: _Kernel) -> _Kernel:
        name = signature.partition("(")[0]
        LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusec::{name}", traced, lib=LIBRARY)
        return kernel

    return define
