"""Emulate a model on a GPU: run every kernel in the emulator, and compare results with eager's.

The model is compiled for a GPU and bound on the CPU: its wrapper runs as it is, eager kernels are
PyTorch's on the CPU, and each launch is emulated (``fusec/tools/emulator``), so that what one
kernel stores the next one reads. After each launch its results are compared with eager's, computed
from the values that the program itself has stored (``fusec/tools/verify``); in the end all results
of the call are compared, by the rule of docs/numerics.md. The first fault ends the run.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "target": "sm_90",
     "kernels": [{"graph", "name", "launches", "instructions", "fault", "problem", "explained",
                  "touched"}],
     "results": [as of ``report.comparison``], "faults": [each fault or problem as text]}

Worked example::

    >>> print(emulate(torch.nn.LayerNorm(64), [torch.randn(8, 64)], train=True))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fusec.codegen.targets import Target, find_target
from fusec.driver.backend import compile_with
from fusec.driver.build import triton_source
from fusec.driver.compiler import allows_tf32
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, compile_to_source
from fusec.driver.trace import Trace
from fusec.errors import Unsupported, WrongKernel
from fusec.ir.graph import all_launches
from fusec.ir.machine import Machine
from fusec.options import Options
from fusec.passes.traffic import work_of
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.calls.ranges import Ranges
from fusec.tools.emulator.faults import EmulationError
from fusec.tools.emulator.launch import EmulatedKernel, EmulatedTable, emulated
from fusec.tools.report.arguments import Given
from fusec.tools.report.comparison import Comparison, compare, draws_numbers
from fusec.tools.terminal import Report, fitted_table, wrapped
from fusec.tools.verify.kernels import Verification


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel of a graph.

    Attributes:
        instructions: of warps, in all launches.
        fault: what the emulator found, or "".
        problem: how its results differ from eager's, or "".
        explained: bytes of all launches by the account of ``passes/fusion/footprint.py``, by which
            fusion decides and which ``explain`` shows.
        touched: bytes that they loaded, and bytes that they stored, each once a launch.
    """

    graph: str
    name: str
    launches: int
    instructions: int
    fault: str
    problem: str
    explained: int
    touched: int


@dataclass(frozen=True, slots=True)
class Emulation(Report):
    """The report of ``fusec check --emulate``.

    Attributes:
        comparison: of the results; None where a fault ended the run, and where the model draws
            random numbers: fusec's differ from eager's, so its kernels alone are compared.
    """

    target: str
    kernels: tuple[KernelRow, ...]
    comparison: Comparison | None

    @property
    def faults(self) -> tuple[str, ...]:
        """All problems, as text: faults, kernels that disagree, results that disagree."""
        found = [text for row in self.kernels for text in (row.fault, row.problem) if text]
        wrong = () if self.comparison is None else self.comparison.faults
        return (*found, *(f"{result.name}: {result.problem}" for result in wrong))

    def to_dict(self) -> dict[str, Any]:
        results = () if self.comparison is None else self.comparison.results
        return {
            "target": self.target,
            "kernels": [asdict(row) for row in self.kernels],
            "results": [asdict(result) for result in results],
            "faults": list(self.faults),
        }

    def text(self, *, whole: bool = False) -> str:
        return "\n".join(_lines(self, whole=whole))


