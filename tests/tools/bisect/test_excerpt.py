"""Graphs as lines of plain torch: what is printed runs, alone, and so does what is smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fusec.driver.backend import compile_with, context_of
from fusec.options import Options
from fusec.tools.bisect.excerpt import (
    Excerpt,
    Input,
    Line,
    NotPlain,
    Ref,
    TensorType,
    alive,
    as_inputs,
    from_graph,
    node_of,
    retyped,
    slice_of,
    static,
)
from fusec.tools.bisect.smaller import shrink, simpler
from fusec.tools.bisect.source import CRASH, SLOWER, WRONG, Fault, as_file, functions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(10, 8), nn.Linear(8, 12)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.norm(self.table(ids))
        drawn = F.dropout(F.gelu(self.up(rows)), 0.5)
        return drawn.reshape(-1, 12) * ids.shape[0], rows[:, -1:].transpose(0, 1)


@pytest.fixture(scope="module")
def graphs() -> dict[str, fx.GraphModule]:
    """The graphs of a training step with symbolic sizes: Dynamo's and AOTAutograd's."""
    found: dict[str, fx.GraphModule] = {}

    def compile_one(gm: fx.GraphModule, _: Sequence[Any], *, name: str) -> Callable[..., Any]:
        found[name] = gm

        def call(args: list[Any]) -> Any:
            return gm(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found["Dynamo"] = gm
        return compile_with(gm, inputs, compile_one, context_of(inputs, Options()))

    torch.compiler.reset()
    results = torch.compile(Net(), backend=keep, dynamic=True)(torch.randint(0, 10, (2, 3)))
    sum(result.sum() for result in results).backward()
    return found


def runs(excerpt: Excerpt) -> Any:
    made = functions(excerpt)
    return made["f"](*made["inputs"]())


@pytest.mark.parametrize("name", ["Dynamo", "forward", "backward"])
def test_a_graph_is_a_program_of_plain_torch(graphs, name: str) -> None:
    excerpt = from_graph(graphs[name], trains=name == "Dynamo")
    assert excerpt.dynamic
    assert excerpt.trains == (name == "Dynamo")
    assert any("test_excerpt.py" in line.where for line in excerpt.lines)
    for one in (excerpt, static(excerpt)):
        results = runs(one)
        results = results if isinstance(results, tuple) else (results,)
        types = [one.types[result] for result in one.results]
        assert [tuple(result.shape) for result in results] == [kind.shape for kind in types]


def test_a_static_program_has_no_size_as_input(graphs) -> None:
    excerpt = alive(static(from_graph(graphs["forward"])))
    assert not excerpt.dynamic
    assert all(isinstance(one.type, TensorType) for one in excerpt.inputs)


def test_what_fusec_draws_is_an_input(graphs) -> None:
    excerpt = from_graph(graphs["forward"])
    assert not any("fusec" in line.target for line in excerpt.lines)
    assert "random_default" in {one.name for one in excerpt.inputs}


def test_what_has_no_plain_name_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(runs, (x,)))
    with pytest.raises(NotPlain):
        from_graph(fx.GraphModule(nn.Module(), graph))


def test_every_program_that_is_smaller_runs(graphs) -> None:
    excerpt = alive(static(from_graph(graphs["backward"])))
    found = list(simpler(excerpt))
    assert len(found) > 50
    for one in found[:: len(found) // 12]:
        runs(one)


def test_a_fault_of_one_operation_shrinks_to_it(graphs) -> None:
    excerpt = from_graph(graphs["forward"])
    tried = []

    def fails(candidate: Excerpt) -> bool:
        tried.append(candidate)
        return any("rsqrt" in line.target for line in candidate.lines)

    small = shrink(excerpt, simpler, fails, 300)
    assert [line.target for line in small.lines] == ["torch.ops.aten.rsqrt.default"]
    assert small.inputs[0].type.shape == (1, 1, 1)
    assert len(tried) < 60


def test_a_kernel_s_part_begins_at_what_others_stored(graphs) -> None:
    gm = graphs["forward"]
    mean = node_of(gm, ("var_mean", 1))
    assert mean == "getitem_1"
    part = slice_of(gm, ["rsqrt"], ["embedding", "index", "getitem"])
    assert [line.name for line in part.lines] == ["add_6", "rsqrt"] or len(part.lines) == 2
    assert [one.name for one in part.inputs] == ["getitem"]


# -- what is drawn ---------------------------------------------------------------------------------

STRIDED = TensorType((4, 3), (1, 4), torch.float32, "cpu")


def one_line(kind: TensorType, target: str = "torch.ops.aten.exp.default", **how: Any) -> Excerpt:
    line = Line("made", target, (Ref("x"),), {}, kind, "model.py:3 in forward: y = exp(x)")
    return Excerpt((Input("x", kind, **how),), (line,), ("made",))


@pytest.mark.parametrize(
    "kind",
    [
        STRIDED,
        TensorType((), (), torch.float64, "cpu"),
        TensorType((5,), (1,), torch.bfloat16, "cpu"),
        TensorType((2, 3), (0, 1), torch.float32, "cpu"),
        TensorType((0, 3), (3, 1), torch.float32, "cpu"),
        TensorType((2, 2), (2, 1), torch.int64, "cpu"),
        TensorType((7,), (1,), torch.bool, "cpu"),
        TensorType((3,), (1,), torch.complex64, "cpu"),
        TensorType((2, 4), (4, 1), torch.float8_e4m3fn, "cpu"),
    ],
)
def test_an_input_has_the_type_and_strides_that_were_traced(kind: TensorType) -> None:
    (made,) = functions(one_line(kind, most=9))["inputs"]()
    assert (tuple(made.shape), made.dtype) == (kind.shape, kind.dtype)
    assert made.stride() == kind.strides or 0 in kind.shape


def test_whole_numbers_are_drawn_below_their_bound_and_results_of_exp_above_zero() -> None:
    kind = TensorType((500,), (1,), torch.int64, "cpu")
    (made,) = functions(one_line(kind, most=3))["inputs"]()
    assert made.unique().tolist() == [0, 1, 2]
    plain = TensorType((64,), (1,), torch.float32, "cpu")
    longer = one_line(plain)
    root = Line("root", "torch.ops.aten.sqrt.default", (Ref("made"),), {}, plain)
    rooted = replace(longer, lines=(*longer.lines, root), results=("root",))
    cut = alive(as_inputs(rooted, ["made"]))
    assert bool((functions(cut)["inputs"]()[0] >= 0).all())


def test_a_program_that_cannot_run_has_no_types() -> None:
    assert retyped(one_line(STRIDED)) is not None
    wrong = replace(one_line(STRIDED).lines[0], args=(Ref("x"), 3))
    assert retyped(replace(one_line(STRIDED), lines=(wrong,))) is None


def test_a_result_that_nothing_makes_is_refused() -> None:
    with pytest.raises(NotPlain):
        alive(replace(one_line(STRIDED), results=()))


# -- the file --------------------------------------------------------------------------------------

PLAIN = TensorType((4, 3), (3, 1), torch.float32, "cpu")
FILE = '''"""fusec is wrong"""

import torch


def f(a):
    # model.py:3 in forward: y = exp(x)
    made = torch.ops.aten.exp.default(a)
    return made


def inputs():
    torch.manual_seed(0)
    return [
        torch.randn(4, 3),  # a
    ]


expected = f(*inputs())
compiled = torch.compile(f, backend="fusec", options={"race": "library", "strict": True})
close = {"rtol": 0.001, "atol": 0.001, "equal_nan": True}
torch.testing.assert_close(compiled(*inputs()), expected, **close)
print("fusec agrees with eager")
'''


def test_a_file_is_a_short_program() -> None:
    assert as_file(one_line(PLAIN), Fault(WRONG, "fusec is wrong", {"race": "library"})) == FILE


@pytest.mark.parametrize("kind", [WRONG, CRASH, SLOWER])
def test_a_file_of_a_training_step_is_python(graphs, kind: str) -> None:
    text = as_file(from_graph(graphs["Dynamo"], trains=True), Fault(kind, 'said "x" \\', calls=3))
    compile(text, "file", "exec")
    assert "torch.autograd.grad(roots, leaves, ways, allow_unused=True)" in text
    assert "dynamic=True" in text
    assert max(map(len, text.splitlines())) < 140
