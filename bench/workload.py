"""What is measured: a function, its inputs, and how one forward or training step is called.

A `Workload` builds a `Case` for a device; `compiled` makes a peer's version of its function, and
`step_of` a function without arguments whose one call is one measurement.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import runtimes

PEERS = ("eager", "inductor", "fusec")
VARIANTS = (*PEERS, "fusec-fused", "fusec-library")
"""Where products can run in several ways: fusec's choice, and each side of it forced."""
TUNED = ("inductor-max", "fusec")
FROZEN = (*PEERS, "inductor-freezing", "fusec-freeze")
"""Where nothing is trained: both compilers also with weights that are constants to them."""
DEPLOYED = (*FROZEN, "openvino", "onnxruntime")
"""What a user might run a trained model with."""

SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "inductor-max": ("inductor", {"mode": "max-autotune-no-cudagraphs"}),
    "inductor-freezing": ("inductor", {}),
    "fusec-freeze": ("fusec", {"options": {"freeze": True}}),
    "fusec-fused": ("fusec", {"options": {"race": "fused"}}),
    "fusec-library": ("fusec", {"options": {"race": "library"}}),
}
"""Peers that are not the name of a backend: the backend, and further arguments of torch.compile.

"eager" and "cudnn" compile nothing; "cudnn" is eager with cuDNN's attention.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A function or module with inputs; floating inputs and parameters take part in training.

    Attributes:
        flops: operations of the forward's matrix products; 0 where there are none to speak of.
        backward: the backward's operations in those of the forward.
        bare: the matrix products alone, of the same inputs, if they are to be timed too.
    """

    call: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]
    flops: int = 0
    backward: float = 2.0
    bare: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Workload:
    """A named case: `build(dtype, device, shrink)` divides its sizes by `shrink` for dry runs.

    Attributes:
        peers: who is measured.
        seconds: about what it takes on a GPU with its compiles; it is not begun with less left.
    """

    group: str
    name: str
    build: Callable[[torch.dtype, str, int], Case]
    train: bool = False
    dtype: str = "fp32"
    peers: tuple[str, ...] = PEERS
    seconds: float = 12.0

    @property
    def label(self) -> str:
        return f"{self.name} {'training' if self.train else 'forward'} {self.dtype}"

    def case(self, device: str = "cpu", *, shrink: int = 1, seed: int = 0) -> Case:
        """Build reproducible inputs; leaves of a training case require gradients."""
        torch.manual_seed(seed)
        case = self.build(DTYPES[self.dtype], device, shrink)
        if isinstance(case.call, nn.Module):
            case.call.train(self.train).requires_grad_(self.train)
        for tensor in case.inputs:
            tensor.requires_grad_(self.train and tensor.is_floating_point())
        return case


def modes(
    group: str,
    name: str,
    build: Callable[[torch.dtype, str, int], Case],
    dtypes: tuple[str, ...] = ("fp32",),
    inference: tuple[str, ...] = PEERS,
) -> list[Workload]:
    """A workload forward and training, in each dtype; ``inference``: who is measured forward."""
    return [
        Workload(group, name, build, train, dtype, PEERS if train else inference)
        for dtype in dtypes
        for train in (False, True)
    ]


