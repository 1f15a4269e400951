"""Passes of the user: they run where they are named, what they return is checked, caches know them.

A pass that returns something else than it may is refused before anything is made of it; one that
computes something else is found by ``verify``.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusec
from fusec.codegen.targets import find_target
from fusec.driver.blame import blame
from fusec.driver.compiler import RECENT
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.driver.user_passes import REGISTERED, chosen_passes, stages_of
from fusec.errors import PassError, UsageError, WrongGraph, WrongKernel
from fusec.ir.extern import CopyInto
from fusec.notation import (
    BF16,
    BOOL,
    F32,
    Axis,
    Buffer,
    Cast,
    Const,
    Def,
    Expr,
    Extern,
    Graph,
    IndexValue,
    Load,
    Op,
    Size,
    cast,
    index,
    op,
    rewrite,
    whole_view,
)
from fusec.options import Options
from fusec.runtime.cache.store import open_cache
from fusec.tools.dumps import Records
from fusec.tools.report.observe import observe
from fusec.tools.verify import kernels
from tests.calls import calls_of
from tests.support import values


@pytest.fixture(autouse=True)
def of_this_test() -> Iterator[None]:
    known = dict(REGISTERED)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    kernels._tallies.clear()  # a kernel that was off would explain the errors of later tests
    REGISTERED.clear()
    REGISTERED.update(known)


def renaming(old: str, new: str) -> Callable[[Graph], Graph]:
    """Return a pass that turns an operation into another."""

    def rule(node: Expr) -> Expr:
        return op(new, *node.args) if isinstance(node, Op) and node.name == old else node

    return lambda graph: graph.map(lambda exprs: rewrite(exprs, rule))


def compiled(fn: Callable[..., Any], passes: str, **more: Any) -> Callable[..., Any]:
    options = {"strict": True, "cache": False, "passes": passes, **more}
    return torch.compile(fn, backend="fusec", options=options, dynamic=more.get("dynamic", False))


def wave(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def clamped(x: Tensor, w: Tensor) -> Tensor:
    return (torch.tanh(x @ w) * w.sum()).clamp(-1e6, 1e6)


@fusec.register_pass("no_clamp", version="1")
def no_clamp(graph: Graph) -> Graph:
    def rule(node: Expr) -> Expr:
        match node:
            case Op(name="minimum", args=(Op(name="maximum", args=(x, Const())), Const())):
                return x
        return node

    return graph.map(lambda exprs: rewrite(exprs, rule))


# -- which passes run, and where -------------------------------------------------------------------


def test_only_compiles_that_name_a_pass_run_it() -> None:
    fusec.register_pass("sines")(renaming("tanh", "sin"))
    x = values(4, 8)
    torch.testing.assert_close(compiled(wave, "")(x), x.tanh() * 2)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(wave, "sines")(x), x.sin() * 2)


def test_passes_run_in_the_order_in_which_they_are_named() -> None:
    fusec.register_pass("sines")(renaming("tanh", "sin"))
    fusec.register_pass("cosines")(renaming("sin", "cos"))
    x = values(4, 8)
    torch.testing.assert_close(compiled(wave, "cosines, sines")(x), x.sin() * 2)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(wave, "sines,cosines")(x), x.cos() * 2)


def test_two_models_of_a_process_have_different_passes() -> None:
    fusec.register_pass("sines")(renaming("tanh", "sin"))
    fusec.register_pass("cosines")(renaming("tanh", "cos"))
    one, other = compiled(lambda x: x.tanh() + 1, "sines"), compiled(lambda x: x.tanh(), "cosines")
    x = values(4, 8)
    for _ in range(2):
        torch.testing.assert_close(one(x), x.sin() + 1)
        torch.testing.assert_close(other(x), x.cos())


def test_threads_compile_with_different_passes() -> None:
    fusec.register_pass("sines")(renaming("tanh", "sin"))
    fusec.register_pass("cosines")(renaming("tanh", "cos"))
    x, made = values(4, 8), dict[str, Tensor]()

    def work(name: str) -> None:
        made[name] = compiled(lambda x: x.tanh() * len(name), name)(x)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("sines", "cosines")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(made, {"sines": x.sin() * 5, "cosines": x.cos() * 7})


def test_a_pass_sees_forward_and_backward() -> None:
    seen: list[str] = []

    @fusec.register_pass("looks")
    def looks(graph: Graph) -> Graph:
        seen.append(graph.name)
        return no_clamp(graph)

    x, w = values(4, 8).requires_grad_(), values(8, 3, seed=1).requires_grad_()
    compiled(clamped, "looks", verify=True)(x, w).sum().backward()
    ours = x.grad, w.grad
    x.grad = w.grad = None
    clamped(x, w).sum().backward()
    assert seen == ["forward", "backward"]
    torch.testing.assert_close(ours, (x.grad, w.grad))


def test_a_pass_sees_symbolic_sizes_and_a_later_call_runs_the_same_code() -> None:
    seen: list[Graph] = []

    @fusec.register_pass("looks")
    def looks(graph: Graph) -> Graph:
        seen.append(graph)
        return no_clamp(graph)

    call = torch.compile(
        clamped, backend="fusec", dynamic=True, options={"strict": True, "passes": "looks"}
    )
    for rows, columns in ((4, 8), (7, 5)):
        x, w = values(rows, columns), values(columns, 3, seed=1)
        torch.testing.assert_close(call(x, w), clamped(x, w))
    assert len(seen) == 1 and seen[0].given_sizes


def context(passes: str, **options: Any) -> CompileContext:
    return CompileContext(find_target("cpu"), Options(passes=passes, **options), Trace("inference"))


def kept(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> Records:
    """Return the records of a compile."""
    (seen,) = observe(fn, inputs)
    records = Records()
    compile_to_source(seen.graph, replace(context(**options), observe=(records.observe,)))
    return records


@pytest.mark.parametrize("precision", ["best", "eager"])
def test_a_pass_runs_before_anything_is_rewritten(precision: str) -> None:
    fusec.register_pass("looks")(lambda graph: graph)
    made = kept(clamped, values(4, 8), values(8, 3), passes="looks", precision=precision).kept
    names = list(made)
    assert names.index("looks") == names.index("graph") + 1
    assert made["looks"].structure is made["graph"].structure and not made["looks"].changed


def test_what_a_pass_leaves_alone_compiles_to_the_same_code() -> None:
    fusec.register_pass("looks")(lambda graph: graph)
    (seen,) = observe(clamped, (values(4, 8), values(8, 3)))
    first, second = (compile_to_source(seen.graph, context(name)) for name in ("", "looks"))
    assert dict(first.sources) == dict(second.sources)


def test_a_new_definition_is_fused_like_any_other() -> None:
    @fusec.register_pass("halves")
    def halves(graph: Graph) -> Graph:
        """Return half of each result."""
        (view,) = graph.outputs
        result = view.buffer
        axes = tuple(Axis(f"h{k}", extent) for k, extent in enumerate(result.shape))
        half = Buffer.row_major("half", result.shape, result.dtype)
        value = op("mul", Load(result, tuple(map(index, axes))), Const(0.5, F32))
        nodes = (*graph.nodes, Def(half, axes, value))
        return replace(graph, nodes=nodes, outputs=(whole_view(half),))

    x = values(4, 8)
    torch.testing.assert_close(compiled(wave, "halves")(x), x.tanh())
    assert len(fusec.explain(wave, x, options={"passes": "halves"}).graphs[0].kernels) == 1


def test_branches_are_graphs_of_their_own() -> None:
    fusec.register_pass("sines")(renaming("tanh", "sin"))

    def chosen(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.tanh(), lambda x: x.exp(), (x,))

    x = values(4, 8).abs()
    torch.testing.assert_close(compiled(chosen, "sines")(x), x.sin())


# -- what a pass may return ------------------------------------------------------------------------


def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return torch.tanh(x + y), x.sin()


def without(*kinds: type) -> Callable[[Graph], Graph]:
    return lambda graph: replace(
        graph, nodes=tuple(line for line in graph.nodes if not isinstance(line, kinds))
    )


def with_other_type(graph: Graph) -> Graph:
    (line,) = (line for line in graph.defs if line.buffer.name == "tanh")
    other = Buffer.row_major("other", line.buffer.shape, BF16)
    node = Def(other, line.axes, cast(line.expr, BF16))
    return replace(
        graph, nodes=(*graph.nodes, node), outputs=(whole_view(other), *graph.outputs[1:])
    )


def with_other_inputs(graph: Graph) -> Graph:
    first = graph.inputs[0]
    assert isinstance(first, Buffer)
    return replace(graph, inputs=(Buffer.row_major("z", first.shape, F32), *graph.inputs[1:]))


def with_equal_names(graph: Graph) -> Graph:
    (line, *_) = graph.defs
    twin = Buffer.row_major(line.buffer.name, line.buffer.shape, line.buffer.dtype)
    return replace(graph, nodes=(*graph.nodes, Def(twin, line.axes, line.expr)))


def with_a_call_of_its_own(graph: Graph) -> Graph:
    (call,) = graph.externs
    return replace(graph, nodes=(*graph.nodes, replace(call, node="mine", impure=False)))


def with_a_size_of_its_own(graph: Graph) -> Graph:
    def rule(node: Expr) -> Expr:
        by_size = op("mul", node, cast(IndexValue(index(Size("n", 4))), F32))
        return by_size if isinstance(node, Op) and node.name == "tanh" else node

    return graph.map(lambda exprs: rewrite(exprs, rule))


def with_the_input_for_a_result(graph: Graph) -> Graph:
    first = graph.inputs[1]
    assert isinstance(first, Buffer)
    return replace(graph, outputs=(whole_view(first), *graph.outputs[1:]))


def out_of_range(graph: Graph) -> Graph:
    def rule(node: Expr) -> Expr:
        if isinstance(node, Load):
            return Load(node.buffer, tuple(i + 1 for i in node.indices), node.guard)
        return node

    return graph.map(lambda exprs: rewrite(exprs, rule))


def badly_typed(graph: Graph) -> Graph:
    return graph.map(lambda exprs: tuple(Cast(expr, BOOL) for expr in exprs))


REFUSED: dict[str, tuple[Callable[[Graph], Any], str]] = {
    "nothing": (lambda graph: None, r"None: return a Graph, the given one where"),
    "a list": (lambda graph: list(graph.nodes), r"an object of type list: return a Graph"),
    "no line": (lambda graph: replace(graph, nodes=(None, *graph.nodes)), "cannot be read: Attr"),
    "lines that are missing": (without(Def), r"is not legal: .*is not defined yet"),
    "a load out of range": (out_of_range, r"is not legal: .*is not provably in \[0, 4\)"),
    "a value of another type": (badly_typed, r"is not legal: .*bool into a buffer of f32"),
    "an input fewer": (
        lambda graph: replace(graph, inputs=graph.inputs[:1]),
        "(is not legal|1 inputs of 2)",
    ),
    "another input": (with_other_inputs, "(is not legal|another object for the input)"),
    "another input that nobody reads": (
        lambda graph: replace(graph, inputs=(*graph.inputs, None)),
        r"a graph with 3 inputs of 2: make it by replace",
    ),
    "a result fewer": (
        lambda graph: replace(graph, outputs=graph.outputs[:1]),
        "a graph with 1 results of 2",
    ),
    "a result of another type": (
        with_other_type,
        r"a graph with result 0 of type bf16\[4, 8\], where it was f32\[4, 8\]",
    ),
    "an input for a result": (
        with_the_input_for_a_result,
        r"a graph with result 0 in other memory: it shares that with an input",
    ),
    "equal results in one buffer": (
        lambda graph: replace(graph, outputs=graph.outputs[:1] * 2),
        r"a graph with result 1 in other memory",
    ),
    "no write to the input": (
        without(Extern),
        r"a graph with no call of aten.copy_.default: these stay, in their order",
    ),
    "a call of its own": (
        with_a_call_of_its_own,
        "a graph with a call of aten.copy_.default that no node of the program makes",
    ),
    "a size of its own": (
        with_a_size_of_its_own,
        "a graph with the size n, which no input and no line defines",
    ),
    "two buffers of one name": (with_equal_names, r"a graph with two buffers named 'mul'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_pass_may_not_return_is_refused(case: str) -> None:
    function, said = REFUSED[case]
    fusec.register_pass("refused")(function)
    (seen,) = observe(in_place, (values(4, 8), values(4, 8)))
    with pytest.raises(PassError, match=f"the pass 'refused' returned (?:.*{said})") as found:
        compile_to_source(seen.graph, context("refused"))
    assert blame(found.value).stage == "refused"


def test_the_example_that_is_refused_above_writes_its_input() -> None:
    stages = stages_of(Options(passes="no_clamp"))
    graph = kept(in_place, values(4, 8), values(4, 8), passes="no_clamp").kept["graph"].structure
    assert [type(line.effect) for line in graph.externs if line.impure] == [CopyInto]
    assert stages[0].run(graph, context("no_clamp")) is graph


def raising(graph: Graph) -> Graph:
    for line in graph.nodes:
        if line.buffer.name == "mul":  # type: ignore[union-attr]
            raise KeyError("unseen")
    return graph


def test_what_a_pass_raises_is_told_with_its_line_and_the_model_s() -> None:
    fusec.register_pass("raising")(raising)
    with pytest.raises(Exception, match=r"the pass 'raising' raised KeyError: 'unseen'") as found:
        compiled(wave, "raising")(values(4, 8))
    assert ", at test_user_passes.py:" in str(found.value)
    assert "in raising: raise KeyError" in str(found.value)
    (seen,) = observe(wave, (values(4, 8),))
    with pytest.raises(PassError) as error:
        compile_to_source(seen.graph, context("raising"))
    place = blame(error.value)
    assert (place.stage, place.op) == ("raising", "mul.Tensor")
    assert place.line.endswith("in wave: return torch.tanh(x) * 2")


def test_an_expression_that_cannot_be_built_is_the_pass_s_own_fault() -> None:
    fusec.register_pass("builds")(renaming("tanh", "tangent"))
    (seen,) = observe(wave, (values(4, 8),))
    with pytest.raises(PassError) as found:
        compile_to_source(seen.graph, context("builds"))
    assert "raised InvalidIR: no scalar operation tangent of 1 arguments, at" in str(found.value)
    assert "defect of fusec" not in str(found.value)


def test_without_strict_the_graph_runs_eagerly_and_a_warning_names_the_pass() -> None:
    fusec.register_pass("raising")(raising)
    x = values(4, 8)
    said = r"failed in stage 'raising' at mul.Tensor .*the pass 'raising' raised KeyError"
    with pytest.warns(UserWarning, match=said):
        made = compiled(wave, "raising", strict=False)(x)
    assert torch.equal(made, wave(x))


# -- verify ----------------------------------------------------------------------------------------


def test_verify_finds_what_a_pass_computes_wrongly_and_names_it() -> None:
    fusec.register_pass("sines")(renaming("tanh", "sin"))
    with pytest.raises(WrongKernel, match="The pass 'sines' rewrote this graph, and has to"):
        compiled(wave, "no_clamp, sines", verify=True)(values(4, 8))


def test_verify_compares_whole_graphs_where_no_buffer_is_a_node_s() -> None:
    @fusec.register_pass("moved")
    def moved(graph: Graph) -> Graph:
        """Return twice the result, in a buffer of another name."""
        (line,) = [line for line in graph.defs if line.buffer is graph.outputs[0].buffer]
        twice = Buffer.row_major("twice", line.buffer.shape, F32)
        new = Def(twice, line.axes, op("mul", line.expr, Const(2.0, F32)))
        nodes = tuple(new if node is line else node for node in graph.nodes)
        return replace(graph, nodes=nodes, outputs=(whole_view(twice),))

    with pytest.raises(WrongGraph, match="The pass 'moved' rewrote this graph, and has to"):
        compiled(wave, "moved", verify=True)(values(4, 8))


def test_a_pass_that_changes_nothing_is_not_suspected() -> None:
    fusec.register_pass("wrong")(renaming("tanh", "sin"))
    fusec.register_pass("nothing")(renaming("erf", "sin"))
    with pytest.raises(WrongKernel) as found:
        compiled(wave, "nothing,wrong", verify=True)(values(4, 8))
    assert found.value.passes == ("wrong",)


def test_a_pass_may_agree_with_eager() -> None:
    x, w = values(4, 8), values(8, 3)
    torch.testing.assert_close(compiled(clamped, "no_clamp", verify=True)(x, w), clamped(x, w))


# -- caches ----------------------------------------------------------------------------------------


def runs(
    version: str | None, new: str, tmp_path: Path, *, train: bool = False, start: bool = True
) -> tuple[int, Tensor]:
    """Compile ``wave`` with the pass ``sines``, as another process would; return its runs."""
    counted: list[str] = []
    change = renaming("tanh", new)

    def sines(graph: Graph) -> Graph:
        counted.append(graph.name)
        return change(graph)

    REGISTERED.pop("sines", None)
    fusec.register_pass("sines", version=version)(sines)
    torch._dynamo.reset()
    options = {"strict": True, "passes": "sines", "cache_dir": str(tmp_path)}
    x = values(4, 8).requires_grad_(train)
    made = torch.compile(wave, backend="fusec", options=options, dynamic=None if start else True)(x)
    if train:
        made.sum().backward()
    return len(counted), made.detach() / 2


def graphs_in(directory: Path) -> list[str]:
    """Return the graphs that a cache has on the disk."""
    listed = open_cache(Options(cache_dir=str(directory))).listing()
    return list(filter(None, (json.loads(one.about)["graph"] for one in listed)))


@pytest.mark.parametrize(("train", "graphs"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("start", [True, False], ids=("from Dynamo's graph", "symbolic"))
def test_a_version_that_is_cached_does_not_run_again(
    train: bool, graphs: int, start: bool, tmp_path
) -> None:
    how = {"train": train, "start": start}
    x = values(4, 8)
    assert runs("1", "sin", tmp_path, **how)[0] == graphs
    count, made = runs("1", "sin", tmp_path, **how)
    assert count == 0 and RECENT[-1].cached
    torch.testing.assert_close(made, x.sin())


@pytest.mark.parametrize("start", [True, False], ids=("from Dynamo's graph", "symbolic"))
def test_another_version_is_another_graph(start: bool, tmp_path) -> None:
    runs("1", "sin", tmp_path, start=start)
    count, made = runs("2", "cos", tmp_path, start=start)
    torch.testing.assert_close(made, values(4, 8).cos())
    assert count == 1
    assert runs("1", "sin", tmp_path, start=start)[0] == 0, "both versions are kept"


@pytest.mark.parametrize("start", [True, False], ids=("from Dynamo's graph", "symbolic"))
def test_without_a_version_nothing_is_kept(start: bool, tmp_path) -> None:
    for new, function in (("sin", torch.sin), ("cos", torch.cos)):
        count, made = runs(None, new, tmp_path, start=start)
        torch.testing.assert_close(made, function(values(4, 8)))
        assert count == 1 and not RECENT[-1].cached
    assert not graphs_in(tmp_path)
    runs("1", "sin", tmp_path, start=start)
    assert graphs_in(tmp_path)


def test_a_graph_without_the_pass_is_another_one(tmp_path) -> None:
    runs("1", "sin", tmp_path)
    torch._dynamo.reset()
    options = {"strict": True, "cache_dir": str(tmp_path)}
    x = values(4, 8)
    torch.testing.assert_close(torch.compile(wave, backend="fusec", options=options)(x), wave(x))
    assert not RECENT[-1].cached


# -- registering -----------------------------------------------------------------------------------


def one_more(graph: Graph, more: int) -> Graph:
    return graph


WRONG: Mapping[str, tuple[Callable[[], Any], str]] = {
    "no name": (
        lambda: fusec.register_pass(no_clamp),  # type: ignore[arg-type]
        r"'no_clamp' is no name: write @fusec.register_pass\('a_name'\)",
    ),
    "a name of two words": (lambda: fusec.register_pass("no clamp"), "letters, digits and _"),
    "a stage's name": (
        lambda: fusec.register_pass("share"),
        "'share' is the name of a stage of fusec's own: choose another",
    ),
    "a structure's name": (lambda: fusec.register_pass("kernels"), "'kernels' is the name of"),
    "a version that is no text": (
        lambda: fusec.register_pass("other", version=1),  # type: ignore[arg-type]
        "pass 'other': version 1 is no text",
    ),
    "no function": (
        lambda: fusec.register_pass("other")(3),  # type: ignore[type-var]
        "pass 'other': 3 is no function",
    ),
    "a function of two arguments": (
        lambda: fusec.register_pass("other")(one_more),  # type: ignore[arg-type]
        r"one_more\(graph: 'Graph', more: 'int'\) -> 'Graph' cannot be called with a graph alone",
    ),
    "a name that is taken": (
        lambda: fusec.register_pass("no_clamp")(raising),
        r"pass 'no_clamp' is registered already, by tests.driver.test_user_passes.no_clamp: choose "
        r"another name for tests.driver.test_user_passes.raising",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_pass_is_not_registered(case: str) -> None:
    register, said = WRONG[case]
    with pytest.raises(UsageError, match=said):
        register()
    assert "other" not in REGISTERED and REGISTERED["no_clamp"].function is no_clamp


def test_a_function_that_is_defined_again_replaces_itself() -> None:
    def defined(new: str) -> Callable[[Graph], Graph]:
        @fusec.register_pass("again")
        def again(graph: Graph) -> Graph:
            return renaming("tanh", new)(graph)

        return again

    first, latest = defined("sin"), defined("cos")
    assert REGISTERED["again"].function is latest is not first


def test_a_callable_object_may_be_a_pass() -> None:
    fusec.register_pass("partly")(functools.partial(renaming("tanh", "sin")))
    x = values(4, 8)
    torch.testing.assert_close(compiled(wave, "partly")(x), x.sin() * 2)


@pytest.mark.parametrize("strict", [True, False])
def test_a_name_that_nobody_registered_is_an_error(strict: bool) -> None:
    with pytest.raises(Exception, match=r"unknown pass 'no_clmp'. Did you mean 'no_clamp'\?"):
        compiled(wave, "no_clmp", strict=strict)(values(4, 8))
    with pytest.raises(UsageError, match="'no_clamp' stands twice"):
        chosen_passes(Options(passes="no_clamp,no_clamp"))
    REGISTERED.clear()
    with pytest.raises(UsageError, match=r"none is registered. Import the module that calls fusec"):
        chosen_passes(Options(passes="no_clamp"))


def test_nothing_is_asked_of_a_pass_that_no_compile_names() -> None:
    with calls_of(no_clamp) as calls:
        compiled(wave, "")(values(4, 8))
    assert not calls
