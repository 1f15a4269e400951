"""PyTorch's type promotion on IR types.

Tensors with axes outrank those without, which outrank Python numbers: a lower rank changes the
result only if its category (bool < integer < float) is higher. Worked example: ``i64[3] * 0.5`` is
f32.
"""

from __future__ import annotations

from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.shapes import from_torch_dtype, to_torch_dtype
from fusec.frontend.value import Number, Value
from fusec.ir.dtype import DType
from fusec.ir.index import Index


def result_type(x: Any, y: Any) -> DType:
    """Return the type in which an operation on two arguments is done."""
    return from_torch_dtype(torch.result_type(_like(x), _like(y)))


def _like(arg: Any) -> torch.Tensor | float:
    """Return a tensor, or a number, that promotes as an argument does."""
    match arg:
        case Value():
            return torch.empty([1] if arg.shape else [], dtype=to_torch_dtype(arg.dtype))
        case bool():
            return arg
        case int() | Index():
            return 1
        case float() | Number():
            return 1.0
        case _:
            raise Unsupported("an argument that is not a number")
