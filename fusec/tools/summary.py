"""Report each compile: a line of the log, and artifacts in torch's trace.

``TORCH_LOGS=fusec`` prints one line for each graph, ``TORCH_LOGS=output_code`` its code. The
artifact ``fusec_graph``, the JSON form of a ``GraphSummary``, is what ``TORCH_TRACE`` writes for
``tlparse``, and what ``fusec run`` and ``fusec.watch`` read. ``import fusec.backend`` puts the
observer that writes this in the compiler's list; without a listener it looks at no compile.

The multiply-adds of an eager kernel are counted by torch's FLOP formulas: ``mm`` of f32[8, 64] and
f32[64, 32] does ``{"f32": 8 * 64 * 32}``.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from fusec.driver.launches import computes, described_launches, launch_modules
from fusec.driver.observers import OBSERVERS, CompileHooks, Observer
from fusec.driver.pipeline import Compiled
from fusec.driver.trace import Trace
from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.frontend.modules import calling, module_kinds, stored_nodes
from fusec.frontend.origin import origin_of
from fusec.frontend.shapes import from_torch_dtype
from fusec.frontend.size_facts import UNSEEN
from fusec.ir.names import identifier, operation_words
from fusec.ir.text import print_schedule
from fusec.options import Options
from fusec.runtime.from_json import read
from fusec.torch_interior import (
    OpOverload,
    code_log,
    compile_id,
    prints_code,
    pytree,
    trace_artifact,
    traces,
    traces_code,
)

# -- the products in an eager kernel ---------------------------------------------------------------


aten = torch.ops.aten
_ALIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operations without a FLOP formula -> operations with the same count."""


