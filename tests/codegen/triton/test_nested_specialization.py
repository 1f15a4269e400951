"""Which loops of two products warps with roles can run, and in which order they do."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import torch
import torch.nn.functional as F

from fusec.codegen.targets import find_target
from fusec.codegen.triton.form import Form, by_pointers, verify_form
from fusec.codegen.triton.nested_specialization import split_nested
from fusec.codegen.triton.warp_specialization import print_split
from fusec.ir.expr import Dot, Load, Op, Var
from fusec.ir.program import Await, Fill, For, Let, Statement, Take, Update, statements
from fusec.options import Options
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import take_through
from tests.codegen.programs import form_of
from tests.codegen.triton.test_descriptors import tensors
from tests.codegen.triton.test_warp_specialization import form, program_of
from tests.triton_backend import gpu_pipeline


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each query sees the 40 keys up to its own: a loop that does not start at the first one."""
    i = torch.arange(q.shape[-2])
    seen = (i <= i[:, None]) & (i[:, None] - i < 40)
    scores = torch.where(seen, (q @ k.transpose(-1, -2)).float() * 0.125, float("-inf"))
    return torch.softmax(scores, -1).to(q.dtype) @ v


SHAPES = [(2, 16, 1024, 64)] * 3


def lines_of(text: str, *starts: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip().startswith(starts)]


def test_an_iteration_multiplies_the_weights_of_the_one_before() -> None:
    roles = form(attention, *SHAPES).roles
    assert roles is not None
    _, multiply = print_split(roles).split("role multiply:\n")
    wanted = ("take", "await", "free", "weights", "factor", "carry weights", "carry factor", "for")
    assert lines_of(multiply, *wanted, "v_sum_acc :=", "v_sum<") == [
        "  take tiles: v_arg0_1<i2i, i3i>",
        "  carry weights<i2i, ni> = 0.0",
        "  carry factor<i2i> = 1.0",
        "  for no in 0 .. 8:",
        "    v_sum_acc := v_sum_acc * factor",
        "    take arg1_1: v_arg1_1<ni, i3i>",
        "    v_sum<i2i, ni> = dot(i3i, i3i: v_arg0_1, v_arg1_1)",
        "    take arg2_1: v_arg2_1<i3i, ni>",
        "    v_sum_acc := dot(ni, ni: weights, v_arg2_1, v_sum_acc)",
        "    await v_sum<i2i, ni> but 1",
        "    free arg1_1",
        "    await v_sum_acc<i2i, i3i>",
        "    free arg2_1",
        "    weights := v_t_6",
        "    factor := v_exp",
        "  v_sum_acc := v_sum_acc * factor",
        "  take arg2_1: v_arg2_1<i3i, ni>",
        "  v_sum_acc := dot(ni, ni: weights, v_arg2_1, v_sum_acc)",
        "  await v_sum_acc<i2i, i3i>",
        "  free arg2_1",
        "  free tiles",
    ]


def counts(body: tuple[Statement, ...], name: str) -> list[bool]:
    """Return, for each time that a ring is filled or taken, whether that is in a loop."""
    loops = {id(s) for loop in body if isinstance(loop, For) for s in statements(loop.body)}
    found = (s for s in statements(body) if isinstance(s, Fill | Take) and s.ring.name == name)
    return [id(s) in loops for s in found]


def test_a_sum_that_is_only_stored_has_the_rows_of_its_terms() -> None:
    """A part of a split attention stores its maximum and its sum as they are."""
    queries, keys = (1, 1, 128, 64), (1, 1, 8192, 64)
    (seen,) = observe(attention, tensors(queries, keys, keys), target=find_target("sm_90"))
    made = gpu_pipeline(seen.graph, seen.name, race="fused", roles="cooperative")
    part = form_of(made.programs["k0_part"])
    values = (s for s in statements(part.program.body) if isinstance(s, Let | Update))
    turned = [s.var for s in values if isinstance(s.value, Var) and s.value.axes != s.var.axes]
    assert part.roles is not None and turned == []


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def test_a_tile_that_no_product_reads_is_loaded_from_its_slot_where_it_is_used() -> None:
    roles = form(biased, *SHAPES, (1, 16, 1024, 1024)).roles
    assert roles is not None
    load, multiply = print_split(roles).split("role multiply:\n")
    assert "fill arg3_1: v_arg3_1<" in load
    assert lines_of(multiply, "await v_sum<", "take arg3_1", "v_arg3_1<", "free arg3_1") == [
        "    await v_sum<i2i, ki> but 1",
        "    take arg3_1: v_arg3_1_tile<i2i, ki>",
        "    v_arg3_1<i2i, ki> = v_arg3_1_tile",
        "    free arg3_1",
    ]


