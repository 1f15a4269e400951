"""Index notation as a pass of the user reads and writes it: the public names of ``fusec.ir``.

``fusec.register_pass`` says how a pass runs, docs/passes.md has whole ones, docs/ir.md the grammar.
Worked example, a pass that multiplies by 0.5 where a graph divides by 2::

    def halve(node: Expr) -> Expr:
        match node:
            case Op(name="div", args=(x, Const(value=2.0))):
                return op("mul", x, Const(0.5, x.dtype))
        return node

    graph = graph.map(lambda exprs: rewrite(exprs, halve))
"""

from __future__ import annotations

from fusec.ir.argument import View, whole_view
from fusec.ir.definition import Def, Origin
from fusec.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, DType, compute_type
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    cast,
    loads,
    op,
    postorder,
    substitute_all,
)
from fusec.ir.extern import Extern
from fusec.ir.graph import Graph
from fusec.ir.index import Axis, Index, Size, index
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM, Monoid
from fusec.ir.rewrite import rewrite
from fusec.ir.scalar import SCALAR_OPS
from fusec.ir.verify import verify_graph

__all__ = [
    "ALL", "ANY", "BF16", "BOOL", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "MAX", "MIN",
    "PROD", "SCALAR_OPS", "SUM", "U8", "Axis", "Buffer", "Cast", "Const", "DType", "Def",
    "Expr", "Extern", "Graph", "Index", "IndexValue", "Load", "Monoid", "Op", "Origin",
    "Reduce", "Select", "Size", "View", "cast", "compute_type", "index", "loads", "op",
    "postorder", "rewrite", "substitute_all", "verify_graph", "whole_view",
]  # fmt: skip
