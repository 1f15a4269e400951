"""The stages that rewrite what Dynamo captured, before AOTAutograd differentiates it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from fusec.frontend.aot.custom_operations import spell_out
from fusec.frontend.fx_passes.associative_scans import keep_scans_whole
from fusec.frontend.fx_passes.cat_prefixes import share_cat_prefixes
from fusec.frontend.fx_passes.counted_loops import scan_counted_loops
from fusec.frontend.fx_passes.equal_sizes import unify_sizes
from fusec.frontend.fx_passes.masked_writes import write_by_masks
from fusec.frontend.fx_passes.rolled_loops import roll_loops
from fusec.frontend.ops.interpolation import keep_gradients_whole
from fusec.passes.stage import Stage, alone


def changing(kind: str, name: str, does: str, rewrite: Callable[..., None], **more: Any) -> Stage:
    """Return a stage that changes an FX graph of some kind in place."""

    def run(gm: fx.GraphModule, context: Any) -> fx.GraphModule:
        rewrite(gm, context)
        return gm

    return Stage(name, does, run, kind, kind, **more)


def _roll_loops(gm: fx.GraphModule, context: Any) -> None:
    scan_counted_loops(gm)
    roll_loops(gm, context.machine.fusion.least_iterations)


_on_dynamo = partial(changing, "Dynamo's graph")

DYNAMO = (
    _on_dynamo(
        "associative_scans",
        "keep a scan by a known associative function as one operation (CPU)",
        alone(keep_scans_whole),
        only=lambda context: context.machine.is_cpu,
    ),
    _on_dynamo(
        "rolled_loops",
        "roll up unrolled loops: states by a recurrence or a scan, bodies with an axis more (CPU)",
        _roll_loops,
        only=lambda context: context.machine.is_cpu,
    ),
    _on_dynamo(
        "equal_sizes",
        "unify the symbolic lengths of an attention's keys and values",
        alone(unify_sizes),
    ),
    _on_dynamo(
        "whole_gradients",
        "keep the gradient of an interpolation as one operation",
        alone(keep_gradients_whole),
    ),
    _on_dynamo(
        "spell_out",
        "decompose `flex_attention`, and custom operations that write their arguments",
        alone(spell_out),
    ),
    _on_dynamo(
        "masked_writes", "turn writes under a boolean mask into `where`", alone(write_by_masks)
    ),
    _on_dynamo(
        "share_cat_prefixes",
        "let a `cat` whose first parts are another `cat`'s read that one",
        alone(share_cat_prefixes),
    ),
)
