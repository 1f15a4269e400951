"""Compare operations of PyTorch's own table of operations, ``op_db``, with eager.

One *case* is an operation and a type. Its samples are the table's: the first few, the first scalar,
the first without elements, and a copy of the first that is not contiguous. All samples that eager
accepts are one function and so one compile; where the operation has a gradient, all gradients are
the second. What eager rejects, the compiled operation has to reject with the same type of error.

What fusec left to eager kernels is read from the same compiles: a row of ``docs/operations.md``,
which ``python -m tests.ops.op_db`` writes.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.testing._internal.common_methods_invocations as table
from torch._dynamo.utils import counters
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from fusec.codegen.targets import find_target
from fusec.driver.backend import compile_with
from fusec.driver.compiler import compile_graph, run_eagerly
from fusec.driver.context import CompileContext
from fusec.driver.observers import CompileHooks, Observer, observing
from fusec.driver.pipeline import Compiled
from fusec.driver.trace import Trace
from fusec.ir.graph import Extern, RowLoop, Schedule
from fusec.options import Options
from fusec.runtime.calls.fake import with_memory_only
from tests.ops.operations_page import PAGE, page, row_of
from tests.support import HALF, assert_agree

op_db: list[OpInfo] = table.op_db
FIRST = 3
LOOKED_AT = 60  # samples among which a scalar and an empty one are looked for
LARGEST = 1 << 16  # elements of a sample's tensors
EMPTY = "an empty tensor"
UNINITIALISED = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided",
                 "empty_permuted", "resize_", "resize_as_")  # fmt: skip

Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]

REFUSED_BY_EAGER_ALONE = {
    "native_group_norm": "eager's kernel takes no strided input; what it computes is defined",
    "linalg.eig": "eager's backward looks at the values of a gradient, a trace cannot",
}
"""Operations that reject inputs which their compiled forms accept, and why that is left so."""


WRONG_IF_COMPLEX = ("linalg.pinv", "pinverse")
"""Operations that `aot_eager` computes wrongly, too (torch 2.13, 2026-11-26)."""


DISTINCT = ("topk",)
"""Operations that leave open which of equal elements they take: their samples have none."""

COARSE = {
    "ldexp": (HALF, 1e-1),
    "linalg.householder_product": ((torch.complex64,), 1e-3),
    "nn.functional.triplet_margin_loss": (HALF, 2e-2),
    "nn.functional.triplet_margin_with_distance_loss": (HALF, 2e-2),
}
"""Tolerances in some types of operations that subtract what has just been rounded: luck decides."""


@dataclass
class Outcome:
    """What one case left to eager kernels.

    Attributes:
        externs: (graph, operation, reason) of each call, but for tensors without elements.
        breaks: why Dynamo ended a graph.
        graphs: which graphs fusec compiled: "inference", or "forward" and "backward".
    """

    externs: set[tuple[str, str, str]] = field(default_factory=set)
    breaks: list[str] = field(default_factory=list)
    graphs: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Run:
    """One call of all samples: outputs, and gradients of the inputs that require them."""

    outputs: list[Any]
    gradients: list[torch.Tensor | None]


def find_op(full_name: str) -> OpInfo | None:
    """Return the operation of a name as ``full_name`` of the table gives it, if it is there."""
    return next((op for op in op_db if op.full_name == full_name), None)


def dtypes_of(op: OpInfo) -> list[torch.dtype]:
    """Return the types of a sweep, as far as they are supported: f32, a half type, and others."""
    supported = op.supported_dtypes("cpu")
    half = next((t for t in (torch.bfloat16, torch.float16) if t in supported), None)
    wanted = [torch.float32, half, torch.int64, torch.bool]
    wanted += [] if op.name in WRONG_IF_COMPLEX else [torch.complex64]
    return [t for t in wanted if t in supported] or sorted(supported, key=str)[:1]


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, and what the table does to its result before it is compared."""

    arguments: Arguments
    process: Callable[[Any], Any]


