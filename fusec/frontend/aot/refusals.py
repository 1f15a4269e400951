"""Keep calls with numbers or types that eager may refuse, so that compiled calls raise its error.

Eager converts a number among the arguments (the bound of a clamp, the value of a fill, an alpha, a
slope) to the tensor's type, and raises if it is out of range; some operations check more. Tracing
checks neither, and a decomposition loses the check. So a call with such a number is neither
decomposed nor lowered: it stays the eager kernel, whose error, or result, is eager's own. A number
that is an operand (``x + 300``) wraps around and is not checked.

Nor does tracing check whether eager has a kernel for the types (there is no softmax of integers, no
``&`` of floats, no product of bf16 and f32). Such a call is tried once on zeros (``trials.py``).

Worked example: ``x.clamp(max=3.5e38)`` of an f32 tensor is one ``Extern``, which raises
``RuntimeError: value cannot be converted to type float without overflow``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusec.frontend.aot.trials import has_kernel
from fusec.frontend.call import AtenCall
from fusec.frontend.fx_passes.fx_nodes import aten
from fusec.frontend.ops.registry import eager_kernel, lowers
from fusec.frontend.value import Value
from fusec.ir.expr import op
from fusec.torch_interior import OpOverload


@eager_kernel("probability(Tensor x) -> Tensor", torch.empty_like)
def probability(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``x``.

    Raises:
        RuntimeError: if an element is outside [0, 1], or NaN.
    """
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise RuntimeError("all elements should be between 0 and 1")
    return x.clone()


@lowers(torch.ops.fusec.probability.default)
def checked_probability(call: AtenCall, x: Value) -> Value:
    return call.pointwise_exact(lambda a: op("probability", a), x)


def of_probabilities(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a binary cross-entropy's rule: on CPUs check input and target, as eager does."""

    def checked(x: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if x.device.type == "cpu":
            x, target = map(torch.ops.fusec.probability.default, (x, target))
        return rule(x, target, *args, **kwargs)

    return checked


_OPERANDS = ("self", "other", "exponent")
"""Parameters that are operands of arithmetic where they are numbers."""

_ASKS: dict[Any, Callable[..., bool]] = {
    aten.bernoulli.p: lambda x, p=0.5, **_: 0 <= p <= 1,
    aten.celu.default: lambda x, alpha=1.0: alpha != 0,
    aten.heaviside.default: lambda x, values: dtype_of(x) is dtype_of(values),
    aten.smooth_l1_loss.default: lambda x, y, reduction=1, beta=1.0: beta >= 0,
    aten.uniform.default: lambda x, low=0.0, high=1.0, **_: low <= high,
}
"""Further conditions of operations on their arguments, which decompositions do not check."""


def may_refuse(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return which argument of a call eager may refuse, in words, or None."""
    asks = _ASKS.get(target)
    if asks is not None and not asks(*args, **kwargs):
        return "a number that eager may refuse"
    if not isinstance(target, OpOverload):
        return None
    for position, name in converted(target):
        value: Any = args[position] if position < len(args) else kwargs.get(name)
        if type(value) in (int, float):
            dtype = _converted_to(value, args, kwargs)
            if not holds(dtype, value):
                return "a number that eager may refuse"
    return None if has_kernel(target, args, kwargs) else "types that eager may refuse"


@functools.cache
def converted(target: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return position and name of each parameter whose number is converted to a tensor's type."""
    numbers = ((k, a.name, str(a.type)) for k, a in enumerate(target._schema.arguments))
    return tuple((k, name) for k, name, kind in numbers
                 if kind in ("number", "Optional[number]") and name not in _OPERANDS)  # fmt: skip


def keep_where(condition: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decomposition so that it keeps the calls whose arguments satisfy a condition."""

    @functools.wraps(rule)
    def keep(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if condition(*args, **kwargs) else rule(*args, **kwargs)

    return keep


def keeping_refused(target: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decomposition so that it keeps the calls that eager may refuse."""
    if not isinstance(target, OpOverload):
        return rule
    return keep_where(lambda *args, **kwargs: may_refuse(target, args, kwargs), rule)


def _converted_to(value: float, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """Return the type that a number is converted to: that of the tensors, or the default."""
    given = kwargs.get("dtype")
    if given is not None:
        return given  # type: ignore[no-any-return]
    found = [dtype for dtype in map(dtype_of, args) if dtype not in (None, torch.bool)]
    default = torch.get_default_dtype() if isinstance(value, float) else torch.int64
    if not found or (isinstance(value, float) and not found[0].is_floating_point):
        return default
    return found[0]


def dtype_of(arg: Any) -> torch.dtype | None:
    """Return the type of a tensor, or of an FX node's tensor."""
    value = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg
    return value.dtype if isinstance(value, torch.Tensor) else None


def holds(dtype: torch.dtype, value: float) -> bool:
    """Return True if a number is in the range of a type; negative ones wrap in unsigned types."""
    if dtype is torch.bool or dtype.is_complex:
        return True
    if dtype.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    least = info.min if dtype.is_signed else -info.max
    return math.isfinite(value) and least <= value <= info.max
