"""Simplification keeps every value: the cases that a rule once got wrong."""

from __future__ import annotations

import numpy as np

from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, IndexValue, Load, Op
from fusec.ir.graph import Def, Graph, View
from fusec.ir.index import Axis, contiguous_strides, index
from fusec.ir.interp import run_graph
from fusec.passes.simplify import simplify


def test_a_guard_without_a_part_in_the_index_still_gives_zero():
    """``b[j] if i < 4`` is 0 from i = 4 on, although ``b[j]`` could be read anywhere."""
    row = (index(7),)
    b = Buffer("b", row, contiguous_strides(row), F32)
    shape = (index(6), index(7))
    out = Buffer("out", shape, contiguous_strides(shape), F32)
    i, j = Axis("i", index(6)), Axis("j", index(7))
    guard = Op("lt", (IndexValue(index(i)), IndexValue(index(4))))
    line = Def(out, (i, j), Load(b, (index(j),), guard))
    graph = Graph("g", (b,), (line,), (View(out, shape, out.strides, index(0)),))
    values = np.arange(1, 8, dtype=np.float32)
    (result,) = run_graph(simplify(graph), [values])
    expected = np.where(np.arange(6)[:, None] < 4, values, 0)
    np.testing.assert_array_equal(result, expected)
