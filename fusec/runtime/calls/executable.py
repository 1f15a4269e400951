"""Bind the names that a printed wrapper uses, and return its ``call``.

The wrapper is compiled as a whole. While somebody looks inside (``verify``, ``fusec.watch``, a
profiler) its statements are interpreted one by one instead, with ``CallHooks``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch

from fusec.errors import UsageError
from fusec.runtime.calls.outside import GraphReferences
from fusec.runtime.calls.ranges import BoxedCall as BoxedCall
from fusec.runtime.calls.ranges import Hook, Ranges
from fusec.runtime.calls.received import hooked, plain, relaid
from fusec.runtime.interior import OpOverload, empty_on_cpu, reinterpret


@dataclass(frozen=True, slots=True)
class CallHooks:
    """What an observer of a graph does in its calls.

    Attributes:
        call: takes the whole call, and returns it with something around it.
        launch: is put around each launch.
        stored: is told what a step has stored: the step's name, the nodes whose values these are,
            and the tensors. The name is None for an eager kernel.
    """

    call: Callable[[BoxedCall], BoxedCall] | None = None
    launch: Hook | None = None
    stored: Callable[[str | None, Sequence[Any], Sequence[torch.Tensor]], None] | None = None


_FILE = "<fusec wrapper>"

DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64, "c64": torch.complex64, "c128": torch.complex128,
    "f8e4m3fn": torch.float8_e4m3fn, "f8e4m3fnuz": torch.float8_e4m3fnuz,
    "f8e5m2": torch.float8_e5m2, "f8e5m2fnuz": torch.float8_e5m2fnuz,
    "f8e8m0fnu": torch.float8_e8m0fnu, "f4e2m1fn_x2": torch.float4_e2m1fn_x2,
}  # fmt: skip


def window(base: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """Return a strided view of ``base``, ``offset`` elements from its first."""
    return torch.as_strided(base, shape, strides, base.storage_offset() + offset)


def expected(made: Any, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a result of a user's operation, which has to be what its fake kernel said.

    Kernels would read behind it, or its elements as others.
    """
    if not isinstance(made, torch.Tensor):
        raise UsageError(f"{what} returned a {type(made).__name__}, where a tensor was traced.")
    if made.shape != shape or made.dtype != dtype:
        seen, said = (f"{t}{list(s)}" for t, s in ((made.dtype, made.shape), (dtype, shape)))
        raise UsageError(
            f"{what} returned {seen}, and its fake kernel {said}: correct its register_fake."
        )
    return made


def counted(made: Sequence[Any], count: int, what: str) -> Sequence[Any]:
    """Return the results of a user's operation, as many as its fake kernel has returned."""
    if len(made) != count:
        raise UsageError(
            f"{what} returned {len(made)} results, and its fake kernel {count}: correct its "
            "register_fake."
        )
    return made


def restride(made: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the result of a call with the strides that were traced, copied only if it has others.

    Those of axes of extent one are no reason for a copy: the result gets them as they are. A
    weight's gradient has the weight's, which optimizers compare.
    """
    if made.stride() == strides or made.numel() == 0:
        return made
    if has_strides(made, strides) and not made._is_view():
        return made.as_strided_(made.shape, strides)
    return with_strides(made, strides)


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the strides that were traced: itself, a view, or a copy.

    The tensor stays as it is, and so do its version counter and that of its base.
    """
    if tensor.stride() == strides or tensor.numel() == 0:
        return tensor
    if has_strides(tensor, strides):
        return tensor.as_strided(tensor.shape, strides)
    if 0 in strides:  # an expanded result: a dense copy cannot have these strides
        raise RuntimeError(
            f"a tensor has strides {tensor.stride()}, {strides} were traced for an eager kernel"
        )
    return _copied(tensor, strides)


def has_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Return True for a tensor with these strides, along axes of one element with any."""
    triples = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(n == 1 or a == b for n, a, b in triples)


def _copied(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a copy without a negative or conjugate bit, which has the strides in any case."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add ``a @ b`` to ``total``, which is f32 where a and b have 16 bits.

    That is one call of the library on CUDA: the product is not rounded, nor read again to be added.
    ATen has no kernel for it on CPUs (2.11 to 2.15), and torch documents it for CUDA alone.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and _adds_in_f32(a.dtype):
        # The same object: another view of it would be copied first.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _adds_in_f32(dtype: torch.dtype) -> bool:
    """Return True if the library adds products of 16 bits to f32, as it may be asked not to."""
    in_f16 = dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return torch.version.hip is None and not in_f16


def unconjugated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor without the conjugate bit, copied only if it has it."""
    return _copied(tensor, tensor.stride()) if tensor.is_conj() else tensor


def conjugated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor with the conjugate bit, copied only if it has none."""
    return tensor if tensor.is_conj() else _copied(tensor.conj(), tensor.stride()).conj()


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the negative bit, copied only if it has none."""
    return tensor if tensor.is_neg() else negative(_copied(negative(tensor), tensor.stride()))


negative = torch.ops.aten._neg_view.default
"""Return a tensor with its negative bit flipped, over the same memory."""


class _Operators:
    """A namespace of operators, such as ``torch.ops.aten``, without torch's Python wrappers.

    A product costs 1.9 us to call as ``torch.mm`` and 2.7 as ``torch.ops.aten.mm.default``, a
    biased one 3.0 and 4.1 (2026-11).
    """

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._operators, name)
        if isinstance(found, OpOverload):
            made: Any = _quickest(found)
        else:
            made = _Operators(found)
        setattr(self, name, made)
        return made


