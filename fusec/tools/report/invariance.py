"""Test that a model's results do not depend on the size of its batch, bit by bit.

The model is compiled once, under ``batch_invariant``, and called with parts of the same random
inputs: with the first 1, 2 or 33 rows, say, of the axes that differ from call to call, on one
thread and on several. Each element of a result has to have the bits that the largest call gives.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "compiled": 1,
     "results": [{"name", "dtype", "shape", "threads", "calls", "problem"}],
     "faults": [the name of each result with a problem]}

Worked example::

    >>> print(check_invariance(block, [torch.randn(1, 64)], [torch.randn(33, 64)]))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fusec.backend import fusec
from fusec.errors import ModelError, UsageError
from fusec.frontend.named_sizes import name_size
from fusec.tools.report.arguments import Arguments, Given, copied
from fusec.tools.terminal import fitted_table, wrapped
from fusec.torch_interior import counters, pytree, tensors_in

SCHEMA = 1
_SEED = 7


@dataclass(frozen=True, slots=True)
class InvariantResult:
    """One result of all calls; ``problem`` is where bits differ, or empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    threads: tuple[int, ...]
    calls: int
    problem: str


@dataclass(frozen=True, slots=True)
class Invariance:
    """The report of ``fusec check --invariant``; ``compiled`` counts the graphs of Dynamo."""

    results: tuple[InvariantResult, ...]
    compiled: int = 1

    @property
    def faults(self) -> tuple[InvariantResult, ...]:
        return tuple(result for result in self.results if result.problem)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        document = {
            "schema": SCHEMA,
            "compiled": self.compiled,
            "results": [asdict(result) for result in self.results],
            "faults": [result.name for result in self.faults],
        }
        return json.dumps(document, indent=indent)

    def text(self, *, whole: bool = False) -> str:
        """Return the text; results are few, so that ``whole`` shows no more."""
        rows = [("", "type", "shape", "calls", "")]
        rows += [
            (
                result.name,
                result.dtype,
                "x".join(map(str, result.shape)),
                str(result.calls),
                result.problem or "the same bits",
            )
            for result in self.results
        ]
        graphs = f"{self.compiled} graph{'s' * (self.compiled != 1)}"
        return "\n".join(
            [
                *wrapped(
                    f"the largest call beside all, on one thread and on several; {graphs} of Dynamo"
                ),
                "",
                *fitted_table(rows, right=(3,), names=(0,), indent=2),
                "",
                f"faults: {len(self.faults) or 'none'}",
            ]
        )

    def __str__(self) -> str:
        return self.text()


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
    model = copied(fn) if isinstance(fn, nn.Module) else fn
    made = {"strict": True, **(options or {}), "batch_invariant": True}
    compiled = torch.compile(model, backend=fusec, fullgraph=True, options=made)
    graphs, before = counters["stats"]["unique_graphs"], torch.get_num_threads()
    threads = (1, max(2, before))
    found: dict[int, list[dict[str, torch.Tensor]]] = {}
    try:
        for count in threads:
            torch.set_num_threads(count)
            found[count] = [_run(fn, compiled, largest, call, varying) for call in given]
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
            _problem(whole, {n: [call[name] for call in found[n]] for n in threads}),
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


def _run(
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
    except Exception as error:
        with torch.no_grad():
            _raise_if_model_fails(fn, inputs)
        raise error
    leaves = pytree.tree_leaves_with_path(output)
    return {
        f"output{pytree.keystr(path)}": leaf.detach().clone()
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


def _raise_if_model_fails(fn: Callable[..., Any], inputs: Arguments) -> None:
    try:
        inputs.call(copied(fn) if isinstance(fn, nn.Module) else fn)
    except Exception as error:
        raise ModelError.raised(error) from error


def _problem(whole: torch.Tensor, found: Mapping[int, Sequence[torch.Tensor]]) -> str:
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
