"""The table of lowerings: an ATen operation -> the function that writes it in index notation.

A rule is called as ``rule(call, *args, **kwargs)``: ``call`` knows what was traced and emits
definitions; tensors among the arguments are ``Value``, symbolic integers ``Index``, lists are
tuples, everything else is as in the FX node. It returns a ``Value``, or a tuple of them for
several results, or raises ``Unsupported``, upon which the node becomes an ``Extern``.

To add an operation, write one such function in the file it belongs to and register it::

    @lowers(aten.addcmul.default)
    def addcmul(call, x, a, b, *, value=1): ...

A row may prefer the library's call, with a reason. The node then becomes an ``Extern`` whose
``decomposition`` is the rule's definitions; where a kernel of fusec's own is the better candidate,
they replace the call (``passes/fusion/contract.py``). A row with ``alone`` is used only where no
library may be called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from fusec.errors import InternalError

LoweringFunction: TypeAlias = Callable[..., Any]
Preference: TypeAlias = Callable[..., str | None]
"""Returns the reason to prefer the library's call, or None to emit definitions; takes the call and
the types of its tensors."""
_Rule = TypeVar("_Rule", bound=LoweringFunction)


@dataclass(frozen=True, slots=True)
class Lowering:
    """A row of the table.

    Attributes:
        alone: used only where no library may be called; elsewhere the library's call runs.
    """

    rule: LoweringFunction
    library: Preference | None = None
    alone: bool = False


LOWERINGS: dict[Any, Lowering] = {}
"""By an operator's overload, or by its printed name if torch registers it only on demand."""


def find_lowering(target: Any, *, alone: bool) -> Lowering | None:
    """Return the lowering of an FX node's target, if there is one.

    Args:
        alone: True if no library may be called.
    """
    found = LOWERINGS.get(target) or LOWERINGS.get(str(target))
    return found if found is None or alone or not found.alone else None


def lowers(
    *targets: Any, library: Preference | None = None, alone: bool = False
) -> Callable[[_Rule], _Rule]:
    """Register the decorated function as the lowering of ``targets``: overloads, or their names."""

    def register(rule: _Rule) -> _Rule:
        for target in targets:
            if target in LOWERINGS:
                raise InternalError(f"two lowerings of {target}", stage="frontend")
            LOWERINGS[target] = Lowering(rule, library, alone)
        return rule

    return register
