"""Which programs warps with roles can run, and what each role does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.targets import find_target
from fusec.codegen.triton.form import Form, by_pointers, print_form, verify_form
from fusec.codegen.triton.warp_specialization import print_split, split
from fusec.ir.index import index
from fusec.ir.program import For, Program
from fusec.tools.report.observe import observe
from tests.codegen.programs import form_of
from tests.codegen.triton.test_descriptors import tensors
from tests.triton_backend import gpu_pipeline


def program_of(fn, *inputs: torch.Tensor) -> Program:
    (seen,) = observe(fn, inputs, target=find_target("sm_90"))
    made = gpu_pipeline(seen.graph, seen.name, race="fused", roles="cooperative")
    (program,) = made.programs.values()
    return program


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.t())


def swiglu(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


def form(fn, *shapes: tuple[int, ...]) -> Form:
    found = form_of(program_of(fn, *tensors(*shapes)))
    verify_form(found)
    return found


def test_one_role_copies_what_the_other_multiplies() -> None:
    roles = form(linear, (256, 512), (512, 512)).roles
    assert roles is not None
    assert print_split(roles).splitlines() == [
        "role load:",
        "  for ko in 0 .. 8:",
        "    fill operands: v_arg1_1<i0i, ki> = arg1_1[65536*i0o + 64*ko + 512*i0i + ki], "
        "v_arg0_1<i1i, ki> = arg0_1[65536*i1o + 64*ko + 512*i1i + ki]",
        "role multiply:",
        "  carry v_sum_acc<i0i, i1i> = 0.0",
        "  for ko in 0 .. 8:",
        "    take operands: v_arg1_1<i0i, ki>, v_arg0_1<i1i, ki>",
        "    v_sum_acc := dot(ki, ki: v_arg1_1, v_arg0_1, v_sum_acc)",
        "    await v_sum_acc<i0i, i1i> but 1",
        "    free operands 1 before from the second ko on",
        "  await v_sum_acc<i0i, i1i>",
        "  free operands",
        "  v_maximum<i0i, i1i> = maximum(v_sum_acc, 0.0)",
        "  v_relu<i0i, i1i> = bf16(v_maximum)",
        "  relu[65536*i0o + 128*i1o + 512*i0i + i1i] = v_relu",
    ]


def test_two_products_of_one_left_operand_are_one() -> None:
    roles = form(swiglu, (256, 512), (512, 512), (512, 512)).roles
    assert roles is not None
    (fill,) = roles.fills
    ((both, sides),) = roles.sides.items()
    assert len(fill.loads) == 3 and set(sides) < {load.var for load in fill.loads}
    assert roles.copies[both].descriptor.tile == (256, 64)
    lines = print_split(roles).splitlines()
    (product,) = (line.strip() for line in lines if "dot(" in line)
    assert product.endswith(f", {both.name}, v_sum_acc_both)")
    assert "    await v_sum_acc_both<i0i, i1i> but 1" in lines
    assert "  halve v_sum_acc_both<i0i, i1i>: v_sum_acc<i0i, i1i>, v_sum_acc_1<i0i, i1i>" in lines


def test_products_of_two_left_operands_share_a_slot_and_are_awaited_together() -> None:
    def two(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.t()) * (y @ v.t())

    roles = form(two, (256, 512), (256, 512), (512, 512), (512, 512)).roles
    assert roles is not None and not roles.sides
    (fill,) = roles.fills
    assert len(fill.loads) == 4
    text = print_split(roles)
    assert "await v_sum_acc<i0i, i1i>, v_sum_acc_1<i0i, i1i> but 2\n" in text


def test_a_form_prints_its_roles_behind_its_program() -> None:
    found = form(linear, (256, 512), (512, 512))
    assert found.roles is not None
    assert print_form(found).endswith(print_split(found.roles))


def test_what_goes_by_pointers_has_no_roles() -> None:
    program = program_of(linear, *tensors((256, 512), (512, 512)))
    assert program.roles == "cooperative" and program.programs == 132
    pointers = by_pointers(program)
    assert form_of(pointers).roles is None and pointers.programs == 132


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (lambda x, w: torch.relu(torch.sin(x) @ w.t()), torch.bfloat16),
        (linear, torch.float32),
    ],
    ids=["an operand that is computed", "operands of f32"],
)
def test_what_does_more_than_multiply_tiles_has_no_roles(fn, dtype: torch.dtype) -> None:
    """No such plan is offered; were it, the program would print for all warps."""
    program = program_of(fn, *tensors((256, 512), (512, 512), dtype=dtype))
    assert program.roles == ""
    forced = replace(program, roles="cooperative", descriptors=True)
    assert form_of(forced).roles is None


@pytest.mark.parametrize("changed", [{"start": index(1)}, {"stops": (index(0),)}], ids=str)
def test_a_loop_that_may_run_no_time_or_begins_elsewhere_has_no_roles(changed) -> None:
    found = form(linear, (256, 512), (512, 512))
    assert split(found.program, found.copies) is not None
    body = tuple(replace(s, **changed) if isinstance(s, For) else s for s in found.program.body)
    assert split(replace(found.program, body=body), found.copies) is None
