"""First contact: a kernel of each family, launched and compared with fp64, in child processes.

Sizes are small and divide no tile; products are fused whether or not that is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu_measure
from bench.children import Task
from bench.workload import Case, Workload
from bench.workloads.optimizers import adamw_step

USUAL_S, LIMIT_S = 5.0, 90.0
"""Seconds for one family: to compile, and to run for some milliseconds."""
PEER = "fusec-fused"


def _gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def _norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _loss(x: Tensor) -> Tensor:
    return torch.logsumexp(x.float(), -1)


def _columns(x: Tensor) -> Tensor:
    return x.float().sum(0)


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def _swiglu(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.silu(x @ a) * (x @ b)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)


def _dropout(x: Tensor) -> Tensor:
    """Return 1 where an element was kept: nothing that depends on which."""
    kept = F.dropout(x * 0 + 1, 0.25) > 0
    return (kept.float().mean() * 4).round()


def _gather(x: Tensor, i: Tensor) -> Tensor:
    return F.silu(F.embedding(i, x)) * 2


def _sizes(x: Tensor, w: Tensor) -> Tensor:
    return (F.rms_norm(x, x.shape[-1:], w) * x.shape[0]).softmax(-1)


@dataclass(frozen=True)
class Family:
    """A kind of kernels: a case, and how it is compiled."""

    workload: Workload
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False

    @property
    def name(self) -> str:
        return self.workload.name


def _family(
    name: str,
    call: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    train: bool = False,
    rows: int = 0,
    dynamic: bool = False,
    **options: Any,
) -> Family:
    """Return a family of a function of random tensors, and of indices of ``rows`` if there are."""

    def build(dtype: torch.dtype, device: str, shrink: int) -> Case:
        scaled = [torch.randn(*shape, device=device) * shape[-1] ** -0.25 for shape in shapes]
        inputs = [tensor.to(dtype) for tensor in scaled]
        if rows:
            inputs.append(torch.randint(rows, (301,), device=device))
        return Case(call, tuple(inputs))

    workload = Workload("first contact", name, build, train=train, dtype="bf16", peers=("eager",))
    return Family(workload, options, dynamic)


_LINEAR = ((300, 200), (328, 200), (328,))
_HEADS = ((2, 4, 333, 64),) * 3
_ADAMW = Workload(
    "first contact", "a table of parameters",
    lambda dtype, device, shrink: adamw_step(48, 331, dtype, device), peers=("eager",),
)  # fmt: skip

FAMILIES = (
    _family("pointwise", _gelu, (1000, 1030), (1030,)),
    _family("rows", _norm, (300, 1000), (1000,), (1000,)),
    _family("very many rows, in turn", _norm, (70000, 520), (520,), (520,)),
    _family("rows in a loop", _loss, (20, 40001)),
    _family("columns", _columns, (3000, 520)),
    _family("rows beside column sums", _norm, (3000, 768), (768,), (768,), train=True),
    _family("product", _linear, (200, 264), (328, 264), (328,)),
    _family("product of odd sizes", _linear, (129, 65), (257, 65), (257,)),
    _family("product of few rows", _linear, (16, 4096), (1024, 4096), (1024,)),
    _family("two products", _swiglu, (136, 200), (200, 136), (200, 136)),
    _family("attention", _attention, *[(2, 4, 200, 64)] * 3),
    _family("attention, training", _attention, *[(2, 4, 200, 64)] * 3, train=True),
    _family("one query", _attention, (2, 4, 1, 64), *[(2, 4, 2000, 64)] * 2),
    _family("product by descriptors", _linear, *_LINEAR, descriptors="always", roles="never"),
    _family("product, cooperative", _linear, *_LINEAR, roles="cooperative"),
    _family("two products, cooperative", _swiglu, (136, 200), (200, 136), (200, 136),
            roles="cooperative"),
    _family("attention by descriptors", _attention, *_HEADS, descriptors="always", roles="never"),
    _family("attention, cooperative", _attention, *_HEADS, roles="cooperative"),
    _family("attention, training, cooperative", _attention, *_HEADS, train=True,
            roles="cooperative"),
    _family("one query, cooperative", _attention, (1, 1, 16, 64), *[(1, 1, 2000, 64)] * 2,
            roles="cooperative"),
    Family(_ADAMW),
    _family("dropout", _dropout, (1000, 1030)),
    _family("gather", _gather, (1000, 264), rows=1000),
    _family("gather, training", _gather, (1000, 264), rows=1000, train=True),
    _family("capture", _norm, (300, 1000), (1000,), (1000,), cudagraphs=True),
    _family("capture of a product", _linear, *_LINEAR, cudagraphs=True),
    _family("capture, training", _norm, (300, 1000), (1000,), (1000,), train=True,
            cudagraphs=True),
    _family("symbolic sizes", _sizes, (300, 1000), (1000,), dynamic=True),
    _family("product of symbolic sizes", _linear, *_LINEAR, dynamic=True),
)  # fmt: skip
"""In the order in which what comes later needs what came before."""


def tasks() -> list[Task]:
    return [Task(family.name, USUAL_S, LIMIT_S) for family in FAMILIES]


def touch(name: str, device: str) -> dict[str, Any]:
    """Compile, run twice and compare one family; return its entry, as of a peer in ``record``."""
    (family,) = (one for one in FAMILIES if one.name == name)
    return gpu_measure.compare(
        family.workload, device, PEER, family.options, dynamic=family.dynamic
    )
