"""Before and after: what each stage makes of a small program, as text, in ``tests/golden/stages``.

What is longer than a page is shown as its changed lines.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import pytest

from fusec.driver.stages import all_stages
from fusec.tools.dumps import printed
from tests.stages import step_of
from tests.support import TORCH

EXAMPLES = {
    "associative_scans": "recurrence",
    "rolled_loops": "unrolled",
    "equal_sizes": "lengths",
    "whole_gradients": "upsample",
    "spell_out": "flex",
    "masked_writes": "masked",
    "share_cat_prefixes": "dense",
    "fold_channels": "scaled",
    "widen": "narrow",
    "widen_images": "narrow images",
    "memory_formats": "images",
    "channel_products": "mixed",
    "winograd": "filter",
    "short_convolutions": "windows",
    "draws": "dropout",
    "freeze": "scaled",
    "softmax_gradients": "weights",
    "summed_products": "steps",
    "partition": "upsample",
    "capture": "norm",
    "eager_rounding": "rounding",
    "chunk": "loss",
    "simplify": "parts",
    "dead_code": "twice",
    "share": "twice",
    "row_parts": "statistics",
    "split_reduction": "columns",
    "inline": "norm",
    "recompute": "attention",
    "fuse": "norm",
    "library_epilogue": "behind",
    "store_parts": "parts",
    "split_loop": "product",
    "contract": "products",
    "loops": "loss",
    "libraries": "library",
    "layouts": "walks",
    "in_place": "cache",
    "fuse_horizontally": "step",
    "memory": "columns",
    "infinite_masks": "least",
    "online_softmax": "attention",
    "unroll_rows": "rows",
    "nested_sums": "nested",
    "coalesce": "parts",
    "factor_groups": "groups",
    "unroll_pairs": "pairs",
    "unroll_parts": "stack",
    "unroll_windows": "windows",
    "unroll_terms": "terms",
    "scans": "running",
    "plan": "norm",
    "lower": "norm",
    "vector_tiles": "tiles",
    "parametrize": "widths",
    "base_two": "attention",
    "guard_gathers": "gathered",
    "sink": "attention",
    "orient": "products",
    "copy_tiles": "product",
    "join_pairs": "pairs of a GPU",
    "specialize_warps": "roles",
    "approximate": "statistics",
}
CARRIED = ("rolled_loops", "capture", "loops", "memory")
"""Stages that know what a loop carries, each with a second golden."""
UNSEEN = {
    "wide_products": "tags nodes, which no printed form shows",
    "unread": "drops what inlining leaves, and that drops what it inlined",
}
FX = [s.name for s in all_stages() if "graph" in s.takes and s.takes != "Graph"]
LINES = 60
"""A golden shows one idea."""


def test_every_stage_has_a_golden_or_a_reason() -> None:
    assert {stage.name for stage in all_stages()} == EXAMPLES.keys() | UNSEEN.keys()


@pytest.mark.parametrize("stage", EXAMPLES)
def test_a_stage_makes_what_its_golden_shows(
    stage: str, golden: Callable[[str, str], None]
) -> None:
    # A training step is as AOTAutograd traced it: torch 2.15 has one comparison more.
    if stage in (*FX, "chunk") and TORCH != (2, 13):
        pytest.skip("names and order of an FX graph are those of torch 2.13")
    step = step_of(stage, EXAMPLES[stage])
    text = shown(stage, step.text, printed(step.after)())
    assert len(text.splitlines()) <= LINES, f"{len(text.splitlines())} lines"
    golden(f"stages/{stage}", text)


@pytest.mark.parametrize("stage", CARRIED)
def test_a_loop_that_carries_state_goes_through_stages_of_its_own(
    stage: str, golden: Callable[[str, str], None]
) -> None:
    if stage in FX and TORCH != (2, 13):
        pytest.skip("names and order of an FX graph are those of torch 2.13")
    step = step_of(stage, "carried")
    text = shown(stage, step.text, printed(step.after)())
    assert len(text.splitlines()) <= LINES, f"{len(text.splitlines())} lines"
    golden(f"stages/{stage}_carried", text)


def shown(stage: str, before: str, after: str) -> str:
    """Return both texts, or where that is too long their difference."""
    lines, others = (list(map(plain, filter(is_shown, t.splitlines()))) for t in (before, after))
    if len(lines) + len(others) < LINES - 3:
        return "\n".join((*lines, "", f"-- {stage}", "", *others))
    changed = difflib.unified_diff(lines, others, "before", stage, n=0, lineterm="")
    return "\n".join(changed)


def is_shown(line: str) -> bool:
    """Return False for the comments of an FX graph, which name files."""
    return bool(line.strip()) and not line.strip().startswith("#")


def plain(line: str) -> str:
    """Return a line without what an FX graph says of lifetimes, and shorter."""
    code = re.sub(r";( +\w+ =)+ None$", "", line.rstrip())
    return code.replace("torch.ops.aten.", "aten.").replace(", pin_memory = False", "")
