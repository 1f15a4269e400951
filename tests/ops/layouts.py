"""Operations of ``op_db`` with arguments that are not row-major: does the trace know the strides?

``calls_unlike_eager``: running an operation shows each call of ATen's that eager makes of it,
backward included. The same call is traced, whole and taken apart as AOTAutograd would, of tensors
without memory that lie alike. That takes milliseconds for a call.

``results_unlike_eager``: the operation is compiled as far as AOTAutograd's graphs. What fusec
returns has the strides that these say, so no kernel is made: eager ones stand in for them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusec.codegen.targets import find_target
from fusec.driver.backend import compile_with
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.frontend.aot.decompositions import decompositions
from fusec.frontend.aot.eager_strides import tracing_as_eager
from fusec.options import Options
from tests.ops.op_db import LARGEST, Arguments, Sample, all_calls, copied, run_all, sorted_out

LOOKED_AT = 60  # samples among which those of most axes are chosen
IMAGE = (2, 3, 4, 5)

RULES = decompositions()
Significant = tuple[tuple[int, ...], tuple[int, ...]]


def reordered(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return a copy whose axes lie in memory in this order, the outermost first."""
    return x.permute(order).contiguous().permute([order.index(k) for k in range(x.dim())])


def transposed(x: torch.Tensor) -> torch.Tensor:
    return reordered(x, list(reversed(range(x.dim()))))


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return reordered(x, [0, *range(2, x.dim()), 1]) if x.dim() > 2 else x


def permuted(x: torch.Tensor) -> torch.Tensor:
    return reordered(x, [*range(1, x.dim()), 0]) if x.dim() > 2 else x


def swapped_rows(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT if x.dim() > 2 else x


def expanded(x: torch.Tensor) -> torch.Tensor:
    axis = next((k for k in range(x.dim()) if x.shape[k] > 1), None)
    return x if axis is None else x.narrow(axis, 0, 1).expand(x.shape)


def sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, x), -1)[..., 0] if x.dim() else x


LAYOUTS = (transposed, channels_last, permuted, swapped_rows, expanded, sliced)


def samples_of_layouts(op: OpInfo, dtype: torch.dtype) -> list[Sample]:
    """Return samples with many axes, also as images, each in all layouts."""
    torch.manual_seed(0)
    random.seed(0)
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    drawn = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), LOOKED_AT)
    found = [Sample((s.input, s.args, s.kwargs), s.output_process_fn_grad) for s in drawn]
    found = [s for s in found if max(map(torch.numel, _tensors(s)), default=0) <= LARGEST]
    found.sort(key=lambda s: -max((_rank(t) for t in _tensors(s)), default=0))
    middle = [s for s in found if max(map(_rank, _tensors(s)), default=0) == 2]
    if not found:
        return []
    images = [i for s in found[:1] + found[-1:] for i in _as_images(s)]
    bases = [found[0], *images, *middle[:1]]
    return [made for base in bases for made in (base, *_laid_out(base))]


def _tensors(sample: Sample) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(sample.arguments)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _rank(value: torch.Tensor) -> int:
    return sum(n > 1 for n in value.shape)


def _as_images(sample: Sample) -> Iterator[Sample]:
    """Yield a sample whose first tensor, and all of its shape, are images; eager may refuse it."""
    first = sample.arguments[0]
    if isinstance(first, torch.Tensor) and first.layout is torch.strided and first.dim() != 4:
        yield _mapped(sample, lambda t: _image(t) if t.shape == first.shape else t)
        yield _mapped(sample, lambda t: _image(t) if t is first else t)


def _image(like: torch.Tensor) -> torch.Tensor:
    values = torch.rand(IMAGE) * 0.8 + 0.1
    if not (like.is_floating_point() or like.is_complex()):
        values = values * 5 + 1
    return values.to(like.dtype).requires_grad_(like.requires_grad)


def _laid_out(sample: Sample) -> Iterator[Sample]:
    """Yield the sample in all layouts: of all tensors, of the first alone, of the others."""
    tensors = _tensors(sample)
    for layout in LAYOUTS:
        for chosen in (tensors, tensors[:1], tensors[1:])[: 3 if len(tensors) > 1 else 1]:
            yield _mapped(sample, lambda t, c=chosen, f=layout: _as(f, t, c))


def _as(
    layout: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, chosen: list[torch.Tensor]
) -> torch.Tensor:
    if not any(x is one for one in chosen):
        return x
    return layout(x.detach()).requires_grad_(x.requires_grad)


