"""Trace a function to functional ATen as AOTAutograd does, capture it, and run the captured graph.

The reference interpreter runs definitions; externs call the FX node's own target on torch tensors.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fusec.codegen.targets import find_target
from fusec.driver.backend import compile_with
from fusec.driver.context import CompileContext
from fusec.driver.stages import DYNAMO
from fusec.driver.trace import Trace
from fusec.frontend.aot.decompositions import decompositions
from fusec.frontend.call import GraphBuilder
from fusec.frontend.capture import capture
from fusec.ir.graph import CallStep, Def, Extern, Graph, NodeConstant, View
from fusec.ir.index import Size
from fusec.ir.text import print_graph
from fusec.options import Options
from fusec.passes.stage import fold
from fusec.tools.interpreter.expression import Env, eval_scalar
from fusec.tools.interpreter.graph import run_graph

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Interpret = Callable[[Graph, Sequence[Any], Any], list[Any]]


class Captured:
    """The graphs that one function gave, and a compiled form of it that interprets them."""

    def __init__(self, fn: Callable[..., Any], *, dynamic: bool = False) -> None:
        self.modules: list[fx.GraphModule] = []
        self.graphs: list[Graph] = []
        self.guards_added = 0
        self.compiled = self._compile(fn, dynamic)

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    def _compile(self, fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        torch._dynamo.reset()
        backend = aot_autograd(**self._how())
        context = CompileContext(find_target("cpu"), Options(), Trace("captured"))

        def rewritten(gm: fx.GraphModule, inputs: list[Any]) -> Any:
            return backend(fold(DYNAMO, gm, context), inputs)

        return torch.compile(fn, backend=rewritten, dynamic=dynamic)

    def _how(self) -> dict[str, Any]:
        """Return what AOTAutograd is told, as arguments by name."""
        return {
            "fw_compiler": self._compiler("forward"),
            "bw_compiler": self._compiler("backward"),
            "inference_compiler": self._compiler("inference"),
            "decompositions": decompositions(),
            "partition_fn": min_cut_rematerialization_partition,
            "keep_inference_input_mutations": True,
        }

    def _compiler(self, name: str) -> Compile:
        def compile_graph(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            before = guard_count()
            graph = notation_of(gm, name)
            self.guards_added += guard_count() - before
            self.modules.append(gm)
            self.graphs.append(graph)
            return make_boxed_func(lambda *args: run(gm, graph, args))

        return compile_graph

    @property
    def externs(self) -> list[CallStep]:
        return [n for g in self.graphs for n in g.nodes if not isinstance(n, Def)]

    @property
    def defs(self) -> list[Def]:
        return [n for g in self.graphs for n in g.nodes if isinstance(n, Def)]


class CapturedAhead(Captured):
    """The same by AOTAutograd alone, for each call anew: what Dynamo takes is half of the time.

    So the stages of Dynamo's graph do not run; sizes are those of the call, and what is no tensor
    is a constant.
    """

    def _compile(self, fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        assert not dynamic, "only Dynamo traces sizes as symbols that other calls share"

        def compiled(*args: Any) -> Any:
            leaves, spec = tree_flatten(args)
            places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def of_tensors(state: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> Any:
                given = list(leaves)
                for place, tensor in zip(places, tensors, strict=True):
                    given[place] = tensor
                inputs = tree_unflatten(given, spec)
                if isinstance(fn, torch.nn.Module):
                    return torch.func.functional_call(fn, state, inputs)
                return fn(*inputs)

            with _use_lazy_graph_module(True):  # as Dynamo does around a backend
                call = aot_function(of_tensors, **self._how())
                return call(state_of(fn), [leaves[k] for k in places])

        return compiled


def captured_graphs(
    fn: Callable[..., Any], *inputs: torch.Tensor, context: CompileContext, train: bool = False
) -> list[fx.GraphModule]:
    """Return the graphs that go to capture, rewritten for a target."""
    found = []

    def keep(gm: fx.GraphModule, _: Any, *, name: str) -> Any:
        found.append(gm)
        call = lambda args: gm(*args)  # noqa: E731
        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch._dynamo.reset()
    compiled = torch.compile(
        fn, backend=lambda gm, given: compile_with(gm, given, keep, context), dynamic=False
    )
    with torch.set_grad_enabled(train):
        result = compiled(*inputs)
    if train:
        result.sum().backward()
    return found


def state_of(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name; a function has none."""
    if not isinstance(fn, torch.nn.Module):
        return {}
    return {**dict(fn.named_parameters()), **dict(fn.named_buffers())}


