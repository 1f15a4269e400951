"""PyTorch's type promotion on IR types.

Tensors with axes outrank those without, which outrank Python numbers: a lower rank changes the
result only if its category (bool < integer < float) is higher. Worked example: ``i64[3] * 0.5`` is
f32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.shapes import from_torch_dtype, to_torch_dtype
from fusec.frontend.value import Number, Value
from fusec.ir.dtype import BOOL, F32, I64, DType
from fusec.ir.index import Index


def result_type(*args: Any) -> DType:
    """Return the type in which an operation on these arguments is done."""
    ranks: list[DType | None] = [None, None, None]
    for arg in args:
        if isinstance(arg, Value):
            rank, dtype = (0 if arg.shape else 1), arg.dtype
        else:
            rank, dtype = 2, number_type(arg)
        known = ranks[rank]
        ranks[rank] = dtype if known is None else promote(known, dtype)
    result: DType | None = None
    for dtype in filter(None, ranks):
        if result is None:
            result = dtype
        elif category(dtype) > category(result):
            result = promote(result, dtype)
    assert result is not None
    return result


def number_type(value: Any) -> DType:
    """Return the type of a Python number."""
    match value:
        case bool():
            return BOOL
        case int() | Index():
            return I64
        case float() | Number():
            return F32
        case _:
            raise Unsupported("an argument that is not a number")


def category(dtype: DType) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats."""
    return 2 if dtype.is_float else int(dtype is not BOOL)


@functools.cache
def promote(a: DType, b: DType) -> DType:
    """Return the least type that holds both."""
    return from_torch_dtype(torch.promote_types(to_torch_dtype(a), to_torch_dtype(b)))