def samples_of(op: OpInfo, dtype: torch.dtype, *, requires_grad: bool) -> list[Sample]:
    """Return the samples of a case; the same ones in each call."""
    torch.manual_seed(0)
    random.seed(0)
    drawn = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
    found = [s for s in itertools.islice(drawn, LOOKED_AT) if _size(s) <= LARGEST]
    usual = [s for s in found if not _is_empty(s)]
    for sample in usual if op.name in DISTINCT else ():
        _distinct(sample.input)
    chosen = usual[:FIRST]
    chosen += [s for s in usual[FIRST:] if _is_scalar(s)][:1]
    chosen += [s for s in found if _is_empty(s)][:1]
    chosen += [s.noncontiguous() for s in usual[:1] if _is_strided(s)]
    return [Sample((s.input, s.args, s.kwargs), s.output_process_fn_grad) for s in chosen]


def _distinct(x: torch.Tensor) -> None:
    """Give a tensor numbers of which no two are equal."""
    with torch.no_grad():
        x.copy_(torch.randperm(x.numel()).reshape(x.shape) - x.numel() // 2)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _size(sample: SampleInput) -> int:
    return max((t.numel() for t in _tensors((sample.input, sample.args, sample.kwargs))), default=0)


def _is_scalar(sample: SampleInput) -> bool:
    return isinstance(sample.input, torch.Tensor) and sample.input.dim() == 0


def _is_strided(sample: SampleInput) -> bool:
    inputs = _tensors((sample.input, sample.args, sample.kwargs))
    return all(t.layout is torch.strided for t in inputs)


def _is_empty(sample: SampleInput) -> bool:
    inputs = _tensors((sample.input, sample.args, sample.kwargs))
    return any(t.numel() == 0 for t in inputs)


# -- running --------------------------------------------------------------------------------------


def copied(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return arguments with tensors of their own, strides kept; floating ones as ``dtype``.

    Complex ones get the complex type with parts of that type.
    """

    def copy_one(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            result = plain.clone()
        else:
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            memory = plain.as_strided((last + 1,), (1,)).clone()
            result = memory.as_strided(tensor.shape, tensor.stride(), 0)
        if dtype is not None and tensor.is_floating_point():
            result = result.to(dtype)
        if dtype is not None and tensor.is_complex():
            result = result.to(dtype.to_complex())
        return result.detach().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copy_one, value)


def run_all(
    call: Callable[[list[Arguments]], list[Any]],
    samples: list[Sample],
    dtype: torch.dtype | None = None,
    seed: int = 3,
) -> Run:
    """Call with copies of the samples and, if a tensor requires it, compute gradients."""
    torch.manual_seed(seed)
    inputs = copied([s.arguments for s in samples], dtype)
    outputs = [s.process(out) for s, out in zip(samples, call(inputs), strict=True)]
    leaves = [t for t in _tensors(inputs) if t.requires_grad]
    roots = [t for t in _tensors(outputs) if t.requires_grad and t.layout is torch.strided]
    if not leaves or not roots:
        return Run(outputs, [])
    generator = torch.Generator().manual_seed(7)
    cotangents = [_cotangent(r, generator) for r in roots]
    found = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    return Run(outputs, list(found))


def _cotangent(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    made = torch.randn(like.shape, generator=generator).bfloat16().to(like.dtype)
    if not like.is_complex():
        return made
    return made + 1j * torch.randn(like.shape, generator=generator).bfloat16().to(like.dtype)


def all_calls(op: Callable[..., Any]) -> Callable[[list[Arguments]], list[Any]]:
    """Return the function of one compile: ``op`` of each sample's arguments."""

    def call(samples: list[Arguments]) -> list[Any]:
        return [op(x, *args, **kwargs) for x, args, kwargs in samples]

    return call


def compiled(call: Callable[..., Any], outcome: Outcome, **options: Any) -> Callable[..., Any]:
    """Return ``call`` compiled by fusec in strict mode; ``outcome`` learns what became of it."""
    chosen = Options.from_compile(None, {"strict": True, "cache": False, **options})

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with(
            gm,
            inputs,
            partial(_compile_one, chosen, outcome),
            CompileContext(find_target("cpu"), chosen, Trace("joint")),
        )

    return torch.compile(call, backend=backend, dynamic=False)


def _compile_one(
    options: Options, outcome: Outcome, gm: torch.fx.GraphModule, _: Sequence[Any], *, name: str
) -> Callable[..., Any]:
    trace = Trace(name)
    with observing(_Schedules()) as seen:
        bound = compile_graph(gm, name, options, trace)
    outcome.graphs.add(name)
    if trace.problem is not None:
        outcome.externs.add((name, "all", trace.problem))
    else:
        note_externs(seen.last, name, outcome)
    return with_memory_only(bound, run_eagerly(gm))


class _Schedules(Observer):
    """Keeps the schedule of a graph, and of none of its parts."""

    last: Schedule

    def watch_compile(self, options: Options, trace: Trace) -> CompileHooks | None:
        return CompileHooks(partial(self._keep, trace.name))

    def _keep(self, name: str, compiled: Compiled) -> None:
        if "." not in name:
            self.last = compiled.schedule


def note_externs(schedule: Schedule, name: str, outcome: Outcome) -> None:
    for step in schedule.steps:
        if isinstance(step, RowLoop):
            note_externs(step.body, name, outcome)
        elif isinstance(step, Extern) and step.reason != EMPTY:
            outcome.externs.add((name, step.target.removeprefix("aten."), step.reason))


# -- one case -------------------------------------------------------------------------------------


def unseeded() -> AbstractContextManager[Any]:
    """Return a context in which the table's calls leave torch's seed alone."""
    return patch.object(table, "wrapper_set_seed", call_unseeded)


def check_case(op: OpInfo, dtype: torch.dtype) -> Outcome:
    """Assert that a case's results, gradients and errors are eager's; return what ran eagerly."""
    torch._dynamo.reset()
    counters.clear()
    outcome = Outcome()
    trains = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    with warnings.catch_warnings(), unseeded():
        warnings.simplefilter("ignore")
        accepted, rejected = sorted_out(op, samples_of(op, dtype, requires_grad=trains))
        if accepted:
            check_values(op, accepted, outcome)
        if op.full_name not in REFUSED_BY_EAGER_ALONE:
            for sample, error in rejected:
                check_error(op, sample, error)
    outcome.breaks = list(counters["graph_break"])
    return outcome


_NEUTRAL = {"float": torch.ones(()), "int": torch.zeros((), dtype=torch.int64),
            "bool": torch.zeros((), dtype=torch.bool)}  # fmt: skip
"""Inputs by which a producer changes no element, which no compiler knows."""
ROUNDED = {"bfloat16": 2e-2, "half": 2e-2}
"""Operations whose gradients are added in 16 bits, which eager rounds one by one: tolerances."""


def check_between(op: OpInfo) -> None:
    """Assert that an operation's values and gradients are eager's in a kernel with neighbours.

    A pointwise operation makes its tensors, another one and two reductions read its results.
    """
    torch._dynamo.reset()
    dtype = dtypes_of(op)[0]
    trains = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    call = all_calls(partial(_between, op.op))
    with warnings.catch_warnings(), unseeded():
        warnings.simplefilter("ignore")
        drawn = samples_of(op, dtype, requires_grad=trains)
        samples, _ = sorted_out_of(call, [Sample(s.arguments, lambda made: made) for s in drawn])
        if samples:
            tolerance = ((dtype,), ROUNDED[op.name]) if op.name in ROUNDED else ((), 0.0)
            check_run(op, call, samples, Outcome(), COARSE.get(op.full_name, tolerance))


def _between(op: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> list[list[Any]]:
    x, args, kwargs = pytree.tree_map_only(torch.Tensor, _produced, (x, args, kwargs))
    return [_read(leaf) for leaf in pytree.tree_leaves(op(x, *args, **kwargs))]


def _produced(x: torch.Tensor) -> torch.Tensor:
    if x.layout is not torch.strided:
        return x
    if x.dtype is torch.bool:
        return x ^ _NEUTRAL["bool"]
    wide = x.is_floating_point() or x.is_complex()
    return x * _NEUTRAL["float"] if wide else x + _NEUTRAL["int"]


def _read(made: Any) -> list[Any]:
    if not isinstance(made, torch.Tensor) or made.layout is not torch.strided:
        return [made]
    if made.dtype is torch.bool:
        return [made, ~made, made.sum()]
    y = made * 0.5 + 1 if made.is_floating_point() or made.is_complex() else made + 1
    sums = [y.sum(-1)] if made.dim() else []
    means = [y.relu().mean(0)] if made.dim() and made.is_floating_point() and y.numel() else []
    return [made, y, *sums, *means]


def call_unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for the table's wrapper that seeds in each call, which no compiler traces."""
    return op(*args, **kwargs)


def sorted_out(
    op: OpInfo, samples: list[Sample]
) -> tuple[list[Sample], list[tuple[Sample, Exception]]]:
    """Return the samples that eager accepts, and those that it does not, with its errors."""
    return sorted_out_of(all_calls(op.op), samples)


def sorted_out_of(
    call: Callable[[list[Arguments]], list[Any]], samples: list[Sample]
) -> tuple[list[Sample], list[tuple[Sample, Exception]]]:
    accepted, rejected = [], []
    for sample in samples:
        try:
            run_all(call, [sample])
            accepted.append(sample)
        except Exception as error:
            rejected.append((sample, error))
    return accepted, rejected


def check_values(op: OpInfo, samples: list[Sample], outcome: Outcome) -> None:
    """Compare runs; uninitialised and random results by their types alone."""
    check_run(op, all_calls(op.op), samples, outcome, COARSE.get(op.full_name, ((), 0.0)))


def check_run(
    op: OpInfo,
    call: Callable[[list[Arguments]], list[Any]],
    samples: list[Sample],
    outcome: Outcome,
    coarse: tuple[Collection[torch.dtype], float],
) -> None:
    eager = run_all(call, samples)
    found = run_all(compiled(call, outcome), samples)
    if op.name not in UNINITIALISED and equal_runs(eager, run_all(call, samples, seed=4)):
        compare_runs(eager, found, exact_run(call, samples, eager), coarse)
    else:
        compare_runs(*map(without_values, (eager, found, eager)))


def without_values(run: Run) -> Run:
    """Return a run of which only types and strides are left to compare."""

    def zeros(value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value.detach()).requires_grad_(value.requires_grad)

    return Run(*pytree.tree_map_only(torch.Tensor, zeros, (run.outputs, run.gradients)))


def equal_runs(a: Run, b: Run) -> bool:
    """Return True if two runs agree bit for bit, NaNs aside."""
    pairs = zip(*(_tensors((run.outputs, run.gradients)) for run in (a, b)), strict=True)
    reals = ((real(x).detach(), real(y).detach()) for x, y in pairs)
    return all(torch.equal(x, y) or bool(x.isnan().any()) for x, y in reals)


def exact_run(call: Callable[..., Any], samples: list[Sample], eager: Run) -> Run:
    """Return the run in fp64; eager's where it cannot run, or has results of another structure."""
    try:
        exact = run_all(call, samples, torch.float64)
    except Exception:
        return eager
    a, b = (_tensors((run.outputs, run.gradients)) for run in (eager, exact))
    same = len(a) == len(b) and all(x.shape == y.shape for x, y in zip(a, b, strict=True))
    return exact if same else eager


def compare_runs(
    eager: Run,
    found: Run,
    reference: Run,
    coarse: tuple[Collection[torch.dtype], float] = ((), 0.0),
) -> None:
    """Assert that two runs agree; some types to within a tolerance of ``COARSE``."""
    types, coarse_tol = coarse
    for kind in ("outputs", "gradients"):
        a, b, r = (pytree.tree_flatten(getattr(run, kind)) for run in (eager, found, reference))
        assert len(a[0]) == len(b[0]), f"{kind} have another structure"
        for k, (x, y, z) in enumerate(zip(a[0], b[0], r[0], strict=True)):
            tol = coarse_tol if getattr(x, "dtype", None) in types else None
            name = f"{kind}[{k}]"
            assert_agree(real(x), real(y), real(z), name, tol=tol, strides=kind == "outputs")


def real(value: Any) -> Any:
    """Return a value whose elements can be compared: dense, and pairs of reals for complex."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.is_floating_point() and value.itemsize == 1:
        value = value.float()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def check_error(op: OpInfo, sample: Sample, error: Exception) -> None:
    """Assert that the compiled operation rejects a sample with eager's type of error."""
    torch._dynamo.reset()
    try:
        run_all(compiled(all_calls(op.op), Outcome()), [sample])
    except Exception as found:
        assert isinstance(found, type(error)), (
            f"{type(found).__name__}: {found} instead of {type(error).__name__}: {error}"
        )
        return
    raise AssertionError(f"no error instead of {type(error).__name__}: {error}")


def main() -> None:
    """Write ``docs/operations.md``: some six CPU minutes."""
    rows = {}
    for op in op_db:
        print(op.full_name, flush=True)
        outcomes = [check_case(op, dtype) for dtype in dtypes_of(op)[:1]]
        rows[op.full_name] = row_of(*outcomes)
    PAGE.write_text(page(rows, REFUSED_BY_EAGER_ALONE), encoding="utf-8")


if __name__ == "__main__":
    main()
