"""Compare a model's results: by fusec with eager's, and of large calls with those of small ones.

``compare``: the model runs three times on copies of the same random inputs, on this machine's GPU
or else its CPU: eagerly, eagerly in fp64, and compiled, where a failure inside fusec is an error.
Outputs, inputs and buffers after the call and, in training, gradients have to agree by the rule of
docs/numerics.md (``runtime/race/agreement.py``). Where the model draws random numbers (dropout),
the compiled one draws eager's, as fusec's own differ. Objects other than tensors, such as a cache
of keys and values, are compared by the tensors in them.

``check_invariance``: the model is compiled once, under ``batch_invariant``, and called with parts
of the same random inputs: with the first 1, 2 or 33 rows, say, of the axes that differ from call to
call, on one thread and on several. Each element has to have the bits that the largest call gives.

The JSON forms, schema 1, are stable: fields are added, never renamed or removed::

    {"schema": 1, "device": "cpu", "compiled": 1,
     "eager_random": true if the model draws random numbers,
     "results": [{"name", "dtype", "shape", "eager_error", "fusec_error", "problem", "call"}],
     "faults": [the name of each result with a problem]}

    {"schema": 1, "compiled": 1,
     "results": [{"name", "dtype", "shape", "threads", "calls", "problem"}],
     "faults": [the name of each result with a problem]}

Errors are the largest distance of an element from fp64's; null for results that are not floats,
and where the model does not run in fp64.
``call`` counts from 0, ``compiled`` the graphs that Dynamo made for all calls together.

Worked example::

    >>> print(compare(torch.nn.LayerNorm(768), [torch.randn(8, 768)], train=True))
    >>> print(check_invariance(block, [torch.randn(1, 64)], [torch.randn(33, 64)]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fusec.backend import fusec
from fusec.errors import ModelError, UsageError
from fusec.frontend.named_sizes import name_size
from fusec.runtime.race.agreement import disagreement
from fusec.tools.report.arguments import Arguments, Given, copied, leaf_of
from fusec.tools.report.stages import this_device
from fusec.tools.terminal import Report, fitted_table, wrapped
from fusec.tools.verify.kernels import with_either_choice
from fusec.torch_interior import counters, pytree, tensors_in

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Types that are compared as they are; other objects are compared by their tensors."""
_FEW = 12
"""The most tensors with a line each; more have a line for each kind."""
_SEED = 7
_FIRST = "output 0: "
"""The prefix of ``disagreement`` for the first tensor."""


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor of a call; ``problem`` is how fusec's is wrong, or empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    eager_error: float | None
    fusec_error: float | None
    problem: str
    call: int = 0


