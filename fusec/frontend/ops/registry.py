"""The table of lowerings: an ATen operation -> the function that writes it in index notation.

A rule is called as ``rule(call, *args, **kwargs)``: ``call`` knows what was traced and emits
definitions; tensors among the arguments are ``Value``, symbolic integers ``Index``, lists are
tuples, everything else is as in the FX node. It returns a ``Value``, or a tuple of them for
several results, or raises ``Unsupported``, upon which the node becomes an ``Extern``.

To add an operation, write one such function in the file it belongs to and register it::

    @lowers(aten.addcmul.default)
    def addcmul(call, x, a, b, *, value=1): ...

A function of elements alone is registered by ``computes``, one of an element's place by
``defines``.

A row may prefer the library's call, with a reason. The node then becomes an ``Extern`` whose
``decomposition`` is the rule's definitions; where a kernel of fusec's own is the better candidate,
they replace the call (``passes/fusion/contract.py``). A row with ``alone`` is used only where no
library may be called. Where torch leaves open which of several results is right, as of ``topk`` of
equal elements, the row's ``choice`` says in plain torch which one the rule computes: tools compare
with that, too (``tools/verify/kernels.py``), and ``precision="eager"`` keeps eager's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from fusec.errors import InternalError
from fusec.frontend.call import AtenCall
from fusec.frontend.value import Value
from fusec.ir.expr import Expr

aten, prims = torch.ops.aten, torch.ops.prims
LoweringFunction: TypeAlias = Callable[..., Any]
Preference: TypeAlias = Callable[..., str | None]
"""Returns the reason to prefer the library's call, or None to emit definitions; takes the call and
the types of its tensors."""
OpenChoice: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
_Rule = TypeVar("_Rule", bound=LoweringFunction)


@dataclass(frozen=True, slots=True)
class Lowering:
    """A row of the table.

    Attributes:
        alone: used only where no library may be called; elsewhere the library's call runs.
        choice: computes the rule's result in torch, if torch leaves open which one is right.
    """

    rule: LoweringFunction
    library: Preference | None = None
    alone: bool = False
    choice: OpenChoice | None = None


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
    *targets: Any,
    library: Preference | None = None,
    alone: bool = False,
    choice: OpenChoice | None = None,
    table: dict[Any, Lowering] = LOWERINGS,
) -> Callable[[_Rule], _Rule]:
    """Register the decorated function as the lowering of ``targets``: overloads, or their names."""

    def register(rule: _Rule) -> _Rule:
        for target in targets:
            if target in table:
                raise InternalError(f"two lowerings of {target}", stage="frontend")
            table[target] = Lowering(rule, library, alone, choice)
        return rule

    return register


def computes(*targets: Any) -> Callable[[_Rule], _Rule]:
    """Register the decorated function of elements, in the result's type, as a lowering."""

    def register(compute: _Rule) -> _Rule:
        lowers(*targets)(lambda call, *args: call.pointwise(compute, *args))
        return compute

    return register


def defines(*targets: Any) -> Callable[[Callable[..., Expr]], Callable[..., Value]]:
    """Make a rule of the decorated ``element(call, at, ...)``, and register it as a lowering.

    The function returns the element of the result at ``at``; the rule emits the definition of all.
    """

    def register(element: Callable[..., Expr]) -> Callable[..., Value]:
        def rule(call: AtenCall, *args: Any, **kwargs: Any) -> Value:
            return call.define(lambda at: element(call, at, *args, **kwargs))

        return lowers(*targets)(rule)

    return register


# -- operations of fusec's own ---------------------------------------------------------------------

LIBRARY = torch.library.Library("fusec", "DEF")
"""What FX passes put into graphs where ATen has no word. Such a graph may also run eagerly."""


def eager_kernel(
    signature: str, traced: Callable[..., Any], *tags: torch.Tag
) -> Callable[[_Rule], _Rule]:
    """Define an operation ``fusec::name``, of which the decorated function is the eager kernel.

    Args:
        signature: ``name(Tensor x, ...) -> Tensor``.
        traced: returns the results for fake tensors.
    """

    def define(kernel: _Rule) -> _Rule:
        name = signature.partition("(")[0]
        LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusec::{name}", traced, lib=LIBRARY)
        return kernel

    return define
