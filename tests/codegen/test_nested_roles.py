"""Which loops of two products warps with roles can run, and in which order they do."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
import torch.nn.functional as F

from fusec.codegen.nested_roles import split_nested
from fusec.codegen.roles import print_split
from fusec.codegen.triton_form import form_of
from fusec.ir.program import Await, Fill, For, Let, Statement, Take, Update, statements
from tests.codegen.test_descriptors import tensors
from tests.codegen.test_roles import form, program_of


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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
        "  take queries: v_arg0_1<i2i, i3i>",
        "  carry weights<i2i, ni> = 0.0",
        "  carry factor<i2i> = 1.0",
        "  for no in 0 .. 8:",
        "    v_sum_acc := v_sum_acc * factor",
        "    take keys: v_arg1_1<ni, i3i>",
        "    v_sum<i2i, ni> = dot(i3i, i3i: v_arg0_1, v_arg1_1)",
        "    take values: v_arg2_1<i3i, ni>",
        "    v_sum_acc := dot(ni, ni: weights, v_arg2_1, v_sum_acc)",
        "    await v_sum<i2i, ni> but 1",
        "    free keys",
        "    await v_sum_acc<i2i, i3i>",
        "    free values",
        "    weights := v_t_6",
        "    factor := v_exp",
        "  v_sum_acc := v_sum_acc * factor",
        "  take values: v_arg2_1<i3i, ni>",
        "  v_sum_acc := dot(ni, ni: weights, v_arg2_1, v_sum_acc)",
        "  await v_sum_acc<i2i, i3i>",
        "  free values",
        "  free queries",
    ]


def counts(body: tuple[Statement, ...], name: str) -> list[bool]:
    """Return, for each time that a ring is filled or taken, whether that is in a loop."""
    loops = {id(s) for loop in body if isinstance(loop, For) for s in statements(loop.body)}
    found = (s for s in statements(body) if isinstance(s, Fill | Take) and s.ring.name == name)
    return [id(s) in loops for s in found]


def test_a_loop_with_a_mask_goes_on_with_the_weights_of_the_one_without() -> None:
    roles = form(causal, *SHAPES).roles
    assert roles is not None
    assert counts(roles.load, "values") == [False, True, True]
    assert counts(roles.multiply, "values") == [True, True, False]
    assert counts(roles.load, "keys") == counts(roles.multiply, "keys") == [True, True]


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
    assert roles is not None and roles.weights is not None
    (loop,) = (s for s in roles.multiply if isinstance(s, For))
    awaits = [n for n, s in enumerate(loop.body) if isinstance(s, Await)]
    kind = roles.weights.dtype, roles.weights.axes
    made = [
        n
        for n, s in enumerate(loop.body)
        if isinstance(s, Let | Update) and (s.var.dtype, s.var.axes) == kind
    ]
    assert made and min(made) > max(awaits)


def test_an_attention_of_256_features_has_no_roles() -> None:
    """Its sums would take all registers."""
    program = program_of(attention, *tensors(*[(4, 16, 1024, 256)] * 3))
    assert program.roles == ""
    pointers = replace(program, roles="cooperative", descriptors=False)
    assert form_of(pointers).roles is None