def _mapped(sample: Sample, change: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    def each(leaf: Any) -> Any:
        strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        return change(leaf) if strided else leaf

    arguments: Arguments = pytree.tree_map(each, sample.arguments)
    return Sample(arguments, sample.process)


# -- calls -----------------------------------------------------------------------------------------


def significant(value: Any) -> Significant | None:
    """Return shape and strides of a tensor, without the strides that address nothing."""
    if value.layout is not torch.strided or value.numel() == 0:
        return None
    pairs = zip(value.shape, value.stride(), strict=True)
    return tuple(value.shape), tuple(int(stride) for extent, stride in pairs if extent > 1)


class Apart(TorchDispatchMode):
    """Take operations apart as AOTAutograd does."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = RULES

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self.rules.get(func)
        if rule is not None:
            with self:
                made = rule(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return func(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    """Trace each call of ATen's again, and remember those whose strides are not eager's."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode()
        self.seen: set[Any] = set()
        self.unlike: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        key = (func, *(_description(leaf) for leaf in leaves))
        made = func(*args, **kwargs)
        if func.namespace == "aten" and not func._schema.is_mutable and key not in self.seen:
            self.seen.add(key)
            self.compare(func, args, kwargs, made, key)
        return made

    def compare(self, func: Any, args: Any, kwargs: Any, made: Any, key: Any) -> None:
        eager = [significant(t) for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        for apart in (False, True) if func in RULES else (False,):
            try:
                traced = traced_strides(self.mode, func, args, kwargs, apart=apart)
            except Exception:  # a result that depends on data: not a question of strides
                continue
            if _shapes(traced) == _shapes(eager) and traced != eager:
                self.unlike[str(func)] = f"{key[1:]}: {traced} instead of {eager}"


def _shapes(found: list[Significant | None]) -> list[tuple[int, ...] | None]:
    return [None if one is None else one[0] for one in found]


def _description(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), significant(leaf), leaf.dtype)
    return repr(leaf)


def traced_strides(
    mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, *, apart: bool
) -> list[Significant | None]:
    """Return the strides of what a call makes, as AOTAutograd traces it."""
    with tracing_as_eager(mode), mode:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        if apart:
            with Apart():
                made = func(*args, **kwargs)
        else:
            made = func(*args, **kwargs)
    return [significant(t) for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]


def _without_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def calls_unlike_eager(op: OpInfo, dtype: torch.dtype) -> dict[str, str]:
    """Return the calls of an operation that are traced with strides that eager does not give."""
    watched = Watched()
    for sample in samples_of_layouts(op, dtype):
        try:
            with watched:
                run_all(all_calls(op.op), [sample])
        except Exception:  # eager refuses it
            continue
    return watched.unlike


# -- whole traces ----------------------------------------------------------------------------------


def compile_as_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose graphs run as eager kernels, with the strides that were traced."""
    options = Options.from_compile(None, {"strict": True, "cache": False})
    context = CompileContext(find_target("cpu"), options, Trace("joint"))
    return torch.compile(
        fn,
        backend=lambda gm, inputs: compile_with(gm, inputs, run_as_traced, context),
        dynamic=False,
    )


def run_as_traced(gm: fx.GraphModule, _: Any, *, name: str) -> Callable[[list[Any]], list[Any]]:
    (outputs,) = gm.graph.output_node().args
    traced = [o.meta["val"] if isinstance(o, fx.Node) else None for o in outputs]

    def call(args: list[Any]) -> list[Any]:
        inputs = list(args)
        args.clear()
        return [_as_traced(x, t) for x, t in zip(gm(*inputs), traced, strict=True)]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _as_traced(value: Any, traced: Any) -> Any:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if not strided or significant(value) == significant(traced):
        return value
    made = torch.empty_strided(value.shape, traced.stride(), dtype=value.dtype)
    return made.copy_(value)


def results_unlike_eager(op: OpInfo, dtype: torch.dtype, count: int) -> list[str]:
    """Return the results and gradients of an operation whose strides eager does not give.

    Gradients begin with tensors that lie as the results do: AOTAutograd brings others to that.

    Args:
        count: of how many samples, all in one compile.
    """
    samples, _ = sorted_out(op, samples_of_layouts(op, dtype)[:count])
    if not samples:
        return []
    torch._dynamo.reset()
    call = all_calls(op.op)
    eager = _strides_of_run(call, samples)
    traced = _strides_of_run(compile_as_traced(call), samples)
    return [
        f"{name}: {traced.get(name)} instead of {found}"
        for name, found in eager.items()
        if traced.get(name) != found
    ]


def _strides_of_run(
    call: Callable[[list[Arguments]], list[Any]], samples: list[Sample]
) -> dict[str, Significant | None]:
    """Return the strides of results and gradients, by sample and position."""
    torch.manual_seed(3)
    inputs = copied([s.arguments for s in samples])
    outputs = [s.process(made) for s, made in zip(samples, call(inputs), strict=True)]
    leaves = [t for t in pytree.tree_leaves(inputs) if _requires_grad(t)]
    roots = [t for t in pytree.tree_leaves(outputs) if _requires_grad(t)]
    found: list[Any] = []
    if leaves and roots:
        found = list(
            torch.autograd.grad(roots, leaves, list(map(torch.ones_like, roots)), allow_unused=True)
        )
    named = {f"result {k} of sample {n}": t for n, made in enumerate(outputs)
             for k, t in enumerate(pytree.tree_leaves(made))}  # fmt: skip
    named.update({f"gradient {k}": t for k, t in enumerate(found)})
    return {k: significant(t) for k, t in named.items() if isinstance(t, torch.Tensor)}


def _requires_grad(value: Any) -> bool:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return strided and value.requires_grad
