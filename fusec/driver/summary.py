"""Report one compile: a line of the log, and an artifact in torch's trace.

``TORCH_LOGS=fusec`` prints one line for each graph, ``TORCH_LOGS=output_code`` its code. The
artifact ``fusec_graph``, the JSON form of a ``GraphSummary``, is what ``TORCH_TRACE`` writes for
``tlparse``, and what ``fusec run`` and ``fusec.watch`` read. Without a listener none of this is
computed.

An entry of the cache holds the part that depends on the code alone (``facts``); lines and modules
are those of the current graph, which may be another one with the same code.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from fusec.driver.trace import Trace
from fusec.frontend.modules import calling, kernel_modules, module_kinds, stored_nodes
from fusec.frontend.multiplied import multiplied
from fusec.frontend.origin import module_path, origin_of
from fusec.ir.decision import Decision
from fusec.ir.extern import Extern
from fusec.ir.graph import ForeachKernel, Kernel, RowLoop, Schedule, all_launches
from fusec.ir.names import SHOWN_OPERATIONS, identifier, operation_words
from fusec.torch_interior import artifact_logger, compile_id, trace_artifact, traces

logger = logging.getLogger("fusec.compile")
code_logger = artifact_logger("torch.fusec", "output_code")
"""A child of ``torch``, whose handler prints the artifacts that TORCH_LOGS names."""

ARTIFACT = "fusec_graph"
"""The name of a graph's summary in torch's trace."""
_SHOWN_EXTERNS = 3
_UNESCAPED = str.maketrans('"\\', "'/")
"""Torch does not escape names in a Chrome trace: these would end a name, and the JSON."""


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
        words = list(operation_words(self.ops))
        return " + ".join(words[:SHOWN_OPERATIONS] + ["..."] * (len(words) > SHOWN_OPERATIONS))


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

    @property
    def id(self) -> str:
        """Its identifier among the process's graphs: name and number of the compile."""
        return f"{self.name} {self.compile}".rstrip()

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
        found = json.loads(text)
        kinds: dict[str, Any] = {"kernels": KernelSummary, "externs": ExternSummary}
        for rows, kind in kinds.items():
            made = []
            for row in found[rows]:
                lists = {name: tuple(v) for name, v in row.items() if isinstance(v, list)}
                made.append(kind(**row | lists))
            found[rows] = tuple(made)
        return cls(**found)


def graph_id(name: str) -> str:
    """Return the ``GraphSummary.id`` of a graph that is compiled now."""
    return f"{name} {compile_id()}".rstrip()


def facts(
    schedule: Schedule,
    code: Mapping[str, str],
    work: Mapping[Kernel | ForeachKernel | Extern, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the part of a summary that depends on the code alone, as JSON of a cache entry.

    Args:
        code: kernel name -> the name of the first one of the same code.
        work: the cost of each launch (``passes/traffic.py``).
    """
    return {
        "kernels": [
            {
                "name": launch.name,
                "code": code.get(launch.name, launch.name),
                "ops": list(launch.origin.ops),
                "nodes": list(dict.fromkeys(b.name for b in launch.writes)),
                "work": work[launch],
            }
            for launch in all_launches(schedule)
        ],
        "externs": [
            {
                "node": extern.node,
                "op": extern.title,
                "reason": extern.reason,
                "work": work[extern],
            }
            for extern in launched_externs(schedule)
        ],
    }


def launched_externs(schedule: Schedule) -> list[Extern]:
    """Return the calls of eager kernels, those inside loops over rows included."""
    found: list[Extern] = []
    for step in schedule.steps:
        match step:
            case RowLoop():
                found.extend(launched_externs(step.schedule))
            case Extern() if step.is_launch:
                found.append(step)
    return found


def has_listeners() -> bool:
    """Return True if the log or torch's trace records compiles."""
    return logger.isEnabledFor(logging.INFO) or traces()


def announce(gm: fx.GraphModule, trace: Trace) -> None:
    """Write a finished compile to the log and torch's trace, if these are on."""
    if not has_listeners():
        return
    summary = summarize(gm, trace)
    logger.info("%s", summary)
    trace_artifact(ARTIFACT, summary.to_json, json=True)


def prints_code() -> bool:
    """Return True under ``TORCH_LOGS=output_code``: graphs that are in the cache compile anew."""
    return code_logger.isEnabledFor(logging.DEBUG)


def announce_code(
    name: str,
    code: Callable[[], str],
    notation: Callable[[], str],
    decisions: Iterable[Decision],
) -> None:
    """Write the code that was generated for a graph to the log and torch's trace, if these are on.

    Decisions are the merges taken and rejected, and the results of races.
    """
    if prints_code():
        code_logger.debug("graph %s%s:\n%s", name, f" [{compile_id()}]", code())
    trace_artifact(f"fusec_{name}_kernels", notation)
    trace_artifact(f"fusec_{name}_code", code)
    trace_artifact(
        f"fusec_{name}_decisions",
        lambda: json.dumps([asdict(decision) for decision in decisions], indent=1),
        json=True,
    )


def summarize(gm: fx.GraphModule, trace: Trace) -> GraphSummary:
    """Return the summary of a compile, with the lines and modules of this graph."""
    return GraphSummary(
        compile_id(),
        trace.name,
        trace.target,
        trace.cached,
        trace.problem or "",
        *_launches(gm, trace.manifest),
        dict(trace.wall_seconds),
        module_kinds(gm),
        calling(),
    )


def launch_titles(gm: fx.GraphModule, name: str, manifest: bytes) -> dict[str, str]:
    """Return the names of launches in traces, by kernel and, of eager kernels, by node.

    A name has module and operations: "h.3.ln_2: add + layer_norm", "h.3.ln_2 backward: mul + sum".
    """
    kernels, externs = _launches(gm, manifest)
    again = " backward" * (name == "backward")
    rows = [(k.name, k.module, k.computes) for k in kernels]
    rows += [(e.name, e.module, e.op) for e in externs]
    titled = ((launch, f"{module}{again}".lstrip(), what) for launch, module, what in rows)
    return {k: (f"{at}: {what}" if at else what).translate(_UNESCAPED) for k, at, what in titled}


def _launches(
    gm: fx.GraphModule, manifest: bytes
) -> tuple[tuple[KernelSummary, ...], tuple[ExternSummary, ...]]:
    """Return the launches of a graph's code, with the lines and modules of this graph."""
    found = json.loads(manifest or "{}").get("summary", {"kernels": [], "externs": []})
    nodes = {identifier(node.name): node for node in gm.graph.nodes}
    called: dict[str, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        called[node.name].append(node)
    stored = {row["name"]: row["nodes"] for row in found["kernels"]}
    modules = kernel_modules(gm, stored, [row["node"] for row in found["externs"]])
    kernels = tuple(
        KernelSummary(
            row["name"],
            row["code"],
            tuple(row["ops"]),
            modules[row["name"]],
            _lines(stored_nodes(nodes, row["nodes"])),
            **row["work"],
        )
        for row in found["kernels"]
    )
    externs = []
    for row in found["externs"]:
        calls = called[row["node"]]
        module = module_path(calls[0]) if calls else ""
        # The schedule does not know the products in an eager kernel.
        work = row["work"] | ({"multiplied": multiplied(calls[0])} if calls else {})
        made = ExternSummary(row["node"], row["op"], row["reason"], module, _lines(calls), **work)
        externs.append(made)
    return kernels, tuple(externs)


def _lines(known: Sequence[fx.Node]) -> tuple[str, ...]:
    """Return the user's lines of some nodes."""
    return tuple(dict.fromkeys(line for node in known for line in origin_of(node).source))
