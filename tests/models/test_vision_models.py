"""ViT, a residual network and a multi-layer perceptron against eager."""

from __future__ import annotations

import pytest
import torch

import fusec
from tests.models.zoo import (
    ATTENTIONS,
    ConvNextBlock,
    ResidualBlock,
    mlp,
    resnet,
    seeded_model,
    vit,
)
from tests.support import BACKEND, TRAINED, check, values, with_layout


@pytest.mark.first
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_logits_of_vit_match_eager(attention):
    check(vit(attention, layers=1), values(2, 3, 24, 24), tol=1e-4)


@pytest.mark.slow
def test_gradients_of_vit_match_eager():
    check(vit().train(), values(2, 3, 24, 24), train=True, tol=1e-4)


@pytest.mark.first
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_resnet_in_eval_mode_matches_eager(layout):
    check(resnet(), with_layout(values(2, 3, 14, 10), layout), tol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_resnet_training_matches_eager_and_updates_running_statistics(layout):
    # `check` compares the buffers after the call, and so the running statistics.
    model = resnet().train()
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    check(model, with_layout(values(4, 3, 14, 10), layout), train=True, tol=1e-4)


@pytest.mark.first
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_convnext_block_matches_eager_in_either_layout(layout):
    # `check` compares strides: the permutations keep channels last where they were.
    block = seeded_model(lambda: ConvNextBlock(12))
    check(block, with_layout(values(2, 12, 9, 8), layout), train=layout == "channels_last")


@pytest.mark.sampled(3)
@pytest.mark.skipif(BACKEND != "fusec", reason="counts fusec's kernels")
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("kind", ("residual", "convnext"))
def test_what_follows_a_convolution_is_one_kernel(kind, layout):
    """Norm, ReLU and residual are one kernel each time; so are LayerNorm, GELU, scaled residual."""
    residual = kind == "residual"
    # Of few channels, fusec's own kernels might run the products.
    block = seeded_model(lambda: ResidualBlock(32, 32, 1) if residual else ConvNextBlock(32))
    (graph,) = fusec.explain(block, with_layout(values(2, 32, 9, 8), layout)).graphs
    last = layout == "channels_last"  # then a depthwise convolution is a kernel, and its weight
    assert len(graph.kernels) == (2 if residual else 3 + last)
    # Of images in channels last, a 1 x 1 convolution is a product.
    convolutions = (2 if last else 3) if residual else int(not last)
    products = int(last) if residual else 2
    found = [extern.op for extern in graph.externs]
    assert found == ["convolution.default"] * convolutions + ["mm.default"] * products


@TRAINED
def test_mlp_matches_eager(train):
    check(mlp(), values(17, 33), train=train)


@pytest.mark.slow
@pytest.mark.sampled(2)
@TRAINED
def test_mlp_of_other_dtypes_matches_eager(train):
    check(mlp().to(torch.bfloat16), values(17, 33, dtype=torch.bfloat16), train=train, tol=2e-2)
    check(mlp().double(), values(17, 33, dtype=torch.float64), train=train)
