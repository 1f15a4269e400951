"""Compare a model's results by fusec with eager's, both against fp64's.

The model runs three times on copies of the same random inputs, on this machine's GPU or else its
CPU: eagerly, eagerly in fp64, and compiled, where a failure inside fusec is an error. Outputs,
inputs and buffers after the call and, in training, gradients have to agree by the rule of
docs/numerics.md (``runtime/race/agreement.py``).

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "device": "cpu", "compiled": 1,
     "eager_random": true if the model draws random numbers,
     "results": [{"name", "dtype", "shape", "eager_error", "fusec_error", "problem", "call"}],
     "faults": [the name of each result with a problem]}

Where the model draws random numbers (dropout), the compiled one draws eager's, as fusec's own
differ. Objects other than tensors, such as a cache of keys and values, are compared by the tensors
in them.

Errors are the largest distance of an element from fp64's; null for results that are not floats.
``call`` counts from 0, ``compiled`` the graphs that Dynamo made for all calls together.

Worked example::

    >>> print(compare(torch.nn.LayerNorm(768), [torch.randn(8, 768)], train=True))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fusec.backend import fusec
from fusec.errors import ModelError
from fusec.runtime.race.agreement import disagreement
from fusec.tools.report.arguments import Arguments, Given, copied, plain
from fusec.tools.report.stages import this_device
from fusec.tools.terminal import fitted_table, wrapped
from fusec.tools.verify.choices import with_either_choice
from fusec.torch_interior import counters, pytree

SCHEMA = 1
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Types that are compared as they are; other objects are compared by their tensors."""
_FEW = 12
"""The most tensors with a line each; more have a line for each kind."""
_SEED = 7
_FIRST = "output 0: "
"""The prefix of ``disagreement`` for the first tensor."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """An output of some type that has no tensors in it."""

    type: str


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
class Comparison:
    """The report of ``fusec check``.

    Attributes:
        compiled: how many graphs Dynamo made for all calls together.
        draws: the model draws random numbers; the compiled one drew eager's.
    """

    device: str
    results: tuple[Result, ...]
    compiled: int = 1
    draws: bool = False

    @property
    def faults(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.problem)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        document = {
            "schema": SCHEMA,
            "device": self.device,
            "compiled": self.compiled,
            "eager_random": self.draws,
            "results": [asdict(result) for result in self.results],
            "faults": [result.name for result in self.faults],
        }
        return json.dumps(document, indent=indent)

    def text(self, *, whole: bool = False) -> str:
        """Return the text: of many tensors, the kinds and those that disagree; all if ``whole``."""
        return "\n".join(_lines(self, whole=whole))

    def __str__(self) -> str:
        return self.text()


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
    return Comparison(str(this_device()), results, graphs, draws)


# -- runs ----------------------------------------------------------------------------------------


def draws_numbers(fn: Callable[..., Any], inputs: Given, train: bool) -> bool:
    """Return True if a call of the model draws random numbers.

    Raises:
        ModelError: if the model itself fails.
    """
    args = Arguments.of(inputs).mapped(partial(_input, train=train, dtype=None))
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
        try:
            exact = _run(double, inputs, train, dtype=torch.float64)
        except Exception:  # an operation that has no fp64: results are then compared with eager's
            exact = {}
        yield eager, exact


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
    args = inputs.mapped(partial(_input, train=train, dtype=dtype))
    torch.manual_seed(_SEED)
    with torch.set_grad_enabled(train):
        output = args.call(fn if call is None else call)
    leaves = pytree.tree_leaves_with_path(output)
    found = {
        name: value
        for path, leaf in leaves
        for name, value in _parts(f"output{pytree.keystr(path)}", leaf)
    }
    tensors = {f"input {n}": a for n, a in args.labelled() if isinstance(a, torch.Tensor)}
    state: dict[str, torch.Tensor] = {}
    if isinstance(fn, nn.Module):
        tensors.update((f"parameter {name}", value) for name, value in fn.named_parameters())
        state = {f"buffer {name}": value for name, value in fn.named_buffers()}
    gradients = _gradients(found, tensors) if train else {}
    changed = {name: value for name, value in tensors.items() if name.startswith("input")}
    return {**found, **{f"{n} after": v for n, v in (changed | state).items()}, **gradients}


def _parts(name: str, value: Any, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield the parts that an output is compared by: itself, or an object's tensors by path."""
    if isinstance(value, _PLAIN) or not depth:
        yield name, value
        return
    match value:
        case dict():
            inside = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        case list() | tuple():
            inside = [(f"{name}[{number}]", item) for number, item in enumerate(value)]
        case _ if hasattr(value, "__dict__"):
            inside = [(f"{name}.{key}", item) for key, item in vars(value).items()]
        case _:
            inside = []
    parts = [part for label, item in inside for part in _parts(label, item, depth - 1)]
    tensors = [part for part in parts if isinstance(part[1], torch.Tensor)]
    yield from tensors or [(name, Opaque(type(value).__name__))]


def _input(value: Any, train: bool, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    own = plain(value).detach().clone()
    if not own.is_floating_point():
        return own
    return own.to(dtype or own.dtype).requires_grad_(train)


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
    if isinstance(eager, Opaque) and eager == ours:
        return Result(name, eager.type, (), None, None, "")
    if not (isinstance(eager, torch.Tensor) and isinstance(ours, torch.Tensor)):
        same = type(eager) is type(ours) and bool(eager == ours)
        said = "" if same else f"{ours!r}, not {eager!r}"
        return Result(name, type(eager).__name__, (), None, None, said)
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
    faults = len(comparison.faults)
    graphs = f"{comparison.compiled} graph{'s' * (comparison.compiled != 1)}"
    few = whole or len(results) <= _FEW
    return [
        *wrapped(f"device {comparison.device}; errors are the largest distances from fp64"),
        "",
        *(_table(results, calls) if few else _summary(results)),
        "",
        *([] if few else _off(results, calls)),
        *([f"calls: {calls}, through {graphs} of Dynamo", ""] if calls > 1 else []),
        *([*wrapped(_RANDOM), ""] if comparison.draws else []),
        f"faults: {faults or 'none'}",
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
    lines = []
    for result in results:
        if result.problem:
            lines += wrapped(
                f"{_called(result, calls)} ({result.dtype} {_shape(result)}): {result.problem}",
                "  ",
                "      ",
            )
    return [*lines, ""] if lines else []


def _called(result: Result, calls: int) -> str:
    return f"call {result.call}: {result.name}" if calls > 1 else result.name


def _shape(result: Result) -> str:
    return "x".join(map(str, result.shape))


_RANDOM = "random numbers: eager's, for the model draws some (dropout, say), and fusec's are others"


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.2g}"
