"""Random products and attentions in kernels of fusec's own, run by Triton's interpreter.

Each is held to the rule of ``tests/support.py``: eager in the same type, and fp64. A failure prints
the smallest recipe that fails like it, as Python to run. More of them:

    FUZZ_PRODUCTS=1000-1200 pytest --slow tests/fuzz/test_products.py -k seeds
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.triton_backend  # noqa: F401 (registers the backends)
from tests.fuzz.patterns import Composite
from tests.fuzz.products import RESULTS, Attention, Model, Product, Recipe, shrunk
from tests.fuzz.serial import Serial
from tests.support import (
    HALF,
    TOLERANCE,
    assert_agree,
    check,
    compile_with,
    copy_inputs,
    named_leaves,
)

KINDS: dict[str, Any] = {"product": Product, "attention": Attention, "composite": Composite}
CPU_KINDS: dict[str, Any] = {"serial": Serial}
"""Of kernels that CPUs alone have."""
BATCH = 2
"""Models a test: enough to be worth a line, few enough to find the seed at once."""
EXCUSED = {
    ("attention", 157): "one key is left: a gradient is 0, and no error is small beside it",
    ("attention", 162): "ties of rounded values: of 4356 flags eager has 4 unlike fp64's, fusec 1",
    ("composite", 265): "7 flags of the like; the one that was looked at is fp64's",
    ("composite", 270): "`var_mean` of a row with an infinity: see docs/numerics.md",
    ("composite", 314): "the same",
}
"""Models that disagree with eager and are left out, by why."""
FIRST, _, LAST = os.environ.get("FUZZ_PRODUCTS", "").partition("-")


def check_recipe(recipe: Any, backend: str = "triton_fused") -> None:
    """Assert that a model computes what eager does; of dynamic ones, at two sizes.

    NaN is compared with eager's without oneDNN: with AMX, the row before one that has NaN is NaN in
    some of its products of `bf16` with an odd number of terms (3.12), and is not in fp64.
    """
    special = getattr(recipe, "special", False)
    with torch.backends.mkldnn.flags(enabled=False) if special else nullcontext():
        if recipe.dynamic:
            check_sizes(recipe, backend)
        else:
            tol = _tolerance(recipe)
            check(Model(recipe), *recipe.inputs(), train=recipe.train, backend=backend, tol=tol)


def check_sizes(recipe: Any, backend: str) -> None:
    """Assert that one compilation, with the extents symbolic that differ, serves two lengths."""
    torch._dynamo.reset()
    size = "m" if isinstance(recipe, Product) else "rows"
    longer = replace(recipe, **{size: getattr(recipe, size) + 19})
    model = Model(recipe)
    compiled = compile_with(model, backend, dynamic=None)
    for inputs in (recipe.inputs(), longer.inputs()):
        with torch.no_grad():
            eager, exact = (
                named_leaves(model(*copy_inputs(inputs, dtype=dtype)))
                for dtype in (None, torch.float64)
            )
            given = copy_inputs(inputs)
            for tensor, a, b in zip(given, recipe.inputs(), longer.inputs(), strict=True):
                for dim in range(a.dim()):
                    if a.shape[dim] != b.shape[dim]:
                        torch._dynamo.maybe_mark_dynamic(tensor, dim)
            found = named_leaves(compiled(*given))
        for (name, a), (_, b), (_, r) in zip(eager, found, exact, strict=True):
            where = f"output {name} of shape {tuple(a.shape)}"
            assert_agree(a, b, r, where, strides=True, tol=_tolerance(recipe))


def _tolerance(recipe: Any) -> float | None:
    """Return the tolerance of models that round to 16 bits: their f32 results, too."""
    if "bf16" in getattr(recipe, "steps", ()):
        return TOLERANCE[torch.bfloat16]
    dtype = getattr(torch, recipe.dtype)
    return TOLERANCE[dtype] if dtype in HALF else None


def failure(recipe: Recipe, backend: str) -> Exception | None:
    try:
        check_recipe(recipe, backend)
    except Exception as error:
        return error
    return None


def check_seed(seed: int, kind: str, backend: str = "triton_fused") -> None:
    """Check one model; where it fails, raise with the smallest that does so as well."""
    recipe = {**KINDS, **CPU_KINDS}[kind].draw(seed)
    error = failure(recipe, backend)
    if error is None:
        return
    small = shrunk(recipe, lambda r: type(failure(r, backend)) is type(error))
    last = failure(small, backend) or error
    raise AssertionError(
        f"seed {seed}: {last}\n"
        f"from {type(small).__module__} import {type(small).__name__}\n"
        "from tests.fuzz.test_products import check_recipe\n"
        f"check_recipe({small!r}, {backend!r})"
    ) from last


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", (0, pytest.param(BATCH, marks=pytest.mark.slow)))
def test_models_compute_what_eager_does(start: int, kind: str) -> None:
    for seed in range(start, start + BATCH):
        check_seed(seed, kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", (0, pytest.param(1, marks=pytest.mark.slow)))
def test_models_compute_the_same_by_kernels_for_cpus(seed: int, kind: str) -> None:
    check_seed(seed, kind, "fusec")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CPU_KINDS)
@pytest.mark.parametrize(
    "seed", range(24) if FIRST == "" else range(int(FIRST), int(LAST or FIRST))
)
def test_models_of_cpus_alone_compute_what_eager_does(seed: int, kind: str) -> None:
    check_seed(seed, kind, "fusec")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_models_compute_the_same_with_tiles_copied_by_descriptors(kind: str) -> None:
    for seed in (20, 21):
        check_recipe(replace(KINDS[kind].draw(seed), dtype="bfloat16"), "triton_tiles")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", range(int(FIRST or 100), int(LAST or 400), BATCH))
def test_models_of_more_seeds_compute_what_eager_does(start: int, kind: str) -> None:
    for seed in range(start, start + BATCH):
        if (kind, seed) not in EXCUSED:
            check_seed(seed, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_prints_as_python_that_makes_it_again(kind: str) -> None:
    names = {made.__name__: made for made in KINDS.values()}
    for seed in range(20):
        recipe = KINDS[kind].draw(seed)
        assert eval(repr(recipe), names) == recipe


def test_a_failure_shrinks_to_the_ingredients_it_needs() -> None:
    large = Product(k=17, m=100, steps=("gelu", "relu", "tanh"), layouts=("offset",), train=True)
    small = shrunk(large, lambda r: r.k == 17 and "relu" in r.steps)
    assert small == Product(k=17, steps=("relu",))


def test_a_wrong_model_is_reported_with_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda y: y + 0.1 * torch.compiler.is_compiling()  # noqa: E731
    monkeypatch.setitem(RESULTS, "wrong", wrong)
    large = Product(m=33, result="wrong", steps=("tanh",))
    monkeypatch.setitem(KINDS, "product", SimpleNamespace(draw=lambda seed: large))
    with pytest.raises(AssertionError, match=r"check_recipe\(Product\(.*m=16.*result='wrong'\)"):
        check_seed(0, "product")
