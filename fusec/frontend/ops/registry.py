"""The table of lowerings: an ATen operation -> the function that writes it in index notation.

A rule is called as ``rule(call, *args, **kwargs)``: ``call`` knows what was traced and emits
definitions; tensors among the arguments are ``Value``, symbolic integers ``Index``, lists are
tuples, everything else is as in the FX node. It returns a ``Value``, or a tuple of them for
several results, or raises ``Unsupported``, upon which the node becomes an ``Extern``.

To add an operation, write one such function in the file it belongs to and name it here::

    @lowers(aten.addcmul.default)
    def addcmul(call, x, a, b, *, value=1): ...

A row may prefer the library's call, and say why. The node then is an ``Extern`` whose
``decomposition`` is what the rule emits; where a kernel of fusec's own wins, that takes the call's
place (``passes/fusion/contract.py``). A row that stands ``alone`` counts only where no library may
be called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from fusec.errors import InternalError
from fusec.frontend.call import AtenCall

LoweringFunction: TypeAlias = Callable[..., Any]
Preference: TypeAlias = Callable[[AtenCall], str | None]
"""Why the library's call is preferred, or None where it is not."""
_Rule = TypeVar("_Rule", bound=LoweringFunction)


def never(call: AtenCall) -> str | None:
    """Prefer no library's call."""
    return None


@dataclass(frozen=True, slots=True)
class Lowering:
    """A row of the table.

    Attributes:
        alone: it is for what runs without a library; anything else calls that.
    """

    rule: LoweringFunction
    library: Preference = never
    alone: bool = False


LOWERINGS: dict[Any, Lowering] = {}
"""By an operator's overload; by its printed name where torch registers it only when needed."""


def find_lowering(target: Any, *, alone: bool) -> Lowering | None:
    """Return the lowering of an FX node's target, if there is one.

    Args:
        alone: no library may be called.
    """
    found = LOWERINGS.get(target) or LOWERINGS.get(str(target))
    return found if found is None or alone or not found.alone else None


def lowers(
    *targets: Any, library: Preference = never, alone: bool = False
) -> Callable[[_Rule], _Rule]:
    """Register the decorated function as the lowering of ``targets``: overloads, or their names."""

    def register(rule: _Rule) -> _Rule:
        for target in targets:
            if target in LOWERINGS:
                raise InternalError(f"two lowerings of {target}", stage="frontend")
            LOWERINGS[target] = Lowering(rule, library, alone)
        return rule

    return register