def shrunk(extent: int, shrink: int) -> int:
    """Return an extent for a dry run: smaller, and still odd to tiles where it was."""
    return extent if shrink == 1 else max(16, extent // shrink)


def compiled(
    call: Callable, peer: str, options: Mapping[str, Any] | None = None, *, dynamic: bool = False
) -> Callable:
    """Return the peer's version of a function, compiled by nobody else.

    Dynamo keeps its results with the code object: each peer gets a code object of its own.

    Args:
        options: for fusec, besides those that make the peer.
    """
    if peer == "eager":
        return call
    if peer == "cudnn":
        return with_cudnn(call)
    if peer in runtimes.RUNTIMES:
        return runtimes.compiled(call, peer)

    def entry(*args: Any) -> Any:
        return call(*args)

    own = types.FunctionType(
        entry.__code__.replace(co_name=f"{peer}_entry"),
        entry.__globals__,
        closure=entry.__closure__,
    )
    backend, more = SETTINGS.get(peer, (peer, {}))
    settings = dict(more)
    if backend == "fusec" and (options or "options" in settings):
        settings["options"] = {**(options or {}), **settings.get("options", {})}
    made = torch.compile(own, backend=backend_of(backend), dynamic=dynamic, **settings)
    return while_freezing(made) if peer == "inductor-freezing" else made


def while_freezing(call: Callable) -> Callable:
    """Return a function whose first call, which compiles it, finds Inductor's setting `freezing`.

    As an option of torch.compile it comes too late: Dynamo asks for it, too.
    """
    from torch._inductor import config  # an interior, of a peer

    warm = False

    def run(*args: Any) -> Any:
        nonlocal warm
        if warm:
            return call(*args)
        warm = True
        with config.patch(freezing=True):
            return call(*args)

    return run


def with_cudnn(call: Callable) -> Callable:
    """Return a function whose attention is cuDNN's, backward included; it fails where that does."""

    def attend(*args: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call(*args)

    return attend


def backend_of(peer: str) -> str | Callable:
    """A peer's name, or fusec itself where it runs from a checkout that is not installed."""
    if peer == "fusec" and peer not in torch.compiler.list_backends():
        from fusec.backend import fusec

        return fusec
    return peer


def cotangents_of(case: Case) -> tuple[torch.Tensor, ...]:
    """Fixed gradients of the outputs, so that no loss is part of the measurement."""
    with torch.no_grad():
        outputs = as_tuple(case.call(*case.inputs))
    return tuple(torch.randn_like(out) for out in outputs if not _counts(out))


def _counts(out: torch.Tensor) -> bool:
    """Whether a result has no gradient, such as the positions that `cummax` returns."""
    return not (out.is_floating_point() or out.is_complex())


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def leaves_of(case: Case) -> list[torch.Tensor]:
    """Everything a training step computes gradients of."""
    parameters = list(case.call.parameters()) if isinstance(case.call, nn.Module) else []
    return [t for t in (*case.inputs, *parameters) if t.requires_grad]


def step_of(
    case: Case, call: Callable, cotangents: tuple[torch.Tensor, ...] | None
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """One measured call: the outputs, and for training (with cotangents) all gradients."""
    if cotangents is None:

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return as_tuple(call(*case.inputs))

        return forward
    leaves = leaves_of(case)

    def training() -> tuple[torch.Tensor, ...]:
        outputs = as_tuple(call(*case.inputs))
        sources = [out for out in outputs if not _counts(out)]
        return (*(o.detach() for o in outputs), *torch.autograd.grad(sources, leaves, cotangents))

    return training


def in_double(case: Case) -> Case:
    """The same case with the same values in fp64."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach()
        wide = wide.double() if wide.is_floating_point() else wide
        return wide.requires_grad_(tensor.requires_grad)

    call = case.call
    if isinstance(call, nn.Module):
        call = copy.deepcopy(call).double()
    return dataclasses.replace(case, call=call, inputs=tuple(widen(t) for t in case.inputs))


def bytes_floor(case: Case, outputs: tuple[torch.Tensor, ...], *, train: bool) -> int:
    """Bytes that any implementation moves: every input and every result once.

    Training reads inputs and cotangents once more. Saved statistics are left out: the floor is low.
    """
    parameters = list(case.call.parameters()) if isinstance(case.call, nn.Module) else []
    read = sum(t.nbytes for t in (*case.inputs, *parameters))
    written = sum(t.nbytes for t in outputs)
    if not train:
        return read + written
    results = sum(o.nbytes for o in outputs[: len(outputs) - len(leaves_of(case))])
    return 2 * read + written + results
