"""Inputs that are neither tensors nor sizes: process groups and such, which eager kernels take."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.frontend.key import graph_key
from fusec.ir.graph import InputObject
from fusec.ir.text import print_graph
from fusec.options import Options
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import of_graph
from tests.frontend.tracing import notation_of


class Factor:
    """Stands for a process group: its ``repr`` has its address."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


def scale(x: torch.Tensor, by: Factor) -> torch.Tensor:
    """Stands for an operation that takes an object."""
    return x * by.factor


def graph_with_an_object() -> fx.GraphModule:
    """y = exp(scale(x, object)); returns y and the object, as a forward hands on what it saves."""
    graph = fx.Graph()
    x, given, unread = (graph.placeholder(name) for name in ("x", "given", "unread"))
    scaled = graph.call_function(scale, (x, given))
    y = graph.call_function(torch.ops.aten.exp.default, (scaled,))
    graph.output((y, given))
    with FakeTensorMode():
        for node in (x, scaled, y):
            node.meta["val"] = torch.empty(4, 3)
    given.meta["val"] = unread.meta["val"] = Factor(2.0)
    return fx.GraphModule(torch.nn.Module(), graph)


def test_an_object_is_an_input_that_externs_and_outputs_name():
    graph = notation_of(graph_with_an_object())
    assert graph.inputs[1:] == (InputObject("given"), None)
    assert graph.outputs[1] == InputObject("given")
    text = print_graph(graph)
    assert "given: object" in text and "scale(x, given)" in text


def test_an_object_reaches_the_eager_kernel_and_leaves_as_it_is():
    gm, device = graph_with_an_object(), torch.device("cpu")
    made = compile_to_source(
        gm, CompileContext(find_target("cpu"), Options(verify=True), Trace("g"))
    )
    kernels = {name: lambda source, out: torch.exp(source, out=out) for name in made.programs}
    call = executable.bind(made.wrapper, kernels, of_graph(gm), device)
    given, x = Factor(3.0), torch.randn(4, 3)
    y, same = call([x, given, None])
    assert same is given
    assert torch.allclose(y, (3 * x).exp())


def test_graphs_whose_operations_are_parts_of_others_have_entries_of_their_own():
    first, second = graph_with_an_object(), graph_with_an_object()
    (node,) = second.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    node.meta["original_aten"] = torch.ops.aten._softmax.default
    assert graph_key(first) != graph_key(second)


def test_graphs_that_differ_in_their_objects_share_an_entry_of_the_cache():
    first, second = graph_with_an_object(), graph_with_an_object()
    assert graph_key(first) == graph_key(second)