def guard_count() -> int:
    """Return how many conditions on symbolic sizes the trace has assumed so far."""
    context = torch._guards.TracingContext.try_get()
    environment = context.fake_mode.shape_env if context and context.fake_mode else None
    return len(environment.guards) if environment else 0


def traced(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    """Return the ATen graph of a function as AOTAutograd takes it apart, without its cut."""
    mode = "symbolic" if dynamic else "fake"
    with torch.no_grad():
        return make_fx(torch.func.functionalize(fn), decompositions(), tracing_mode=mode)(*args)


def notation_of(gm: fx.GraphModule, name: str = "g") -> Graph:
    """Return a graph of ATen operations in index notation."""
    return capture(gm, name, GraphBuilder())[0]


def lowered(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> Graph:
    """Return the captured graph of a function; see ``traced``."""
    return notation_of(traced(fn, *args, dynamic=dynamic))


def check(
    fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False, externs: int = 0
) -> Graph:
    """Assert that a function's captured graph computes what eager does, with so many externs."""
    gm = traced(fn, *args, dynamic=dynamic)
    graph = notation_of(gm)
    got = run(gm, graph, [a.clone() for a in args])
    want = tree_leaves(fn(*[a.clone() for a in args]))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
        assert strides_of(a) == strides_of(b)
    assert sum(not isinstance(n, Def) for n in graph.nodes) == externs, print_graph(graph)
    return graph


def strides_of(x: torch.Tensor) -> list[int]:
    """Return the strides that matter: of axes of more than one element."""
    return [s for s, e in zip(x.stride(), x.shape, strict=True) if e > 1]


def body(graph: Graph) -> list[str]:
    """Return the lines of a printed graph without its head, types and reasons."""
    lines = print_graph(graph).splitlines()[1:]
    return [re.split(r" {4}[:#]", line)[0].strip() for line in lines]


def graph_of(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> Graph:
    """Return the graph of a function that is traced as one inference graph."""
    captured = Captured(fn, dynamic=dynamic)
    with torch.no_grad():
        captured(*args)
    (graph,) = captured.graphs
    return graph


def run(
    gm: fx.GraphModule, graph: Graph, args: Sequence[Any], interpret: Interpret = run_graph
) -> list[Any]:
    """Run a captured graph on torch tensors by the reference interpreter, or what stands for it."""
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
            to_array(r) if isinstance(r, torch.Tensor) else r
            for r in (results if extern.outputs or extern.bound_sizes else [])
        ]

    inputs = [
        None if item is None else int(arg) if isinstance(item, Size) else to_array(arg)
        for item, arg in zip(graph.inputs, args, strict=True)
    ]
    arrays = interpret(graph, inputs, call)
    (returned,) = next(n for n in gm.graph.nodes if n.op == "output").args
    nodes_returned = returned if isinstance(returned, tuple | list) else (returned,)
    vals = (node.meta["val"] for node in placeholders)
    sizes = {
        val.node.expr: arg
        for val, arg in zip(vals, originals, strict=True)
        if isinstance(val, torch.SymInt)
    }
    given = dict(zip(graph.inputs, originals, strict=True))
    return [
        as_view(as_traced(array, node, sizes), output, given)
        for array, node, output in zip(arrays, nodes_returned, graph.outputs, strict=True)
    ]


def to_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().resolve_conj().resolve_neg()
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


def as_traced(array: Any, node: Any, sizes: Mapping[Any, int]) -> Any:
    """Return an output with the dtype and the strides that were traced, for the call's sizes."""
    if not isinstance(array, np.ndarray | np.generic):
        return array
    traced = node.meta["val"]
    made = torch.from_numpy(np.array(array)).to(traced.dtype)
    strides = [s if isinstance(s, int) else _actual(s, sizes) for s in traced.stride()]
    window = tuple(slice(None) if stride else slice(0, 1) for stride in strides)
    compact = made[window]
    dense = torch.empty_strided(compact.shape, [s or 1 for s in strides], dtype=made.dtype)
    return dense.copy_(compact).expand(made.shape)


def _actual(size: torch.SymInt, sizes: Mapping[Any, int]) -> int:
    found = size.node.expr.subs(sizes)
    return int(size.node.hint if found.free_symbols else found)


def as_view(made: Any, output: Any, given: Mapping[Any, Any]) -> Any:
    """Return an output that is a view of an input as one of that tensor's memory."""
    arg = given.get(output.buffer) if isinstance(output, View) else None
    if not isinstance(arg, torch.Tensor) or arg.dtype is not made.dtype or arg.is_complex():
        return made
    env = Env(sizes={size: value for size, value in given.items() if isinstance(size, Size)})
    offset = arg.storage_offset() + eval_scalar(output.offset, env)
    return arg.detach().as_strided(made.shape, made.stride(), offset)
