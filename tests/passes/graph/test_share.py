"""Sharing: equal definitions become one, those a caller can tell apart stay."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from fusec.ir.dtype import BF16, F64
from fusec.ir.expr import Buffer, Cast, Expr, Load, Op, Reduce
from fusec.ir.graph import Def, Extern, Graph, argument_views
from fusec.ir.index import Axis, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.rewrite import rewrite
from fusec.passes.graph.share import merge_equal
from tests.fuzz.graphs import Example
from tests.ir.graphs import axes, buffer, f32, graph, load, position, total, whole
from tests.passes.pipelines import BOUNDED, check_same, names, numbers, random_graphs


def row_sum(name: str, source: Buffer, axis_names: str = "m c") -> Def:
    m, c = axes(axis_names, 3, 4)
    return Def(buffer(name, 3), (m,), total(SUM, c, load(source, m, c)))


def scaled(name: str, source: Buffer, by: float) -> Def:
    (m,) = axes("m", 3)
    return Def(buffer(name, 3), (m,), Op("mul", (load(source, m), f32(by))))


def test_equal_definitions_are_one_whatever_their_axes_are_called() -> None:
    x = buffer("x", 3, 4)
    a, b = row_sum("a", x), row_sum("b", x, "i k")
    y, z = scaled("y", a.buffer, 2), scaled("z", b.buffer, 3)
    before = graph((x,), (a, b, y, z), y.buffer, z.buffer)
    after = merge_equal(before)
    assert names(after) == ["a", "y", "z"]
    assert after.nodes[2].reads == (a.buffer,)
    check_same(before, after, (numbers(3, 4),))


def test_readers_of_what_became_one_are_one_in_turn() -> None:
    x = buffer("x", 3, 4)
    a, b = row_sum("a", x), row_sum("b", x)
    c, d = scaled("c", a.buffer, 2), scaled("d", b.buffer, 2)
    y, z = scaled("y", c.buffer, 5), scaled("z", d.buffer, 7)
    before = graph((x,), (a, b, c, d, y, z), y.buffer, z.buffer)
    after = merge_equal(before)
    assert names(after) == ["a", "c", "y", "z"]
    check_same(before, after, (numbers(3, 4),))


def test_outputs_stay_apart_for_a_caller_may_write_to_one() -> None:
    x = buffer("x", 3, 4)
    a, b = row_sum("a", x), row_sum("b", x)
    before = graph((x,), (a, b), a.buffer, b.buffer)
    assert merge_equal(before) is before


def test_a_definition_that_an_extern_may_write_stays_apart() -> None:
    x, e = buffer("x", 3, 4), buffer("e", 3)
    a, b = row_sum("a", x), row_sum("b", x)
    y = scaled("y", b.buffer, 2)
    copy = Extern("e", "copy", (whole(a.buffer),), (), (e,), "a copy")
    impure = graph((x,), (a, b, replace(copy, impure=True), y), e, y.buffer)
    assert merge_equal(impure) is impure
    pure = graph((x,), (a, b, copy, y), e, y.buffer)
    assert names(merge_equal(pure)) == ["a", "y"]


def test_externs_read_the_first_of_equal_buffers() -> None:
    x, e = buffer("x", 3, 4), buffer("e", 3)
    a, b = row_sum("a", x), row_sum("b", x)
    copy = Extern("e", "copy", (whole(b.buffer),), (), (e,), "a copy")
    y = scaled("y", a.buffer, 2)
    before = graph((x,), (a, b, copy, y), e, y.buffer)
    after = merge_equal(before)
    assert after.nodes[1].reads == (a.buffer,)
    check_same(before, after, (numbers(3, 4),))


def test_another_type_or_layout_is_another_buffer() -> None:
    x = buffer("x", 3, 3)
    made = []
    for name, dtype, strides in (("a", BF16, (3, 1)), ("b", F64, (3, 1)), ("c", BF16, (1, 3))):
        m, c = axes("m c", 3, 3)
        steps = (index(strides[0]), index(strides[1]))
        out = Buffer(name, x.shape, steps, dtype)
        made.append(Def(out, (m, c), Cast(load(x, m, c), dtype)))
    nodes = [Extern(f"e{d.buffer}", "copy", (whole(d.buffer),), (), (None,), "") for d in made]
    before = Graph("g", (x,), (*made, *nodes), ())
    assert merge_equal(before) is before


def test_rows_and_columns_of_a_square_matrix_are_not_the_same_sums() -> None:
    x = buffer("x", 4, 4)
    found = []
    for name, by_rows in (("a", True), ("b", False)):
        m, c = axes("m c", 4, 4)
        at = (m, c) if by_rows else (c, m)
        found.append(Def(buffer(name, 4), (m,), total(MAX, c, load(x, *at))))
    a, b = found
    (i,) = axes("i", 4)
    y = Def(buffer("y", 4), (i,), Op("sub", (load(a.buffer, i), load(b.buffer, i))))
    before = graph((x,), (a, b, y), y.buffer)
    assert merge_equal(before) is before


def test_nested_reductions_are_told_apart_by_which_axis_each_binds() -> None:
    """sum(i: max(j: x[i, j])) is not sum(i: max(j: x[j, i])), though both have square axes."""
    x = buffer("x", 3, 3)
    made = []
    for name, order in (("a", "ij"), ("b", "ji")):
        (z,), (i, j) = axes("z", 1), axes("i j", 3, 3)
        at = (i, j) if order == "ij" else (j, i)
        inner = Reduce(MAX, (j,), load(x, *at))
        made.append(Def(buffer(name, 1), (z,), Reduce(SUM, (i,), inner)))
    a, b = made
    (z,) = axes("z", 1)
    y = Def(buffer("y", 1), (z,), Op("sub", (load(a.buffer, z), load(b.buffer, z))))
    before = graph((x,), (a, b, y), y.buffer)
    assert merge_equal(before) is before
    check_same(before, merge_equal(before), (numbers(3, 3),))


def test_masks_that_two_layers_build_are_one() -> None:
    x = buffer("x", 4, 4)
    nodes, outputs = [], []
    for layer in range(2):
        m, c = axes("m c", 4, 4)
        mask = Def(
            buffer(f"mask{layer}", 4, 4),
            (m, c),
            Cast(Op("le", (position(c), position(m))), x.dtype),
        )
        i, j = axes("i j", 4, 4)
        weight = Op("mul", (load(mask.buffer, i, j), f32(layer + 2)))
        y = Def(buffer(f"y{layer}", 4, 4), (i, j), Op("mul", (load(x, i, j), weight)))
        nodes += [mask, y]
        outputs.append(y.buffer)
    before = graph((x,), tuple(nodes), *outputs)
    after = merge_equal(before)
    assert names(after) == ["mask0", "y0", "y1"]
    check_same(before, after, (numbers(4, 4),))


def said_twice(before: Graph) -> Graph:
    """Return the graph with a twin of each definition, which every second reader reads."""
    twins: dict[Buffer, Buffer] = {}
    nodes: list[Def | Extern] = []

    def of_twin(node: Expr) -> Expr:
        if isinstance(node, Load) and node.buffer in twins:
            return Load(twins[node.buffer], node.indices, node.guard)
        return node

    for place, node in enumerate(before.nodes):
        nodes.append(node)
        if isinstance(node, Extern):
            continue
        if place % 2:
            nodes[-1] = node = replace(node, expr=rewrite((node.expr,), of_twin)[0])
        made = node.buffer
        twin = Buffer(f"{made.name}_twin", made.shape, made.strides, made.dtype)
        fresh = {a: Axis(f"{a.name}2", a.extent) for a in node.axes}
        expr = node.expr.substitute({a: index(b) for a, b in fresh.items()})
        nodes.append(Def(twin, tuple(fresh.values()), expr))
        twins[made] = twin
    return replace(before, nodes=tuple(nodes))


@BOUNDED
@given(drawn=random_graphs())
def test_random_graphs_that_say_all_twice_compute_the_same(drawn: Example) -> None:
    before = said_twice(drawn.graph)
    after = merge_equal(before)
    check_same(before, after, drawn.inputs)
    returned = {v.buffer.name for v in argument_views(before.outputs)}
    left = [n for n in names(after) if n.endswith("_twin")]
    assert all(n.removesuffix("_twin") in returned for n in left)