def emulate(
    fn: Callable[..., Any],
    *calls: Given,
    train: bool = False,
    dynamic: bool = False,
    target: str = "sm_90",
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Emulation:
    """Run a module or function eagerly, in fp64 and emulated, and return the report.

    Args:
        calls: the inputs of each call, on the CPU; small, for a GPU is 10^5 times as fast.
        target: a GPU whose PTX the emulator knows, of ``EMULATED``.
        seed: of the order in which warps run.
    Raises:
        ModelError: if the model itself fails with these inputs.
        UnknownPtx: for an instruction that the emulator does not know.
    """
    run = Emulator.of(target, {"verify": True, **(options or {})}, seed)
    comparison = None
    try:
        comparison = compare(fn, *calls, train=train, dynamic=dynamic, backend=run.backend)
        comparison = replace(comparison, device=f"{target}, emulated")
        if draws_numbers(fn, calls[0], train):
            comparison = None
    except (EmulationError, WrongKernel):  # the kernel's row has the message
        pass
    rows = tuple(one.row() for one in run.kernels)
    return Emulation(target, rows, comparison)


@dataclass(slots=True)
class _Watched:
    """An emulated kernel in a graph: its launches, and the fault or problem of one of them.

    Attributes:
        bytes: of a launch, as explained; the mean of those that run this code.
    """

    graph: str
    name: str
    kernel: EmulatedKernel | EmulatedTable
    bytes: float
    launches: int = 0
    fault: str = ""
    problem: str = ""

    def __call__(self, *args: Any) -> None:
        self.launches += 1
        try:
            self.kernel(*args)
        except EmulationError as error:
            self.fault = str(error)
            raise

    def row(self) -> KernelRow:
        counts = self.kernel.counts
        return KernelRow(
            self.graph,
            self.name,
            self.launches,
            counts.instructions,
            self.fault,
            self.problem,
            round(self.bytes * self.launches),
            counts.distinct_loaded + counts.distinct_stored,
        )


@dataclass(slots=True)
class Emulator:
    """A ``torch.compile`` backend, and the kernels of all graphs that it compiled."""

    target: Target
    options: Options
    seed: int
    kernels: list[_Watched] = field(default_factory=list)

    @staticmethod
    def of(target: str, options: Mapping[str, Any], seed: int = 0) -> Emulator:
        """Return the backend for a GPU; options are those of the compile."""
        chosen = Options.from_compile(None, {"strict": True, **options})
        return Emulator(find_target(target, tf32=allows_tf32()), chosen, seed)

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return compile_with(gm, inputs, self.compile_one, self.context("joint"))

    def context(self, name: str) -> CompileContext:
        return CompileContext(self.target, self.options, Trace(name))

    def compile_one(
        self, graph: fx.GraphModule, _: Sequence[Any], *, name: str
    ) -> Callable[[list[Any]], Any]:
        try:
            compiled = compile_to_source(graph, self.context(name))
        except Unsupported:
            call: Callable[[list[Any]], Any] = lambda args: graph(*args)  # noqa: E731
        else:
            codes = {
                code: _Watched(
                    name,
                    code,
                    emulated(triton_source(compiled, code), self.seed, self.target.name),
                    _bytes_of(compiled, code, self.target.machine),
                )
                for code in compiled.distinct
            }
            self.kernels += codes.values()
            kernels = {kernel: codes[code] for kernel, code in compiled.code.items()}
            call = self._bound(graph, name, compiled, kernels)

        def boxed(args: list[Any]) -> Any:
            return call(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def _bound(
        self, graph: fx.GraphModule, name: str, compiled: Compiled, kernels: Mapping[str, _Watched]
    ) -> Callable[[list[Any]], Any]:
        verification = Verification(graph, name, strict=True)

        def stored(kernel: str | None, held: Any, tensors: Any) -> None:
            try:
                verification.stored(kernel, held, tensors)
            except WrongKernel as error:
                kernels[str(kernel)].problem = str(error)
                raise

        cpu, ranges = torch.device("cpu"), Ranges(name, compiled.statements(), dict)
        hooks = replace(verification.hooks(), stored=stored)
        return executable.bind(compiled.wrapper, kernels, of_graph(graph), cpu, ranges, [hooks])


def _bytes_of(compiled: Compiled, code: str, machine: Machine) -> float:
    """Return the mean bytes, as explained, of the kernels that run one code."""
    found = [
        work_of(launch, machine).bytes
        for launch in all_launches(compiled.schedule)
        if compiled.code[launch.name] == code
    ]
    return sum(found) / len(found)


_DRAWN = (
    "results: not compared, for the model draws random numbers (dropout, say), and fusec's are "
    "others than eager's; each kernel was compared with its part of the graph"
)


def _lines(emulation: Emulation, *, whole: bool) -> Iterator[str]:
    rows = [("", "graph", "launches", "warp instructions", "faults", "values")]
    rows += [
        (
            row.name,
            row.graph,
            str(row.launches),
            f"{row.instructions:,}",
            "a fault" if row.fault else "none",
            "off" if row.problem else "agree" if row.launches and not row.fault else "",
        )
        for row in emulation.kernels
    ]
    yield from (f"target {emulation.target}, emulated", "")
    yield from fitted_table(rows, right=(2, 3), names=(0,), indent=2)
    for row in emulation.kernels:
        for problem in filter(None, (row.fault, row.problem)):
            yield from ("", problem)
    yield ""
    if emulation.comparison is not None:
        yield emulation.comparison.text(whole=whole)
    elif emulation.faults:
        yield "faults: 1; the run ended there"
    else:
        yield from (*wrapped(_DRAWN), "", "faults: none")
