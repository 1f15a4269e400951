"""The contract of a compile: the record that ``fusec lock`` writes and ``--check`` reads.

It has no timings, and of the machine only the width of its vectors, which kernels depend on.
Kernels and eager kernels of repeated layers are one entry, with their number; they are identified
by what they compute and by the user's lines, never by a number. ``lock_file.py`` has the format of
the file, and ``lock_changes.py`` describes what changed between two of them.

What a launch computes are its parts: the program's operations, each with its module and its line. A
kernel's parts are the nodes of the traced graph between its loads and its stores, inlined ones
included. Views are no parts: they are indices. A node's operation is the one that the program
calls, so that all nodes of its decomposition are one part.

Worked example: ``self.ln_2(x + r)`` in a layer is ``add`` and ``layer_norm of h.*.ln_2``, both
``at model.py:41 in forward: y = self.ln_2(x + r)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any, TypeVar, get_args

from torch import fx

from fusec.codegen.targets import CPP, Target, find_target
from fusec.driver.compiler import allows_tf32
from fusec.errors import UsageError
from fusec.frontend.modules import node_of_part
from fusec.frontend.origin import called, module_path, op_name, origin_of
from fusec.ir.decision import Decision
from fusec.ir.expr import Reduce, postorder, reach
from fusec.ir.graph import Extern, ForeachKernel, Kernel, all_launches, launched_externs
from fusec.ir.names import identifier, operation_words
from fusec.passes.fusion.libraries import ATEN
from fusec.passes.schedule.plan import Binding, LoopKind, Plan, print_binding
from fusec.processors import Bf16
from fusec.tools.report.explanation import GraphReport, axes_of_additions, report_graph
from fusec.tools.report.stages import Staged
from fusec.tools.report.traffic import extern_bytes, peak_bytes, step_bytes
from fusec.tools.terminal import alike

# -- what a launch computes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One operation of the program.

    Attributes:
        op: its usual name: "layer_norm".
        module: that it belongs to, without numbers: "h.*.ln_2"; "" for the model itself.
        line: the user's, "model.py:41 in forward: ..."; "" where none is known.
    """

    op: str
    module: str = ""
    line: str = ""

    @property
    def code(self) -> str:
        """The line without its number, which changes with the lines above it."""
        return without_number(self.line)

    @property
    def place(self) -> tuple[str, str]:
        """The operation and the module, which stay when the line is rewritten."""
        return self.op, self.module


def without_number(line: str) -> str:
    """Return "model.py in forward: ..." for "model.py:41 in forward: ..."."""
    place, where, code = line.partition(" in ")
    file, _, number = place.rpartition(":")
    return f"{file}{where}{code}" if number.isdigit() else line


class Program:
    """The nodes of a traced graph, by the names of their buffers."""

    def __init__(self, graph: fx.Graph, calls: Iterable[str]) -> None:
        """Args: calls: the nodes that run as eager kernels, at which a kernel ends."""
        self._nodes: dict[str, fx.Node] = {identifier(n.name): n for n in graph.nodes}
        self._number = {node: k for k, node in enumerate(graph.nodes)}
        self._calls = frozenset(calls)

    def part(self, name: str, op: str) -> Part:
        """Return the part of an eager kernel's node; only ``op`` if the graph has no such node."""
        node = self._nodes.get(identifier(name))
        return Part(op) if node is None else _part_of(node, _word(node))

    def parts(self, launch: Kernel | ForeachKernel) -> tuple[Part, ...]:
        """Return the parts of a kernel, in the order of the program."""
        words = operation_words(launch.origin.ops)
        reached = sorted(self._between(launch), key=self._number.__getitem__)
        parts = [_part_of(node, word) for node in reached if (word := _word(node)) in words]
        found = tuple(dict.fromkeys(parts))
        return found or tuple(map(Part, words))

    def _between(self, launch: Kernel | ForeachKernel) -> set[fx.Node]:
        """Return the nodes between the loads and the stores of a launch."""
        read = {b.name for b in launch.reads} - {b.name for b in launch.writes}
        ends = {node_of_part(self._nodes, name) for name in read}

        def is_inside(node: fx.Node) -> bool:
            is_end = identifier(node.name) in read or node.name in self._calls
            return node.op == "call_function" and not is_end

        def inside(node: fx.Node) -> list[fx.Node]:
            return [] if node in ends else list(filter(is_inside, node.all_input_nodes))

        names = [b.name for b in launch.writes]
        stored = [self._nodes.get(name) or node_of_part(self._nodes, name) for name in names]
        return set(reach(filter(is_inside, filter(None, stored)), inside))


