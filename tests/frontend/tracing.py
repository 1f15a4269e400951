"""Trace a function to functional ATen as AOTAutograd does, capture it, and run the captured graph.

The reference interpreter runs definitions; externs call the FX node's own target on torch tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from fusec.frontend.capture import capture
from fusec.frontend.decompositions import decompositions
from fusec.ir.graph import Def, Extern, Graph, NodeConstant
from fusec.ir.index import Size
from fusec.ir.interp import run_graph

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Captured:
    """The graphs that one function gave, and a compiled form of it that runs them by interpreter."""

    def __init__(self, fn: Callable[..., Any], *, dynamic: bool = False) -> None:
        self.modules: list[fx.GraphModule] = []
        self.graphs: list[Graph] = []
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("inference"),
            decompositions=decompositions(),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        self.compiled = torch.compile(fn, backend=backend, dynamic=dynamic)

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    def _compiler(self, name: str) -> Compile:
        def compile_graph(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            graph = capture(gm, name)
            self.modules.append(gm)
            self.graphs.append(graph)
            return make_boxed_func(lambda *args: run(gm, graph, args))

        return compile_graph

    @property
    def externs(self) -> list[Extern]:
        return [n for g in self.graphs for n in g.nodes if isinstance(n, Extern)]

    @property
    def defs(self) -> list[Def]:
        return [n for g in self.graphs for n in g.nodes if isinstance(n, Def)]


def graph_of(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> Graph:
    """Return the graph of a function that is traced as one inference graph."""
    captured = Captured(fn, dynamic=dynamic)
    with torch.no_grad():
        captured(*args)
    (graph,) = captured.graphs
    return graph


def run(gm: fx.GraphModule, graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Run a captured graph on torch tensors by the reference interpreter."""
    nodes = {node.name: node for node in gm.graph.nodes}
    placeholders = gm.graph.find_nodes(op="placeholder")
    originals = args

    def call(extern: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        node = nodes[extern.node]
        if extern.target == "get_attr":
            return [to_array(operator.attrgetter(node.target)(gm))]
        if node.target is torch.ops.aten.copy_.default:
            position = placeholders.index(node.args[0])
            originals[position].copy_(from_array(args[1], gm, nodes))
        made = node.target(
            *[from_array(a, gm, nodes) for a in args],
            **{k: from_array(a, gm, nodes) for k, a in kwargs.items()},
        )
        results = made if extern.many else [made]
        return [
            to_array(r) if isinstance(r, torch.Tensor) else None
            for r in (results if extern.outputs else [])
        ]

    inputs = [
        None if item is None else int(arg) if isinstance(item, Size) else to_array(arg)
        for item, arg in zip(graph.inputs, args, strict=True)
    ]
    arrays = run_graph(graph, inputs, call)
    (returned,) = next(n for n in gm.graph.nodes if n.op == "output").args
    return [as_traced(a, n) for a, n in zip(arrays, returned, strict=True)]


def to_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def from_array(value: Any, gm: fx.GraphModule, nodes: dict[str, fx.Node]) -> Any:
    """Return an extern's argument as eager kernels take it, sharing the interpreter's memory."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return torch.from_numpy(np.asarray(value))
    if isinstance(value, tuple):
        return [from_array(v, gm, nodes) for v in value]
    if isinstance(value, NodeConstant):
        found: Any = nodes[value.node]
        for k, step in enumerate(value.path):
            found = getattr(found, step) if k == 0 else found[step]
        return getattr(gm, found.target) if isinstance(found, fx.Node) else found
    return value


def as_traced(array: Any, node: Any) -> Any:
    """Return an output with the dtype and the strides that were traced."""
    if not isinstance(array, np.ndarray | np.generic):
        return array
    traced = node.meta["val"]
    made = torch.from_numpy(np.array(array)).to(traced.dtype)
    strides = [s if isinstance(s, int) else int(s.node.hint) for s in traced.stride()]
    window = tuple(slice(None) if stride else slice(0, 1) for stride in strides)
    compact = made[window]
    dense = torch.empty_strided(compact.shape, [s or 1 for s in strides], dtype=made.dtype)
    return dense.copy_(compact).expand(made.shape)