@dataclass(frozen=True, slots=True)
class InvariantResult:
    """One result of all calls; ``problem`` is where bits differ, or empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    threads: tuple[int, ...]
    calls: int
    problem: str


_Judged = TypeVar("_Judged", Result, InvariantResult)


@dataclass(frozen=True, slots=True)
class _Results(Report, Generic[_Judged]):
    """The results of a check; ``compiled`` counts the graphs of Dynamo for all calls together."""

    results: tuple[_Judged, ...]
    compiled: int = 1

    @property
    def faults(self) -> tuple[_Judged, ...]:
        return tuple(result for result in self.results if result.problem)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "faults": [result.name for result in self.faults]}

    def _graphs(self) -> str:
        return f"{self.compiled} graph{'s' * (self.compiled != 1)} of Dynamo"

    def _verdict(self) -> str:
        return f"faults: {len(self.faults) or 'none'}"


@dataclass(frozen=True, slots=True)
class Comparison(_Results[Result]):
    """The report of ``fusec check``.

    Attributes:
        eager_random: the model draws random numbers; the compiled one drew eager's.
    """

    device: str = ""
    eager_random: bool = False

    def text(self, *, whole: bool = False) -> str:
        """Return the text: of many tensors, the kinds and those that disagree; all if ``whole``."""
        return "\n".join(_lines(self, whole=whole))


def compare(
    fn: Callable[..., Any],
    *calls: Given,
    train: bool = False,
    dynamic: bool = False,
    options: Mapping[str, Any] | None = None,
    backend: Callable[..., Any] | None = None,
) -> Comparison:
    """Run a module or function eagerly, in fp64 and compiled, and compare the results.

    The module is copied for each of these, so that its weights and state stay as they are.

    Args:
        calls: the inputs of each call; they come one after the other, so that state is carried on.
        options: of the compile, in addition to ``strict``.
        backend: in the place of ``fusec``; it gets no options.
    Raises:
        ModelError: if the model itself fails with these inputs.
        FusecError: for a failure inside fusec.
    """
    given = [Arguments.of(call) for call in calls]
    own = _copy(fn)
    draws = backend is None and draws_numbers(fn, given[0], train)
    made = {"strict": True, **({"fallback_random": True} if draws else {}), **(options or {})}
    if backend is None:
        compiled = torch.compile(own, backend=fusec, dynamic=dynamic, options=made)
    else:
        compiled = torch.compile(own, backend=backend, dynamic=dynamic)
    called: list[dict[str, Any]] = []

    def compared() -> tuple[Result, ...]:
        results: list[Result] = []
        for number, (eager, exact) in enumerate(_references(fn, given, train)):
            if number == len(called):
                called.append(_run(own, given[number], train, compiled))
            ours = called[number]
            for name in dict.fromkeys((*eager, *ours)):
                found = _result(name, eager.get(name), ours.get(name), exact.get(name))
                results.append(replace(found, call=number))
        return tuple(results)

    graphs = counters["stats"]["unique_graphs"]
    results = with_either_choice(compared, lambda found: any(result.problem for result in found))
    graphs = counters["stats"]["unique_graphs"] - graphs
    return Comparison(results, graphs, str(this_device()), draws)


# -- runs ----------------------------------------------------------------------------------------


def draws_numbers(fn: Callable[..., Any], inputs: Given, train: bool) -> bool:
    """Return True if a call of the model draws random numbers.

    Raises:
        ModelError: if the model itself fails.
    """
    args = Arguments.of(inputs).mapped(partial(leaf_of, train=train))
    before = _random_state()
    try:
        with torch.set_grad_enabled(train):
            args.call(_copy(fn))
    except Exception as error:
        raise ModelError.raised(error) from error
    return not all(map(torch.equal, before, _random_state()))


def _references(
    fn: Callable[..., Any], given: Sequence[Arguments], train: bool
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the results of each call by eager kernels, and in fp64.

    Raises:
        ModelError: if the model itself fails.
    """
    theirs, double = _copy(fn), _copy(fn, torch.float64)
    for inputs in given:
        try:
            eager = _run(theirs, inputs, train)
        except Exception as error:
            raise ModelError.raised(error) from error
        double, exact = _in_f64(double, inputs, train)
        yield eager, exact


