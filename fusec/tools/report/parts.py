"""Describe what a launch computes: the program's operations, each with its module and its line.

A kernel's parts are the nodes of the traced graph between its loads and its stores, inlined ones
included. Views are no parts: they are indices. A node's operation is the one that the program
calls, so that all nodes of its decomposition are one part.

Worked example: ``self.ln_2(x + r)`` in a layer is ``add`` and ``layer_norm of h.*.ln_2``, both
``at model.py:41 in forward: y = self.ln_2(x + r)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fusec.frontend.origin import called, module_path, op_name, origin_of
from fusec.ir.graph import ForeachKernel, Kernel
from fusec.ir.names import identifier, operation_words


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
        words = operation_words(map(_plain, launch.origin.ops))
        reached = sorted(self._between(launch), key=self._number.__getitem__)
        parts = [_part_of(node, word) for node in reached if (word := _word(node)) in words]
        found = tuple(dict.fromkeys(parts))
        return found or tuple(map(Part, words))

    def _between(self, launch: Kernel | ForeachKernel) -> set[fx.Node]:
        """Return the nodes between the loads and the stores of a launch."""
        read = {b.name for b in launch.reads} - {b.name for b in launch.writes}
        ends = {self._of_part(name) for name in read}
        waiting = [node for b in launch.writes if (node := self._node(b.name)) is not None]
        found: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in found or node.op != "call_function" or self._ends_before(node, read):
                continue
            found.add(node)
            if node not in ends:
                waiting += node.all_input_nodes
        return found

    def _ends_before(self, node: fx.Node, read: set[str]) -> bool:
        return identifier(node.name) in read or node.name in self._calls

    def _node(self, name: str) -> fx.Node | None:
        return self._nodes.get(name) or self._of_part(name)

    def _of_part(self, name: str) -> fx.Node | None:
        """Return the node of a buffer with partial results: ``sum_2`` for ``sum_2_part``."""
        while "_" in name:
            name = name.rpartition("_")[0]
            if name in self._nodes:
                return self._nodes[name]
        return None


def without_layer(module: str) -> str:
    """Return "h.*.mlp" for "h.3.mlp": a contract is the same for any number of layers."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _part_of(node: fx.Node, op: str) -> Part:
    lines = origin_of(node).source
    return Part(op, without_layer(module_path(node)), lines[0] if lines else "")


def _word(node: Any) -> str:
    return operation_words([_plain(op_name(called(node)))])[0]


def _plain(op: str) -> str:
    """Return an operation without the device on which the graph was traced."""
    return op.replace("_flash_attention_for_cpu", "_attention")


def title(parts: Iterable[Part]) -> str:
    """Return the joint name of some parts: "add + layer_norm"."""
    return " + ".join(dict.fromkeys(part.op for part in parts)) or "kernel"
