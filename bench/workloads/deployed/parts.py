"""Parts of transformers: an MLP of one row and of many, chains around norms, softmax, attention."""

from __future__ import annotations

from functools import partial

from bench.workload import DEPLOYED, Workload, modes
from bench.workloads import attention, norms, softmax
from bench.workloads.blocks import MlpBlock, sized


def rows() -> list[Workload]:
    causal = partial(attention.plain, sizes=(4, 8, 1024, 64))
    builds = {
        "layernorm+mlp 1x1024": sized(MlpBlock, 1, 1, 1024),
        "layernorm+mlp 256x1024": sized(MlpBlock, 1, 256, 1024),
        "residual+layernorm+gelu 4096x1024": norms.residual_layernorm_gelu,
        "masked softmax 8x12x256x256": softmax.masked_softmax,
        "attention, causal 4x8x1024x64": causal,
    }
    return [
        w for name, build in builds.items() for w in modes("core", name, build, ("fp32",), DEPLOYED)
    ]
