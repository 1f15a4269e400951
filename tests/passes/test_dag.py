"""What must run after what: the edges that no buffer says."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

from fusec.ir.expr import Buffer, Op
from fusec.ir.extern import WriteInto
from fusec.ir.graph import (
    Def,
    Extern,
    ForeachKernel,
    Graph,
    Kernel,
    RowLoop,
    Schedule,
    Step,
    Store,
    View,
)
from fusec.ir.index import Size, index
from fusec.passes.dag import dependencies
from fusec.passes.fusion.unify import unify
from tests.frontend.tracing import graph_of
from tests.ir.graphs import axes, buffer, load, mm, whole


def beginning(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    k = n[0].item()
    torch._check(k >= 1)
    torch._check(k <= x.shape[0])
    return x[:k].exp()


def test_what_reads_by_a_size_waits_until_that_was_checked() -> None:
    """The check and the reader share no buffer; out of order, memory behind x would be read."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = graph_of(beginning, torch.randn(8), torch.tensor([3]))
    kernels = [
        n if isinstance(n, Extern) else unify((n,), frozenset((n.buffer,))) for n in graph.nodes
    ]
    for lines, dag in (
        (graph.nodes, dependencies(graph.nodes)),
        (kernels, dependencies(kernels)),
    ):
        checks = [k for k, n in enumerate(lines) if "_assert_scalar" in getattr(n, "target", "")]
        assert len(checks) == 2
        reader = next(k for k, n in reversed([*enumerate(lines)]) if isinstance(n, Def | Kernel))
        assert all(nx.has_path(dag, check, reader) for check in checks)


A, B, C, D = (buffer(name, 8) for name in "abcd")


def negation(source: Buffer, made: Buffer) -> Def:
    (i,) = axes("i", 8)
    return Def(made, (i,), Op("neg", (load(source, i),)))


def kernel(source: Buffer, made: Buffer) -> Kernel:
    (i,) = axes("i", 8)
    return Kernel("k", (i,), (), (Store(made, (index(i),), Op("neg", (load(source, i),))),))


def write_into(target: Buffer, source: Buffer) -> Extern:
    args = (whole(target), whole(source))
    return Extern("w", "aten.f_", args, (), (), "", effect=WriteInto(index(8)), impure=True)


@pytest.mark.parametrize(
    ("steps", "edges"),
    [
        ([negation(A, B), negation(B, C), negation(A, D)], {(0, 1)}),
        ([kernel(A, B), kernel(B, A)], {(0, 1)}),  # reads what is made, writes what was read
        ([kernel(A, B), kernel(C, A)], {(0, 1)}),  # writes in place what was read
        ([kernel(C, A), kernel(D, A)], {(0, 1)}),  # writes again what was written
        (
            [kernel(C, A), kernel(A, B), kernel(D, A), kernel(A, C)],
            {(0, 1), (0, 2), (1, 2), (2, 3)},
        ),
        ([negation(A, B), write_into(A, C), negation(A, D)], {(0, 1), (1, 2)}),
        ([write_into(A, B), write_into(C, D)], {(0, 1)}),  # both impure: kept in order
        ([write_into(A, B), write_into(A, D), kernel(A, C)], {(0, 1), (1, 2)}),
    ],
    ids=[
        "a reader waits",
        "a kernel writes back what it is made of",
        "a write waits for readers",
        "a write waits for a write",
        "only the last writer counts",
        "an impure call may write its arguments",
        "impure calls keep their order",
        "writes of one input follow each other",
    ],
)
def test_edges(steps: list[Def | Step], edges: set[tuple[int, int]]) -> None:
    dag = dependencies(steps)
    assert edges <= set(dag.edges)
    assert nx.transitive_reduction(dag).edges <= edges


# -- what a step says of itself --------------------------------------------------------------------


def test_a_kernel_needs_the_sizes_of_its_axes_indices_and_strides() -> None:
    n, m, p = (Size(name, 8) for name in ("N", "M", "P"))
    source = Buffer("x", (index(n), index(4)), (index(p), index(1)), A.dtype)
    made = buffer("y", n)
    (i,) = axes("i", n)
    expr = Op("add", (load(source, i, 0), load(buffer("z", m), index(m) - 1)))
    line = Def(made, (i,), expr)
    step = Kernel("k", (i,), (), (Store(made, (index(i),), expr),))
    assert line.sizes == step.sizes == (m, n, p)
    assert line.writes == step.writes == (made,)
    assert {b.name for b in line.reads} == {b.name for b in step.reads} == {"x", "z"}


def test_a_call_reads_and_needs_all_its_arguments() -> None:
    n = Size("N", 8)
    part = View(A, (index(n),), (index(1),), index(0))
    call = Extern("e", "aten.f", (part, (whole(B),)), (("out", whole(A)),), (C, None), "")
    assert call.reads == (A, B) and call.writes == (C,) and call.sizes == (n,)
    assert not call.impure and call.defines_sizes == () and call.is_launch


def test_a_product_of_the_library_may_be_asked_for_its_operands() -> None:
    x, w, y = buffer("x", 4, 8), buffer("w", 8, 6), buffer("y", 4, 6)
    call = mm("mm", whole(x), whole(w), y)
    assert call.product is not None and call.reads == (x, w)
    assert not call.may_alias and call.written is None
    assert write_into(A, B).written == whole(A)


def test_several_kernels_in_one_launch_read_and_write_what_each_does() -> None:
    first, second = kernel(A, B), kernel(C, D)
    both = ForeachKernel("b", (first, second), first, (A, B), (), (((A, B), ()), ((C, D), ())))
    assert both.reads == (A, C) and both.writes == (B, D) and both.sizes == ()


def test_a_loop_over_rows_reads_windows_and_needs_their_sizes() -> None:
    n = Size("N", 64)
    x = buffer("x", n, 4)
    body = Schedule(Graph("body", (), (), ()), ())
    loop = RowLoop("rows", index(n), 16, index(16), body, (whole(x),), (whole(A),), (C,), (D,), ())
    assert loop.reads == (x, A) and loop.writes == (C, D) and loop.sizes == (n,)