def without_layer(module: str) -> str:
    """Return "h.*.mlp" for "h.3.mlp": a contract is the same for any number of layers."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _part_of(node: fx.Node, op: str) -> Part:
    lines = origin_of(node).source
    return Part(op, without_layer(module_path(node)), lines[0] if lines else "")


def _word(node: Any) -> str:
    return operation_words([op_name(called(node))])[0]


def title(parts: Iterable[Part]) -> str:
    """Return the joint name of some parts: "add + layer_norm"."""
    return " + ".join(dict.fromkeys(part.op for part in parts)) or "kernel"


# -- the record ------------------------------------------------------------------------------------


_Entry = TypeVar("_Entry", "LockedKernel", "LockedCall")


@dataclass(frozen=True, slots=True)
class LockedKernel:
    """One kernel, or several equal ones.

    Attributes:
        parts: what it computes.
        bytes: that one of them reads and writes.
        sums: the order of its sums: axes and parts, "768 as lanes(1024), warps 1"; "2048 as
            grid*64, added in any order" for parts that programs add to memory.
        members: how many kernels of one form a launch runs.
        times: how many equal kernels there are.
        buffers: that it defines, to find the decisions about it; not in the file.
    """

    parts: tuple[Part, ...]
    bytes: int
    sums: str = ""
    members: int = 1
    times: int = 1
    buffers: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def title(self) -> str:
        return title(self.parts)


@dataclass(frozen=True, slots=True)
class LockedCall:
    """One eager kernel, or several equal ones.

    Attributes:
        op: the operation that is called, "sort.stable".
        library: that computes it.
        reason: why it is not lowered.
    """

    op: str
    part: Part
    library: str
    reason: str
    bytes: int
    times: int = 1
    buffers: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.part,)

    @property
    def title(self) -> str:
        return self.op


@dataclass(frozen=True, slots=True)
class LockedGraph:
    """One compiled graph.

    Attributes:
        peak: the most bytes that it has allocated at once, without its inputs.
        loops: its loops over rows, "4096 rows by 512".
        decisions: merges that were rejected; not in the file.
    """

    name: str
    launches: int
    bytes: int
    peak: int
    kernels: tuple[LockedKernel, ...]
    calls: tuple[LockedCall, ...]
    loops: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = field(default=(), compare=False)

    @property
    def entries(self) -> tuple[LockedKernel | LockedCall, ...]:
        """Kernels, then eager kernels."""
        return (*self.kernels, *self.calls)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice, and the candidate that it took (``lock_file.py``)."""

    choice: str
    candidate: str


@dataclass(frozen=True, slots=True)
class Lock:
    """The whole file.

    Attributes:
        made_by: versions of fusec and torch, which explain a difference, but count as none.
        asked: the model, inputs and options of the command line.
        target: as by ``describe_target``.
        choices: in order.
    """

    made_by: str
    asked: tuple[str, ...]
    target: str
    graphs: tuple[LockedGraph, ...]
    choices: tuple[Chosen, ...] = ()


def make_lock(
    made_by: str,
    asked: tuple[str, ...],
    target: Target,
    staged: Sequence[Staged],
    choices: Iterable[tuple[str, str]],
) -> Lock:
    """Return the record of a compile."""
    graphs = tuple(map(lock_graph, staged))
    made = tuple(starmap(Chosen, choices))
    return Lock(made_by, asked, describe_target(target), graphs, made)


def describe_target(target: Target) -> str:
    """Return a target with what its kernels depend on: "cpu, 16 lanes, 2 threads", "sm_90"."""
    facts = [target.name]
    if target.codegen is CPP:
        facts += [f"{target.machine.vector} lanes"]
        facts += [target.machine.bf16] * (target.machine.bf16 != "widened")
        facts += [f"{target.machine.threads} threads"] * (target.machine.threads > 1)
    else:
        facts += ["tf32"] * target.machine.sm.tf32
    return ", ".join(facts)


