"""Programs that fusec once got wrong, as random programs showed them, shrunk."""

from __future__ import annotations

import pytest

from tests.fuzz.patterns import Composite
from tests.fuzz.products import Attention
from tests.fuzz.programs import Input, Program, check_program
from tests.fuzz.test_products import check_recipe

FOUND = {
    "private arrays of unknown length inside a loop": Program(
        seed=133,
        inputs=(Input("daac", "float64"),),
        lines=(
            "v0 = torch.var_mean(a0, 2)[0][:, None]",
            "v1 = F.layer_norm(v0, v0.shape[-1:])",
            "v2 = v1.prod(2) * 0.1",
        ),
        outputs=("v2",),
        dynamic=True,
    ),
    "a sum over what an axis beside it was cut into": Program(
        seed=2797,
        inputs=(Input("bb", "float32"), Input("ffbb", "bfloat16")),
        lines=("v0 = a0.sum(1)", "v1 = a1 @ v0.to(a1.dtype)"),
        outputs=("v1",),
    ),
    "a factor of integers that is none": Program(
        seed=1970,
        inputs=(Input("bda", "int64"),),
        lines=("v0 = torch.addcmul(a0, a0, a0, value=1.5)",),
        outputs=("v0",),
    ),
    "a size that is always 1, and broadcast, but no symbol": Program(
        seed=5689,
        inputs=(Input("f", "float32"), Input("e", "float32")),
        lines=("v0 = a0.chunk(2, 0)[-1]", "v3 = v0 * a1"),
        outputs=("v3",),
        dynamic=True,
    ),
    "a sum below a sum that is guarded along the inner one's axis": Program(
        seed=491,
        inputs=(Input("fb", "float32"),),
        lines=("v0 = a0.diagonal()", "v1 = v0.expand(2, *v0.shape)", "v6 = F.normalize(v1, dim=1)"),
        outputs=("v6",),
        train=True,
    ),
    "an output that is found in a changed input by its place in memory": Program(
        seed=5210,
        inputs=(Input("ead", "float32", "offset"),),
        lines=("a0[1:] = 2", "v4 = a0.flatten(0, 1)"),
        outputs=("v4",),
        dynamic=True,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_was_wrong_is_right(name: str) -> None:
    check_program(FOUND[name])


def test_an_operand_of_a_product_may_be_read_by_what_is_stored() -> None:
    recipe = Composite("float32", (), False, False, False, 5015, pattern="gradient step")
    check_recipe(recipe, "triton_fused")


def test_what_is_compared_with_its_maximum_in_the_backward_is_not_computed_again() -> None:
    recipe = Attention(
        "float32", (), False, True, False, 5045, before="normalised", outcome="largest weight"
    )
    check_recipe(recipe, "triton_fused")


def test_a_nan_that_onednn_spreads_to_another_row_is_none_to_compare_with() -> None:
    recipe = Composite(
        "bfloat16",
        ("expanded",),
        seed=105,
        pattern="normalised rows of scores",
        batch=2,
        rows=64,
        others=3,
        special=True,
    )
    check_recipe(recipe, "triton_fused")