def test_a_loop_with_a_mask_goes_on_with_the_weights_of_the_one_without() -> None:
    roles = form(causal, *SHAPES).roles
    assert roles is not None
    assert counts(roles.load, "arg2_1") == [False, True, True]
    assert counts(roles.multiply, "arg2_1") == [True, True, False]
    assert counts(roles.load, "arg1_1") == counts(roles.multiply, "arg1_1") == [True, True]


def test_loops_that_read_other_tensors_have_no_roles() -> None:
    """The weights of a loop's last iteration would be multiplied with another tensor's values."""
    found = form(causal, *SHAPES)
    assert split_nested(found.program, found.copies) is not None
    last = [s for s in found.program.body if isinstance(s, For)][-1]
    tile = [s.var for s in last.body if isinstance(s, Let) and s.var in found.copies][-1]
    (query, *_) = found.copies.values()
    other = replace(found.copies[tile], descriptor=query.descriptor)
    assert split_nested(found.program, {**found.copies, tile: other}) is None


def test_the_warp_that_loads_computes_where_a_loop_starts() -> None:
    roles = form(windowed, *SHAPES).roles
    assert roles is not None
    load, _ = print_split(roles).split("role multiply:\n")
    (made,) = re.findall(r"for \w+ in \[(\w+)\]", load)
    assert f"{made} = maximum(" in load


def test_the_first_values_are_zeros_from_behind_the_last_row() -> None:
    roles = form(attention, *SHAPES).roles
    assert roles is not None
    (copy,) = roles.copies.values()
    rows = copy.descriptor.shape[-2]
    assert copy.start[-2] is rows


def test_weights_are_rounded_when_tensor_cores_have_left_the_last_ones() -> None:
    """They are in the same registers."""
    roles = form(attention, *SHAPES).roles
    assert roles is not None
    (loop,) = (s for s in roles.multiply if isinstance(s, For))
    awaits = [n for n, s in enumerate(loop.body) if isinstance(s, Await)]
    products = (s.value for s in loop.body if isinstance(s, Update) and isinstance(s.value, Dot))
    (weights,) = (product.left for product in products)
    kind = weights.dtype, weights.axes
    made = [
        n
        for n, s in enumerate(loop.body)
        if isinstance(s, Let | Update) and (s.var.dtype, s.var.axes) == kind
    ]
    assert made and min(made) > max(awaits)


# -- gradients -------------------------------------------------------------------------------------


@functools.cache
def gradients(fn, *shapes: tuple[int, ...]) -> dict[str, Form]:
    """Return the forms of an attention's backward by what they store last.

    Sums in order take a kernel for each direction.
    """
    inputs = [x.requires_grad_() for x in tensors(*shapes)]
    options = Options(race="fused", roles="cooperative", cache=False, deterministic=True)
    target = find_target("sm_90")
    _, seen = observe(fn, inputs, train=True, options=options, target=target)
    made = take_through(seen, target, options).compiled
    assert made is not None
    forms = [form_of(program) for program in made.programs.values()]
    for one in forms:
        verify_form(one)
    return dict(zip(("queries", "keys"), forms, strict=True))


def test_a_tile_that_two_iterations_multiply_is_freed_by_the_second() -> None:
    roles = gradients(attention, *SHAPES)["keys"].roles
    assert roles is not None
    _, multiply = print_split(roles).split("role multiply:\n")
    wanted = ("take", "await", "free", "weights", "carry weights", "for", "v_sum")
    assert lines_of(multiply, *wanted, "v_exp<") == GRADIENT