def read_target(described: str) -> Target:
    """Return the target that a text describes; TF32 is by torch's current settings.

    Raises:
        UsageError: if there is no such target, or it does not have these facts.
    """
    name, *facts = described.split(", ")
    widths = [width for width in _WIDTHS if f"{width} lanes" in facts]
    numbers = [fact.removesuffix(" threads") for fact in facts if fact.endswith(" threads")]
    counts = [int(number) for number in numbers if number.isdecimal()]
    found = find_target(
        name,
        widths[0] if widths else 16,
        bf16=next((how for how in get_args(Bf16) if how in facts), "widened"),
        threads=counts[0] if counts else 1,
        tf32=allows_tf32(),
    )
    if {*describe_target(found).split(", ")} - {"tf32"} != {name, *facts} - {"tf32"}:
        raise UsageError(f"the lock's target {described!r} is none that this fusec knows.")
    return found


_WIDTHS = (16, 8, 4)
"""Lanes of f32 of a CPU's vectors."""


def lock_graph(staged: Staged) -> LockedGraph:
    """Return the record of one graph.

    Raises:
        Exception: what stopped its compile.
    """
    report = report_graph(staged)
    loops = tuple(f"{loop.rows} rows by {loop.chunk}" for loop in report.loops)
    rejected = tuple(d for d in report.decisions if not d.taken)
    numbers = (report.name, report.launches, report.bytes_moved)
    if staged.compiled is None:
        return LockedGraph(*numbers, 0, (), _eager_calls(report))
    schedule = staged.compiled.schedule
    calls = launched_externs(schedule)
    program = Program(staged.observed.graph.graph, [call.node for call in calls])
    kernels = [_kernel(launch, program, staged) for launch in all_launches(schedule)]
    peak = peak_bytes(staged.compiled.host)
    called = _folded([_call(call, program) for call in calls])
    return LockedGraph(*numbers, peak, _folded(kernels), called, loops, rejected)


def _eager_calls(report: GraphReport) -> tuple[LockedCall, ...]:
    """Return the calls of a graph of which nothing was lowered."""
    return _folded(
        [
            LockedCall(e.op, Part(e.op, without_layer(e.module)), ATEN, e.reason, e.bytes)
            for e in report.externs
        ]
    )


def _kernel(launch: Kernel | ForeachKernel, program: Program, staged: Staged) -> LockedKernel:
    assert staged.compiled is not None
    made = frozenset(b.name for k in launch.kernels for b in (*k.defs, *k.writes))
    moved = step_bytes(launch, staged.target.machine)
    sums = _order_of_sums(launch, staged.compiled.plans[launch.name])
    return LockedKernel(program.parts(launch), moved, sums, len(launch.kernels), buffers=made)


def _order_of_sums(launch: Kernel | ForeachKernel, plan: Plan) -> str:
    """Return how the axes outside of the grid run, and the warps; "" if no axis is reduced.

    Of the grid, axes along which programs add to memory. A symbolic extent is "any": its name
    depends on names in the program.

    The order of a sum's terms depends on lanes, tiles and parts.
    """
    values = [store.expr for kernel in launch.kernels for store in kernel.stores]
    if not any(isinstance(node, Reduce) for node in postorder(values)):
        return ""
    added = axes_of_additions(launch.kernels, plan)
    axes = [
        _extent(b) + " as " + print_binding(b) + ", added in any order" * (b.axis in added)
        for b in plan.bindings
        if b.kind is not LoopKind.GRID or b.axis in added
    ]
    return ", ".join(axes + [f"warps {plan.warps}"] * (plan.warps > 0))


def _extent(binding: Binding) -> str:
    extent = binding.axis.extent
    return str(extent) if extent.is_constant else "any"


def _call(call: Extern, program: Program) -> LockedCall:
    op = call.title.removesuffix(".default")
    part, made = program.part(call.node, op), frozenset(b.name for b in call.writes)
    return LockedCall(op, part, call.library or ATEN, call.reason, extern_bytes(call), buffers=made)


def _folded(entries: Sequence[_Entry]) -> tuple[_Entry, ...]:
    """Return equal entries as one with their number, in order."""
    return tuple(
        replace(some[0], times=len(some), buffers=frozenset().union(*(one.buffers for one in some)))
        for some in alike(entries, lambda entry: entry)
    )