def _quickest(operator: OpOverload) -> Any:
    """Return torch's function of an operator's name, if that takes tensors alone."""
    schema = operator._schema
    given = (str(argument.type) for argument in schema.arguments if not argument.kwarg_only)
    named = getattr(torch, schema.name.removeprefix("aten::"), None)
    same = operator._overloadname == "default" and isinstance(named, BuiltinFunctionType)
    return named if same and {"Tensor"}.issuperset(given) else operator._op


def bind(
    source: str,
    kernels: Mapping[str, Callable[..., None]],
    outside: GraphReferences,
    device: torch.device,
    ranges: Ranges | None = None,
    hooks: Sequence[CallHooks] = (),
) -> BoxedCall:
    """Return the ``call`` of a printed wrapper.

    Args:
        source: text printed by ``codegen.wrapper``.
        kernels: launchers by kernel name.
        outside: the eager callables and constants of its FX graph.
        ranges: the statements of the call, and their names under a profiler.
        hooks: of observers, the innermost first; they need ``ranges``.
    """

    def on_device(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    empty = empty_on_cpu if device.type == "cpu" else on_device

    def zeros(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made = empty(shape, strides, dtype)
        made.data.zero_()  # a version counter of its own: to autograd the tensor is new
        return made

    namespace: dict[str, Any] = {
        "empty": empty,
        "zeros": zeros,
        **{f.__name__: f for f in (window, restride, expected, counted, add_product)},
        **{f.__name__: f for f in (unconjugated, conjugated, negated, hooked, relaid, plain)},
        "negative": negative,
        "strided": reinterpret,
        "view_as_real": torch.view_as_real,
        "view_as_complex": torch.view_as_complex,
        "aten": _Operators(torch.ops.aten),
        "mkl": _Operators(torch.ops.mkl),
        "mkldnn": _Operators(torch.ops.mkldnn),
        "ops": _Operators(torch.ops),
        **DTYPES,
        **outside.names(),
        **kernels,
    }
    if ranges is None:
        return _define(source, namespace)
    interpret = partial(interpreted, ranges.statements, namespace)
    inside = any(hook.launch or hook.stored for hook in hooks)
    call = interpret(hooks) if inside else _define(source, namespace)
    call = ranges.around(call, lambda named: interpret((*hooks, CallHooks(launch=named))))
    for hook in hooks:
        call = call if hook.call is None else hook.call(call)
    return call


def _define(source: str, namespace: Mapping[str, Any]) -> BoxedCall:
    """Execute a source in a copy of a namespace, and return its ``call``."""
    own = dict(namespace)
    exec(compile(source, _FILE, "exec"), own)
    call: BoxedCall = own["call"]
    return call


def interpreted(
    statements: str, namespace: Mapping[str, Any], hooks: Sequence[CallHooks]
) -> BoxedCall:
    """Return a ``call`` that runs printed statements one by one, with hooks inside.

    Args:
        statements: JSON printed by ``codegen.wrapper``.
    """
    functions: dict[str, BoxedCall] = {}
    for name, rows in json.loads(statements).items():
        functions[name] = _interpreted(rows, {**namespace, **functions}, hooks)
    return functions["call"]


def _interpreted(
    rows: Sequence[Any], namespace: Mapping[str, Any], hooks: Sequence[CallHooks]
) -> BoxedCall:
    steps = []
    around = [hook.launch for hook in hooks if hook.launch is not None]
    told = [hook.stored for hook in hooks if hook.stored is not None]
    *statements, (result, *_) = rows
    returned = compile(result, _FILE, "eval")
    for text, launch, kernel, stored in statements:
        run: Callable[..., Any] = exec
        for hook in around if launch else ():
            run = hook(launch, run)
        steps.append((compile(text, _FILE, "exec"), run, kernel, stored))

    def call(args: list[Any]) -> Any:
        variables = {**namespace, "args": args}
        for code, run, kernel, stored in steps:
            run(code, variables)
            for tell in told if stored else ():
                tell(kernel, tuple(map(tuple, stored.values())), [variables[v] for v in stored])
        return eval(returned, variables)

    return call
