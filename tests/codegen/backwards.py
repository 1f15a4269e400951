"""Functions whose backward waits for memory, and inputs for them of any width and type.

Each has about 2^24 elements. *Width* is what a row, an image or a table's row has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ELEMENTS = 1 << 24
CHANNELS = 64

Inputs = Callable[[int, torch.dtype], tuple[Tensor, ...]]


def rows(tensors: int, vectors: int = 0) -> Inputs:
    """Return a maker of some tensors of rows, and some vectors as long as one."""

    def make(width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = [(ELEMENTS // width, width)] * tensors + [(width,)] * vectors
        return tuple(torch.empty(shape, dtype=dtype) for shape in shapes)

    return make


def labelled(width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return rows, and a class for each."""
    (x,) = rows(1)(width, dtype)
    return x, torch.zeros(len(x), dtype=torch.int64)


def images(width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return images of ``width`` points for each channel, weight and bias."""
    shapes = [(ELEMENTS // width // CHANNELS, CHANNELS, width), (CHANNELS,), (CHANNELS,)]
    return tuple(torch.empty(shape, dtype=dtype) for shape in shapes)


def channels_last(width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return images of 16 x 16 points of ``width`` channels each, weight and bias."""
    x = torch.empty(max(2, ELEMENTS // width // 256), width, 16, 16, dtype=dtype)
    vectors = (torch.empty(width, dtype=dtype) for _ in range(2))
    return x.to(memory_format=torch.channels_last), *vectors


def looked_up(width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a table of 4096 rows and what is looked up in it."""
    ids = torch.zeros(ELEMENTS // width, dtype=torch.int64)
    return torch.empty(4096, width, dtype=dtype), ids


def angles(width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return heads of positions, cosines and sines of a head."""
    head = 64 if width % 64 == 0 else width
    time = 1024
    batch = max(1, ELEMENTS // width // time)
    x = torch.empty(batch, time, width // head, head, dtype=dtype)
    return x, *(torch.empty(time, 1, head, dtype=dtype) for _ in range(2))


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w)


def dropped_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x + F.dropout(r, 0.1)
    return F.layer_norm(h, w.shape, w, b), h


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def batch_norm_eval(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean, var = torch.zeros_like(w).float().detach(), torch.ones_like(w).float().detach()
    return F.batch_norm(x, mean, var, w, b)


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 8, w, b)


def geglu(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return left * F.gelu(right)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos.detach() + torch.cat((-right, left), -1) * sin.detach()


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return F.gelu(F.embedding(ids, table))


BACKWARDS: dict[str, tuple[Callable[..., object], Inputs]] = {
    "layer norm": (layer_norm, rows(1, 2)),
    "rms norm": (rms_norm, rows(1, 1)),
    "norm of a dropout and a residual": (dropped_norm, rows(2, 2)),
    "group norm": (group_norm, images),
    "group norm, channels last": (group_norm, channels_last),
    "batch norm": (batch_norm, images),
    "batch norm of rows": (batch_norm, rows(1, 2)),
    "batch norm, channels last": (batch_norm, channels_last),
    "batch norm, evaluation": (batch_norm_eval, images),
    "softmax": (lambda x: x.softmax(-1), rows(1)),
    "log-softmax": (lambda x: x.log_softmax(-1), rows(1)),
    "cross-entropy": (F.cross_entropy, labelled),
    "gelu": (F.gelu, rows(1)),
    "gelu and bias": (lambda x, b: F.gelu(x + b), rows(1, 1)),
    "swiglu": (lambda x, g: F.silu(g) * x, rows(2)),
    "geglu": (geglu, rows(1)),
    "rope": (rope, angles),
    "embedding": (embedding, looked_up),
}
