"""What an entry of the cache says of a graph's launches, and the names of launches in traces.

An entry has what depends on the code alone. Modules and lines are those of the current graph, which
may be another one with the same code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from fusec.frontend.modules import kernel_modules
from fusec.frontend.origin import module_path
from fusec.ir.extern import Extern
from fusec.ir.graph import ForeachKernel, Kernel, Schedule, all_launches, launched_externs
from fusec.ir.names import SHOWN_OPERATIONS, operation_words
from fusec.torch_interior import compile_id

_UNESCAPED = str.maketrans('"\\', "'/")
"""Torch does not escape names in a Chrome trace: these would end a name, and the JSON."""


def graph_id(name: str) -> str:
    """Return the identifier of a graph that is compiled now: name and number of the compile."""
    return f"{name} {compile_id()}".rstrip()


def describe_launches(
    schedule: Schedule,
    code: Mapping[str, str],
    work: Mapping[Kernel | ForeachKernel | Extern, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the description of a schedule's launches that is kept in a cache entry.

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
            {"node": extern.node, "op": extern.title, "reason": extern.reason, "work": work[extern]}
            for extern in launched_externs(schedule)
        ],
    }


def described_launches(manifest: bytes) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the rows of kernels and of eager kernels that an entry's manifest has."""
    found = json.loads(manifest or "{}").get("summary", {})
    return found.get("kernels", ()), found.get("externs", ())


def launch_modules(
    gm: fx.GraphModule, kernels: Iterable[Any], externs: Iterable[Any]
) -> dict[str, str]:
    """Return the path of each launch's module, by kernel and, of eager kernels, by node."""
    eager = {row["node"] for row in externs}
    stored = {row["name"]: row["nodes"] for row in kernels}
    own = {node.name: module_path(node) for node in gm.graph.nodes if node.name in eager}
    return dict.fromkeys(eager, "") | own | kernel_modules(gm, stored, eager)


def computes(ops: Iterable[str]) -> str:
    """Return what a kernel of some operations computes: "add + layer_norm"."""
    words = list(operation_words(ops))
    return " + ".join(words[:SHOWN_OPERATIONS] + ["..."] * (len(words) > SHOWN_OPERATIONS))


def launch_titles(gm: fx.GraphModule, name: str, manifest: bytes) -> dict[str, str]:
    """Return the names of launches in traces, by kernel and, of eager kernels, by node.

    A name has module and operations: "h.3.ln_2: add + layer_norm", "h.3.ln_2 backward: mul + sum".
    """
    kernels, externs = described_launches(manifest)
    modules = launch_modules(gm, kernels, externs)
    again = " backward" * (name == "backward")
    rows = [(row["name"], computes(row["ops"])) for row in kernels]
    rows += [(row["node"], row["op"]) for row in externs]
    titled = ((launch, f"{modules[launch]}{again}".lstrip(), what) for launch, what in rows)
    return {k: (f"{at}: {what}" if at else what).translate(_UNESCAPED) for k, at, what in titled}