def multiplied(node: fx.Node) -> dict[str, int]:
    """Return operand type -> multiply-adds of a node's call, at the hints of symbolic sizes.

    Masked scores of an attention count, too. Empty for an operation without a formula.
    """
    # Local: it imports Triton, which takes 0.2 s.
    from torch.utils.flop_counter import flop_registry

    if not isinstance(node.target, OpOverload):
        return {}
    packet = node.target.overloadpacket
    formula = flop_registry.get(_ALIKE.get(packet, packet))
    operands = [a.meta.get("val") for a in node.all_input_nodes]
    kinds = [from_torch_dtype(o.dtype).name for o in operands if isinstance(o, torch.Tensor)]
    if formula is None or not kinds:
        return {}
    args, kwargs, out = fx.map_arg((node.args, dict(node.kwargs), node), lambda n: n.meta["val"])
    shapes: Any = pytree.tree_map_only(
        torch.Tensor, lambda t: tuple(hint_of(n, UNSEEN) for n in t.shape), (args, kwargs, out)
    )
    return {kinds[0]: int(formula(*shapes[0], **shapes[1], out_val=shapes[2])) // 2}


# -- summaries -------------------------------------------------------------------------------------


logger = logging.getLogger("fusec.compile")

ARTIFACT = "fusec_graph"
"""The name of a graph's summary in torch's trace."""
_SHOWN_EXTERNS = 3


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """A kernel: the ATen operations in it, the module and the user's lines that it computes.

    Attributes:
        code: the first kernel of the same code, which is launched in its place.
        bytes: the bytes that it reads and writes.
        multiplied: multiply-adds of matrix products by the type of their operands.
        us: its time by the cost model.
    """

    name: str
    code: str
    ops: tuple[str, ...]
    module: str
    source: tuple[str, ...]
    bytes: int = 0
    multiplied: Mapping[str, int] = field(default_factory=dict)
    us: float | None = None

    @property
    def computes(self) -> str:
        """What it computes: "add + layer_norm"."""
        return computes(self.ops)


@dataclass(frozen=True, slots=True)
class ExternSummary:
    """An eager kernel's call, and why it is not lowered; other fields as in ``KernelSummary``."""

    name: str
    op: str
    reason: str
    module: str
    source: tuple[str, ...]
    bytes: int = 0
    multiplied: Mapping[str, int] = field(default_factory=dict)
    us: float | None = None

    @property
    def computes(self) -> str:
        """What it computes: "mm, eager"."""
        return f"{operation_words((self.op,))[0]}, eager"


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """One compiled graph.

    Attributes:
        compile: Dynamo's number of the compile, "0/1"; "" where Dynamo runs none.
        name: "forward", "backward", "inference".
        problem: why the graph runs as eager kernels, or "".
        seconds: stage -> wall seconds.
        modules: path -> class, of the modules that its nodes are in.
        called: the module that was called when it was compiled: "h.3 (Block)"; of a backward "".
        reason: where the problem is that something is unsupported, what; else "".
        outside: what PyTorch runs outside of compiled graphs, as the trace says; "" of a graph.
    """

    compile: str
    name: str
    target: str
    cached: bool
    problem: str
    kernels: tuple[KernelSummary, ...]
    externs: tuple[ExternSummary, ...]
    seconds: Mapping[str, float]
    modules: Mapping[str, str] = field(default_factory=dict)
    called: str = ""
    reason: str = ""
    outside: str = ""

    @property
    def id(self) -> str:
        """Its identifier among the process's graphs: name and number of the compile."""
        return f"{self.name} {self.compile}".rstrip()

    @property
    def launches(self) -> tuple[KernelSummary | ExternSummary, ...]:
        """Kernels, then eager kernels."""
        return (*self.kernels, *self.externs)

    @property
    def total_seconds(self) -> float:
        """Wall seconds of the compile, without what Dynamo and AOTAutograd take."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        number = f" [{self.compile}]" if self.compile else ""
        if self.problem:
            return f"graph {self.name}{number}: eager kernels alone: {self.problem}"
        spent = f"{self.total_seconds:.2f} s" + ", from the cache" * self.cached
        return f"graph {self.name}{number} for {self.target}: {self._launches()}, {spent}"

    def _launches(self) -> str:
        kernels = f"{len(self.kernels)} kernel{'s' * (len(self.kernels) != 1)}"
        if not self.externs:
            return kernels
        counted = Counter(extern.op for extern in self.externs).most_common()
        shown = [f"{n} x {op}" for op, n in counted[:_SHOWN_EXTERNS]]
        more = ["..."] * (len(counted) > _SHOWN_EXTERNS)
        return f"{kernels}, {len(self.externs)} eager ({', '.join(shown + more)})"

    def to_json(self) -> str:
        """Return the summary as JSON, which ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GraphSummary:
        """Return the summary that an artifact holds."""
        found: GraphSummary = read(cls, json.loads(text), "a graph")
        return found


class Announcer(Observer):
    """Writes compiles and their code to the log and torch's trace, if these are on."""

    def looks(self, options: Options) -> bool:
        return logger.isEnabledFor(logging.INFO) or prints_code() or traces()

    def watch_compile(self, options: Options, trace: Trace) -> CompileHooks | None:
        if not (prints_code() or traces_code()):
            return None
        return CompileHooks(partial(self._tell_code, trace.name), anew=prints_code())

    def _tell_code(self, name: str, compiled: Compiled) -> None:
        code, schedule = partial(_code, compiled), compiled.schedule
        if prints_code():
            code_log.debug("graph %s%s:\n%s", name, f" [{compile_id()}]", code())
        trace_artifact(f"fusec_{name}_kernels", partial(print_schedule, schedule))
        trace_artifact(f"fusec_{name}_code", code)
        trace_artifact(
            f"fusec_{name}_decisions",
            lambda: json.dumps([asdict(decision) for decision in compiled.decisions], indent=1),
            json=True,
        )

    def compiled(self, gm: fx.GraphModule, options: Options, trace: Trace) -> None:
        summary = summarize(gm, trace)
        logger.info("%s", summary)
        trace_artifact(ARTIFACT, summary.to_json, json=True)

    def kept(self, part: fx.GraphModule, options: Options, trace: Trace) -> None:
        self.compiled(part, options, trace)


OBSERVERS.append(Announcer())


def _code(compiled: Compiled) -> str:
    """Return everything that was generated for a graph: its kernels and the wrapper around them."""
    return "\n\n".join([*(compiled.sources[k] for k in compiled.distinct), compiled.wrapper])


def summarize(gm: fx.GraphModule, trace: Trace) -> GraphSummary:
    """Return the summary of a compile, with the lines and modules of this graph."""
    kernels, externs = described_launches(trace.manifest)
    modules = launch_modules(gm, kernels, externs)
    nodes = {node.name: node for node in gm.graph.nodes}
    named = {identifier(name): node for name, node in nodes.items()}
    return GraphSummary(
        compile_id(),
        trace.name,
        trace.target,
        trace.cached,
        trace.problem or "",
        tuple(
            KernelSummary(
                row["name"],
                row["code"],
                tuple(row["ops"]),
                modules[row["name"]],
                _lines(stored_nodes(named, row["nodes"])),
                **row["work"],
            )
            for row in kernels
        ),
        tuple(_extern(row, modules[row["node"]], nodes.get(row["node"])) for row in externs),
        dict(trace.wall_seconds),
        module_kinds(gm),
        calling(),
        trace.reason,
        trace.outside,
    )


def _extern(row: Any, module: str, node: fx.Node | None) -> ExternSummary:
    # The schedule does not know the products in an eager kernel.
    work = row["work"] | ({} if node is None else {"multiplied": multiplied(node)})
    lines = _lines([] if node is None else [node])
    return ExternSummary(row["node"], row["op"], row["reason"], module, lines, **work)


def _lines(known: Sequence[fx.Node]) -> tuple[str, ...]:
    """Return the user's lines of some nodes."""
    return tuple(dict.fromkeys(line for node in known for line in origin_of(node).source))
