"""Run printed Triton kernels on CPU tensors, with Triton's interpreter.

The interpreter is chosen for one launch, not for the process (as TRITON_INTERPRET would), so that
the same process can compile. What Triton's interpreter lacks or gets wrong is put right while a
launch runs: conversions to bf16 truncate there, bf16 constants are missing, a loop's variable is no
scalar, a comparison of scalars fills a tile with floats, libdevice functions return None, a
reduction with a function of its own visits element by element, a function cannot be mapped over a
tile, and each nested call patches `triton.language` again.

Grid points run one after another in the caller's thread; use few.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from fusec.runtime.kernels.triton_interior import load_function

LIBDEVICE: dict[str, Callable[..., torch.Tensor]] = {
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": torch.atan2,
    "atanh": torch.atanh,
    "copysign": torch.copysign,
    "cosh": torch.cosh,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "fast_dividef": torch.true_divide,
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "lgamma": torch.lgamma,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "nearbyint": torch.round,
    "nextafter": torch.nextafter,
    "pow": torch.pow,
    "sinh": torch.sinh,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
}
"""The libdevice functions that kernels may call, each computed in f64 and rounded."""

_functions: dict[Any, InterpretedFunction] = {}


def interpret(
    source: str, name: str, grid: tuple[int, int, int], args: Sequence[torch.Tensor | int]
) -> None:
    """Run kernel ``name`` of a printed module over ``grid``; tensors are changed in place."""
    function = load_function(source, name)
    named = mock.patch.dict(function.fn.__globals__, {"range": _range, "libdevice": _libdevice()})
    with _interpreting(), named, np.errstate(all="ignore"):
        InterpretedFunction(function.fn)[grid](*args)


class _Patches:
    """What one launch patches in `triton.language`: each part once, and all of it restored.

    Triton's own nested calls patch again and leave that in place. The outermost call restores what
    `add` returned to it; what nested calls patched after it has to go first.
    """

    def __init__(self, patch_lang: Callable[[Any], Any]) -> None:
        self.patch_lang = patch_lang
        self.scopes: dict[frozenset[str], Any] = {}

    def add(self, fn: Any) -> _Patches:
        modules = (v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core)
        languages = frozenset(modules)
        if languages not in self.scopes:
            scope = self.scopes[languages] = self.patch_lang(fn)
            # Triton 3.6 converts an array of one element, which NumPy 2.4 refuses.
            scope.set_attr(tl.tensor, "__index__", lambda x: int(x.handle.data.item()))
            scope.set_attr(tl, "map_elementwise", _map_elementwise)
            scope.set_attr(tl, "inline_asm_elementwise", _product)
            scope.set_attr(interpreter.ReduceOps, "generic_reduce", _reduce)
            scope.set_attr(JITFunction, "__call__", _call)
        return self

    def restore(self) -> None:
        for scope in reversed(self.scopes.values()):
            scope.restore()
        self.scopes.clear()


@contextmanager
def _interpreting() -> Iterator[None]:
    semantic = TritonSemantic(_BUILDER)
    with (
        mock.patch.object(interpreter, "_patch_lang", _Patches(interpreter._patch_lang).add),
        mock.patch.object(interpreter, "interpreter_semantic", semantic),
        # Triton 3.6 makes one for each function that it patches.
        mock.patch.object(interpreter, "TritonSemantic", lambda builder: semantic),
    ):
        yield


def _product(text: str, constraints: str, args: Sequence[Any], dtype: Any, **kwargs: Any) -> Any:
    """Run the assembly of a product of 32 bits by a number; no other is interpreted."""
    found = re.fullmatch(r"mul\.wide\.u32 \$0, \$1, (\d+);", text)
    assert found is not None, text
    return args[0].to(dtype) * int(found[1])


def _range(*bounds: Any) -> Iterator[Any]:
    """Run a loop whose variable is a scalar of the kernel, as it is in a compiled one."""
    for step in range(*map(int, bounds)):
        yield interpreter.interpreter_semantic.to_tensor(step)


def _call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    function = _functions.setdefault(self.fn, InterpretedFunction(self.fn))
    return function(*args, **kwargs)


def _map_elementwise(function: JITFunction, *tiles: Any) -> Any:
    """Run a function of one element on whole tiles: each operation is on all elements at once."""
    return _call(function, *tiles)


def _libdevice() -> SimpleNamespace:
    """Return what stands for the module in a kernel's names."""
    return SimpleNamespace(**{name: _by_torch(name) for name in LIBDEVICE})


