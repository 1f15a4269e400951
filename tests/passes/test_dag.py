"""What must run after what: the edges that no buffer says."""

from __future__ import annotations

import networkx as nx
import torch

from fusec.ir.graph import Def, Extern, Kernel
from fusec.passes.dag import dependencies, step_dependencies
from fusec.passes.unify import unify
from tests.frontend.tracing import graph_of


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
        (graph.nodes, dependencies(graph)),
        (kernels, step_dependencies(kernels)),
    ):
        checks = [k for k, n in enumerate(lines) if "_assert_scalar" in getattr(n, "target", "")]
        assert len(checks) == 2
        reader = next(k for k, n in reversed([*enumerate(lines)]) if isinstance(n, Def | Kernel))
        assert all(nx.has_path(dag, check, reader) for check in checks)