GRADIENT = """\
  take tiles: v_primals_3<i2i, i3i>, v_primals_2<i2i, i3i>
  take primals_1: nothing<i3i, ki>
  take tangents_1: nothing<i3i, ki>
  carry weights<i2i, ki> = 0.0
  carry weights<i2i, ki> = 0.0
  for ko in 0 .. 16:
    take primals_1: v_primals_1<i3i, ki>
    v_sum_1<i2i, ki> = dot(i3i, i3i: v_primals_2, v_primals_1_1)
    take tangents_1: v_tangents_1<i3i, ki>
    v_sum<i2i, ki> = dot(i3i, i3i: v_primals_3, v_tangents_1_1)
    take primals_1 2 before: v_primals_1_before<i3i, ki>
    take tangents_1 2 before: v_tangents_1_before<i3i, ki>
    v_sum_acc := dot(ki, ki: weights, v_primals_1_before, v_sum_acc)
    v_sum_acc_1 := dot(ki, ki: weights, v_tangents_1_before, v_sum_acc_1)
    await v_sum_1<i2i, ki> but 3
    v_exp<i2i, ki> = exp2(v_power)
    await v_sum<i2i, ki> but 2
    await v_sum_acc<i2i, i3i>, v_sum_acc_1<i2i, i3i>
    free primals_1 1 before
    free tangents_1 1 before
    weights := v_t_4
    weights := v_t_5
  take primals_1 1 before: v_primals_1_before<i3i, ki>
  take tangents_1 1 before: v_tangents_1_before<i3i, ki>
  v_sum_acc := dot(ki, ki: weights, v_primals_1_before, v_sum_acc)
  v_sum_acc_1 := dot(ki, ki: weights, v_tangents_1_before, v_sum_acc_1)
  await v_sum_acc<i2i, i3i>, v_sum_acc_1<i2i, i3i>
  free primals_1
  free tangents_1
  free tiles""".splitlines()


def test_a_tile_that_is_in_registers_too_is_loaded_from_its_slot() -> None:
    """The queries' gradient sums what came in times what went out, before its loop."""
    roles = gradients(attention, *SHAPES)["queries"].roles
    assert roles is not None
    text = print_split(roles)
    assert "take tiles: v_tangents_1_tile<" in text and "= v_tangents_1_tile\n" in text
    assert "dot(i3i, i3i: v_tangents_1_tile, v_primals_3)" in text


def test_a_value_of_each_row_is_loaded_before_products_are_waited_for() -> None:
    roles = gradients(attention, *SHAPES)["keys"].roles
    assert roles is not None
    (loop,) = (s for s in roles.multiply if isinstance(s, For))
    loads = [n for n, s in enumerate(loop.body) if isinstance(s, Let) and isinstance(s.value, Load)]
    takes = [n for n, s in enumerate(loop.body) if isinstance(s, Take)]
    assert len(loads) == 2 and max(loads) < min(takes)


def test_loops_around_one_another_go_on_with_the_same_weights() -> None:
    """Keys that four heads share sum over these heads, too."""
    few = [(1, 32, 4096, 64), *[(1, 8, 4096, 64)] * 2]
    roles = gradients(grouped, *few)["keys"].roles
    assert roles is not None
    for body in (roles.load, roles.multiply):
        (outer,) = (s for s in body if isinstance(s, For))
        assert [type(s) for s in outer.body] == [For, For]
    assert counts(roles.load, "primals_1") == [False, True, True]


def test_what_reads_a_sum_between_loops_has_no_roles() -> None:
    """The product that lags would not be in it."""
    found = form(causal, *SHAPES)
    body = found.program.body
    at = next(n for n, s in enumerate(body) if isinstance(s, For))
    updates = (s for s in statements(body) if isinstance(s, Update))
    total = next(s.var for s in updates if isinstance(s.value, Dot))
    reader = Let(Var("reader", total.dtype, total.axes), Op("neg", (total,)))
    between = replace(found.program, body=(*body[: at + 1], reader, *body[at + 1 :]))
    assert split_nested(found.program, found.copies) is not None
    assert split_nested(between, found.copies) is None


def test_what_goes_by_pointers_has_no_roles() -> None:
    program = program_of(attention, *tensors(*SHAPES))
    assert program.roles == "cooperative"
    assert form_of(by_pointers(program)).roles is None