def _by_torch(name: str) -> Callable[..., Any]:
    def computed(*args: Any) -> Any:
        args = tuple(interpreter.interpreter_semantic.to_tensor(a) for a in args)
        dtype = args[0].handle.data.dtype
        wide = dtype if name == "nextafter" else np.float64
        tiles = any(a.type.is_block() for a in args)
        operands = [torch.from_numpy(np.array(a.handle.data, dtype=wide)) for a in args]
        result = np.asarray(LIBDEVICE[name](*operands).numpy(), dtype=dtype)
        kind = args[0].dtype
        shaped = tl.block_type(kind, list(result.shape)) if tiles else kind
        return tl.tensor(TensorHandle(result, kind), shaped)

    return computed


def _reduce(self: Any, inputs: Sequence[Any]) -> list[Any]:
    """Fold halves of the axis onto each other with the kernel's own function, in all tiles."""
    kinds = [tile.dtype for tile in inputs]
    data = [tile.handle.data for tile in inputs]
    rank = data[0].ndim
    flat = self.axis is None
    data = [d.reshape(-1) if flat else np.moveaxis(d, self.axis, 0) for d in data]
    while len(data[0]) > 1:
        half = len(data[0]) // 2
        parts = ([d[:half] for d in data], [d[half:] for d in data])
        pairs = [
            self.to_tensor(d, kind) for part in parts for d, kind in zip(part, kinds, strict=True)
        ]
        folded = self.combine_fn.fn(*pairs)
        folded = folded if isinstance(folded, tuple) else (folded,)
        data = [tile.handle.data for tile in folded]
    if flat:
        data = [d.reshape((1,) * rank) if self.keep_dims else d[0].item() for d in data]
    else:
        data = [np.expand_dims(d[0], self.axis) if self.keep_dims else d[0] for d in data]
    return [self.to_tensor(d, kind) for d, kind in zip(data, kinds, strict=True)]


class _Builder(InterpreterBuilder):
    """Makes the interpreter's values, bf16 among them: held as its bits, in uint16.

    Triton's own builder knows at which point of the grid a launch is.
    """

    def __init__(self) -> None:
        super().__init__()
        # Outside of debug mode it looks for overflows, a third of its time, and says none.
        self.options = replace(self.options, sanitize_overflow=False)

    @property
    def grid_dim(self) -> Any:
        return interpreter.interpreter_builder.grid_dim

    @property
    def grid_idx(self) -> Any:
        return interpreter.interpreter_builder.grid_idx

    def create_dot(self, a: TensorHandle, b: TensorHandle, into: TensorHandle, *_: Any) -> Any:
        """Multiply in f32, as tensor cores do with 16-bit operands."""
        left, right = (self.cast_impl(x, tl.float32).data for x in (a, b))
        return TensorHandle(np.matmul(left, right) + into.data, into.dtype.scalar)

    def create_splat(self, shaped: Any, value: TensorHandle) -> TensorHandle:
        """Fill a tile with a scalar; the result of a comparison stays bool."""
        data = np.asarray(value.data)
        kind = data.dtype if data.dtype == bool else interpreter._get_np_dtype(value.dtype)
        filled = np.full(shaped.shape, data.reshape(-1)[0], dtype=kind)
        return TensorHandle(filled, value.dtype.scalar)

    def get_bf16(self, value: float) -> TensorHandle:
        bits = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint16)
        return TensorHandle(bits.numpy(), tl.bfloat16)

    def cast_impl(self, source: TensorHandle, target: Any) -> TensorHandle:
        """Convert with bf16 rounded to nearest even.

        The data of a comparison is bool, whatever type its handle names.
        """
        after = target.scalar
        data = source.data
        if source.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
            if after == tl.bfloat16:
                return source
            data = (data.astype(np.uint32) << 16).view(np.float32)
        if after == tl.bfloat16:
            single = torch.from_numpy(np.array(data)).to(torch.bfloat16)
            return TensorHandle(single.view(torch.uint16).numpy().reshape(data.shape), after)
        return TensorHandle(data.astype(interpreter._get_np_dtype(target)), after)


_BUILDER = _Builder()