def _in_f64(
    model: Callable[..., Any], inputs: Arguments, train: bool
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a model after a call in f64, and the call's results.

    Without f32 inside, or with it where that fails: for types of operands that differ, or bits that
    are read. Results are empty for an operation without f64: others are compared with eager's then.
    """
    for casts in (WidenedCasts(), nullcontext()):
        called = _copy(model)  # a call that fails has changed it
        with suppress(Exception), casts:
            return called, _run(called, inputs, train, dtype=torch.float64)
    return model, {}


class WidenedCasts(TorchFunctionMode):
    """Takes f64 where a call with a tensor names f32, so that a model in f64 rounds nowhere.

    ``x.float()`` of a norm, a softmax or a recurrence says "not in 16 bits". Left alone, it makes a
    reference of eager's own rounding steps, which fusec's are then measured against. A bit cast and
    a tensor that is made of no other (a mask's type, random numbers) keep their type.

    Raises:
        NotImplementedError: where bits of f64 are read, which may stand for f32.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call with f64 for f32."""
        named = dict(kwargs or {})
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args, **named)
        if func is torch.Tensor.view:
            cast = any(isinstance(value, torch.dtype) for value in (*args, *named.values()))
            if cast and args[0].dtype is torch.float64:
                raise NotImplementedError("bits of a number that may be f32 outside of this mode")
            return func(*args, **named)
        if not tensors_in((args, named)):
            return func(*args, **named)
        args, named = pytree.tree_map_only(torch.dtype, _widened, (args, named))
        return func(*args, **named)


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else dtype


def _random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def _copy(fn: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Any]:
    if not isinstance(fn, nn.Module):
        return fn
    module = copied(fn)
    return module if dtype is None else module.to(dtype)


def _run(
    fn: Callable[..., Any],
    inputs: Arguments,
    train: bool,
    call: Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Run a call; return its outputs, inputs and buffers after it, and gradients, by name.

    Args:
        fn: a function, or the module whose state counts.
        call: what to call, if not ``fn``: its compiled form.
        dtype: to which floating inputs are converted.
    """
    args = inputs.mapped(partial(leaf_of, train=train, dtype=dtype))
    torch.manual_seed(_SEED)
    with torch.set_grad_enabled(train):
        output = args.call(fn if call is None else call)
    found = {name: value for at, leaf in _leaves(output) for name, value in _parts(at, leaf)}
    tensors = {f"input {n}": a for n, a in args.labelled() if isinstance(a, torch.Tensor)}
    state: dict[str, torch.Tensor] = {}
    if isinstance(fn, nn.Module):
        tensors.update((f"parameter {name}", value) for name, value in fn.named_parameters())
        state = {f"buffer {name}": value for name, value in fn.named_buffers()}
    gradients = _gradients(found, tensors) if train else {}
    changed = {name: value for name, value in tensors.items() if name.startswith("input")}
    return {**found, **{f"{n} after": v for n, v in (changed | state).items()}, **gradients}


def _leaves(output: Any) -> list[tuple[str, Any]]:
    """Return the leaves of an output with their paths as names: "output[0]"."""
    leaves = pytree.tree_leaves_with_path(output)
    return [(f"output{pytree.keystr(path)}", leaf) for path, leaf in leaves]


def _parts(name: str, value: Any, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield the parts that an output is compared by: itself, or an object's tensors by path.

    An object without tensors is compared by its type.
    """
    if isinstance(value, _PLAIN) or not depth:
        yield name, value
        return
    kind = type(value)
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        inside = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    else:
        inside = [(f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
    parts = [part for label, item in inside for part in _parts(label, item, depth - 1)]
    tensors = [part for part in parts if isinstance(part[1], torch.Tensor)]
    yield from tensors or [(name, kind)]


def _gradients(outputs: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the gradients for random cotangents, the same in each run."""
    roots = [o for o in outputs.values() if isinstance(o, torch.Tensor) and o.requires_grad]
    leaves = {n: t for n, t in tensors.items() if t.requires_grad and t.is_leaf}
    if not roots or not leaves:
        raise RuntimeError("no output requires a gradient, so there is no backward to check")
    generator = torch.Generator().manual_seed(_SEED)
    cotangents = []
    for root in roots:
        # Rounded to bf16, so that every type holds them exactly.
        values = torch.randn(root.shape, generator=generator).to(torch.bfloat16)
        cotangents.append(values.to(root.device, root.dtype))
    found = torch.autograd.grad(roots, list(leaves.values()), cotangents, allow_unused=True)
    return {f"gradient of {name}": value for name, value in zip(leaves, found, strict=True)}


# -- the verdict ---------------------------------------------------------------------------------


def _result(name: str, eager: Any, ours: Any, exact: Any) -> Result:
    if not (isinstance(eager, torch.Tensor) and isinstance(ours, torch.Tensor)):
        same = type(eager) is type(ours) and bool(eager == ours)
        said = "" if same else f"{ours!r}, not {eager!r}"
        kind = eager if isinstance(eager, type) else type(eager)
        return Result(name, kind.__name__, (), None, None, said)
    eager, ours = eager.detach(), ours.detach()
    known = isinstance(exact, torch.Tensor) and exact.shape == eager.shape
    problem = disagreement([ours], [eager], (lambda: [exact.detach()]) if known else None)
    errors = [_distance(t, exact) if known else None for t in (eager, ours)]
    dtype = str(eager.dtype).removeprefix("torch.")
    return Result(
        name, dtype, tuple(eager.shape), errors[0], errors[1], (problem or "").removeprefix(_FIRST)
    )


def _distance(tensor: torch.Tensor, exact: torch.Tensor) -> float | None:
    """Return the largest distance of a finite element from the exact one; None if not floats."""
    if not tensor.is_floating_point() or tensor.shape != exact.shape:
        return None
    apart = (tensor.double() - exact.detach().double()).abs()
    finite = apart[apart.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _lines(comparison: Comparison, *, whole: bool) -> list[str]:
    results = comparison.results
    calls = 1 + max((result.call for result in results), default=0)
    few = whole or len(results) <= _FEW
    return [
        *wrapped(f"device {comparison.device}; errors are the largest distances from fp64"),
        "",
        *(_table(results, calls) if few else _summary(results)),
        "",
        *([] if few else _off(results, calls)),
        *([f"calls: {calls}, through {comparison._graphs()}", ""] if calls > 1 else []),
        *([*wrapped(_RANDOM), ""] if comparison.eager_random else []),
        *([*wrapped(_INEXACT), ""] if any(map(_lacks_errors, results)) else []),
        comparison._verdict(),
    ]


def _table(results: Sequence[Result], calls: int) -> list[str]:
    """Return a line for each tensor."""
    rows = [("", "type", "shape", "eager", "fusec", "")]
    rows += [
        (
            _called(result, calls),
            result.dtype,
            _shape(result),
            _number(result.eager_error),
            _number(result.fusec_error),
            result.problem or "agrees",
        )
        for result in results
    ]
    return fitted_table(rows, right=(3, 4), names=(0,), indent=2)


def _summary(results: Sequence[Result]) -> list[str]:
    """Return a line for each kind of tensors."""
    kinds = {"outputs": "output", "inputs, after": "input", "buffers, after": "buffer"}
    rows: list[tuple[str, ...]] = [("", "tensors", "eager", "fusec", "")]
    for title, first in {**kinds, "gradients": "gradient"}.items():
        alike = [result for result in results if result.name.startswith(first)]
        off = sum(bool(result.problem) for result in alike)
        ours = [r.fusec_error for r in alike if r.fusec_error is not None]
        theirs = [r.eager_error for r in alike if r.eager_error is not None]
        errors = (_number(max(some, default=None)) for some in (theirs, ours))
        if alike:
            rows.append((title, str(len(alike)), *errors, f"{off} off" if off else "agree"))
    return fitted_table(rows, right=(1, 2, 3), indent=2)


def _off(results: Sequence[Result], calls: int) -> list[str]:
    """Return the problem of each tensor that disagrees."""
    lines: list[str] = []
    for one in (result for result in results if result.problem):
        text = f"{_called(one, calls)} ({one.dtype} {_shape(one)}): {one.problem}"
        lines += wrapped(text, "  ", "      ")
    return [*lines, ""] if lines else []


def _called(result: Result, calls: int) -> str:
    return f"call {result.call}: {result.name}" if calls > 1 else result.name


def _shape(result: Result | InvariantResult) -> str:
    return "x".join(map(str, result.shape))


_RANDOM = "random numbers: eager's, for the model draws some (dropout, say), and fusec's are others"


_INEXACT = "no errors: the model does not run in fp64; such results are compared with eager's alone"


def _lacks_errors(result: Result) -> bool:
    """Return True for a tensor of floats without a result in fp64."""
    dtype = getattr(torch, result.dtype, None)
    floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return floats and result.eager_error is None


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"


# -- bits in batches of several sizes --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invariance(_Results[InvariantResult]):
    """The report of ``fusec check --invariant``."""

    def text(self, *, whole: bool = False) -> str:
        """Return the text; results are few, so that ``whole`` shows no more."""
        rows = [("", "type", "shape", "calls", "")]
        rows += [
            (one.name, one.dtype, _shape(one), str(one.calls), one.problem or "the same bits")
            for one in self.results
        ]
        what = f"the largest call beside all, on one thread and on several; {self._graphs()}"
        table = fitted_table(rows, right=(3,), names=(0,), indent=2)
        return "\n".join([*wrapped(what), "", *table, "", self._verdict()])


def check_invariance(
    fn: Callable[..., Any], *calls: Given, options: Mapping[str, Any] | None = None
) -> Invariance:
    """Call a compiled model with parts of the largest call's inputs, and compare bits.

    Args:
        calls: the inputs of each call; axes whose sizes differ from call to call are the batch's.
        options: of the compile, in addition to ``batch_invariant``.
    Raises:
        UsageError: if no size differs, or the model cannot be compiled for all sizes at once.
        ModelError: if the model itself fails with these inputs.
    """
    given = [Arguments.of(call) for call in calls]
    varying = _varying(given)
    number = max(range(len(given)), key=lambda k: sum(t.numel() for t in _tensors(given[k])))
    largest = given[number]
    made = {"strict": True, **(options or {}), "batch_invariant": True}
    compiled = torch.compile(_copy(fn), backend=fusec, fullgraph=True, options=made)
    graphs, before = counters["stats"]["unique_graphs"], torch.get_num_threads()
    threads = (1, max(2, before))
    found: dict[int, list[dict[str, torch.Tensor]]] = {}
    try:
        for count in threads:
            torch.set_num_threads(count)
            found[count] = [_run_part(fn, compiled, largest, call, varying) for call in given]
    finally:
        torch.set_num_threads(before)
    reference = found[threads[0]][number]
    results = [
        InvariantResult(
            name,
            str(whole.dtype).removeprefix("torch."),
            tuple(whole.shape),
            threads,
            len(given),
            _differs(whole, {n: [call[name] for call in found[n]] for n in threads}),
        )
        for name, whole in reference.items()
    ]
    return Invariance(tuple(results), counters["stats"]["unique_graphs"] - graphs)


def _tensors(call: Arguments) -> list[torch.Tensor]:
    return tensors_in((call.args, dict(call.named)))


def _varying(calls: Sequence[Arguments]) -> list[dict[int, str]]:
    """Return the axes of each input tensor whose sizes differ from call to call, with a name.

    Axes of the same sizes in each call have the same name.
    """
    shapes = [[tuple(t.shape) for t in _tensors(call)] for call in calls]
    found = [
        {
            axis: "sizes_" + "_".join(map(str, sizes))
            for axis, sizes in enumerate(zip(*each, strict=True))
            if len(set(sizes)) > 1
        }
        for each in zip(*shapes, strict=True)
    ]
    if not any(found):
        raise UsageError(
            "--invariant compares calls of several sizes: give those of the batch in --input, as "
            '"f32[1|2|33,64]".'
        )
    return found


def _run_part(
    fn: Callable[..., Any],
    compiled: Callable[..., Any],
    largest: Arguments,
    call: Arguments,
    varying: Sequence[Mapping[int, str]],
) -> dict[str, torch.Tensor]:
    """Return the results of a call of the shapes of ``call`` with the values of ``largest``."""
    shapes, axes = iter([t.shape for t in _tensors(call)]), iter(varying)

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = value[tuple(slice(extent) for extent in next(shapes))]
        own = own.clone(memory_format=torch.contiguous_format)
        for axis, name in next(axes).items():
            name_size(own, axis, name)
        return own

    inputs = largest.mapped(part)
    try:
        torch.manual_seed(_SEED)
        with torch.no_grad():
            output = compiled(*inputs.args, **inputs.named)
    except Exception:
        try:
            with torch.no_grad():
                inputs.call(_copy(fn))
        except Exception as error:
            raise ModelError.raised(error) from error
        raise
    tensors = ((at, leaf) for at, leaf in _leaves(output) if isinstance(leaf, torch.Tensor))
    return {name: tensor.detach().clone() for name, tensor in tensors}


def _differs(whole: torch.Tensor, found: Mapping[int, Sequence[torch.Tensor]]) -> str:
    """Return in which calls elements differ from those of the largest one, "" if in none."""
    for threads, results in found.items():
        for result in results:
            shape = "x".join(map(str, result.shape)) or "a single number"
            part = whole[tuple(slice(extent) for extent in result.shape)]
            if part.shape != result.shape:
                return f"{shape} is no part of it"
            off = int((_bits(part) != _bits(result)).any(1).sum())
            if off:
                return f"{off} of {result.numel()} differ at {shape}, with threads: {threads}"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, as a row."""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)
