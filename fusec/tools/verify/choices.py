"""Results that torch leaves open: compare with the choice that fusec makes, too.

Which of equal elements ``topk`` takes is open. A lowering takes the first one
(``Lowering.choice``), eager's kernel another, and whatever follows differs: a token goes to another
expert. Both are right. So a comparison with eager's kernels that finds a difference is made once
more, with the lowerings' choices in the place of eager's in all that it computes. It accepts no
mixture: what is compared together agrees with the one or with the other.

Left out: a graph with several such calls, some lowered and some eager's, all with equal elements.

Worked example, ``x = [3, 5, 5]``, of which eager's kernel takes the last 5::

    topk(x, 1).indices     fusec 1, eager 2: differs;   with the lowering's choice 1: agrees
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fusec.frontend.ops.registry import find_lowering
from fusec.torch_interior import TorchDispatchMode

_Said = TypeVar("_Said")


class OwnChoices(TorchDispatchMode):
    """Runs eager kernels, with the choices of fusec's lowerings where torch leaves them open.

    Attributes:
        differ: a choice was another than eager's.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.differ = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        lowering = find_lowering(func, alone=False)
        if lowering is not None and lowering.choice is not None:
            for eager, own in zip(made, lowering.choice(*args, **(kwargs or {})), strict=True):
                self.differ |= not torch.equal(eager, own)
                eager.copy_(own)
        return made


def with_either_choice(compared: Callable[[], _Said], is_off: Callable[[_Said], bool]) -> _Said:
    """Return what a comparison with eager's kernels says; if it is off, once more, as above.

    Args:
        compared: runs these kernels, and compares.
    """
    said = compared()
    if not is_off(said):
        return said
    with OwnChoices() as own:
        again = compared()
    return again if own.differ and not is_off(again) else said
