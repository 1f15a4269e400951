"""A bias that found no partner goes back to the library: ``addmm``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusec.ir.dtype import BF16, DType
from fusec.ir.expr import Buffer, Cast, Expr, Op
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule
from fusec.ir.index import index
from fusec.passes.fusion.fuse import separate
from fusec.passes.fusion.library_bias import library_bias
from tests.ir.graphs import axes, buffer, f32, graph, load, mm, whole
from tests.passes.pipelines import check_same, kernels, numbers

M, N, K = 4, 6, 3


def library(node: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    *bias, a, b = args
    return [a @ b + (bias[0] if bias else 0)]


class Product:
    """``y = f(a @ b)``: a graph with one matrix product, and a definition that reads it."""

    def __init__(self, dtype: DType | None = None) -> None:
        kind = {} if dtype is None else {"dtype": dtype}
        self.a, self.b = buffer("a", M, K, **kind), buffer("b", K, N, **kind)
        self.made, self.y = buffer("mm", M, N, **kind), buffer("y", M, N, **kind)
        self.bias = buffer("bias", N, **kind)
        views = (whole(self.a), whole(self.b))
        self.extern = mm("mm", *views, self.made)
        self.axes = axes("m n", M, N)

    def graph(self, expr: Expr, *more: Buffer, bias: Buffer | None = None) -> Graph:
        line = Def(self.y, self.axes, expr)
        inputs = (self.a, self.b, bias or self.bias)
        return graph(inputs, (self.extern, line), self.y, *more)

    def biased(self, vector: Buffer | None = None) -> Op:
        m, n = self.axes
        return Op("add", (load(self.made, m, n), load(vector or self.bias, n)))


def inputs(*, bias: int = N) -> tuple[np.ndarray, ...]:
    return numbers(M, K), numbers(K, N, seed=1), numbers(bias, seed=2)


def targets(schedule: Schedule) -> list[str]:
    return [s.target if isinstance(s, Extern) else s.name for s in schedule.steps]


def test_a_lone_bias_is_added_by_the_library() -> None:
    product = Product()
    before = product.graph(product.biased())
    after = library_bias(separate(before))
    assert targets(after) == ["aten.addmm.default"]
    check_same(before, after, inputs(), library)


def test_the_order_of_the_summands_is_no_matter() -> None:
    product = Product()
    swapped = Op("add", product.biased().args[::-1])
    assert targets(library_bias(separate(product.graph(swapped)))) == ["aten.addmm.default"]


def test_half_types_that_are_added_in_f32_are_a_bias_too() -> None:
    product = Product(BF16)
    wide = tuple(Cast(a, f32(0).dtype) for a in product.biased().args)
    line = Cast(Op("add", wide), BF16)
    assert targets(library_bias(separate(product.graph(line)))) == ["aten.addmm.default"]


def test_a_part_of_a_longer_bias_is_passed_as_that_part() -> None:
    product = Product()
    m, n = product.axes
    packed = buffer("bias", 3 * N)
    part = load(packed, index(n) + N)
    before = product.graph(Op("add", (load(product.made, m, n), part)), bias=packed)
    after = library_bias(separate(before))
    assert targets(after) == ["aten.addmm.default"]
    check_same(before, after, inputs(bias=3 * N), library)


def activation(product: Product) -> Graph:
    return product.graph(Op("maximum", (product.biased(), f32(0))))


def column_bias(product: Product) -> Graph:
    m, n = product.axes
    by_row = buffer("bias", M)
    return product.graph(Op("add", (load(product.made, m, n), load(by_row, m))), bias=by_row)


def other_reader(product: Product) -> Graph:
    return product.graph(product.biased(), product.made)


def other_type(product: Product) -> Graph:
    double = buffer("bias", N, dtype=BF16)
    m, n = product.axes
    wide = Cast(load(double, n), product.made.dtype)
    return product.graph(Op("add", (load(product.made, m, n), wide)), bias=double)


def scaled(product: Product) -> Graph:
    m, n = product.axes
    return product.graph(Op("mul", (load(product.made, m, n), load(product.bias, n))))


def own_row(product: Product) -> Graph:
    m, n = product.axes
    return product.graph(Op("add", (load(product.made, m, n), load(product.made, 0, n))))


@pytest.mark.parametrize(
    "case", [activation, column_bias, other_reader, other_type, scaled, own_row]
)
def test_anything_else_stays_a_kernel(case: Any) -> None:
    before = case(Product())
    schedule = separate(before)
    assert library_bias(schedule) is schedule


def test_a_matrix_that_is_no_product_stays_a_kernel() -> None:
    product = Product()
    product.extern = Extern(
        "bmm", "aten.other.default", product.extern.args, (), (product.made,), "a contraction"
    )
    schedule = separate(product.graph(product.biased()))
    assert library_bias(schedule) is schedule


def test_kernels_that_are_left_are_numbered_without_gaps() -> None:
    product = Product()
    m, n = axes("m n", M, N)
    z = buffer("z", M, N)
    last = Def(z, (m, n), Op("maximum", (load(product.y, m, n), f32(0))))
    before = product.graph(product.biased())
    before = Graph("g", before.inputs, (*before.nodes, last), (whole(z), whole(product.y)))
    after = library_bias(separate(before))
    assert targets(after) == ["aten.addmm.default", "k0"]
    assert all(isinstance(k, Kernel) for k in kernels(after))
    check_same(before, after, inputs(), library)
