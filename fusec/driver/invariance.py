"""What ``batch_invariant`` asks of a graph: each check names what is in its way.

The order in which an element's terms are added is the same for each value of a named size, one
without a traced value (``frontend/named_sizes.py``), since

1. one code runs for all of them: Dynamo guards no such size, and all that plans by sizes takes a
   constant in its place (``UNSEEN``);
2. nothing is timed, and no setting of the process is asked (``Options.by_rule``);
3. a kernel's sums run in loops whose bounds have no size but those of their own terms
   (``ir/sum_order.py``): this is checked for each program;
4. no call of an eager kernel adds floats (``frontend/exact_calls.py``): this is checked, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusec.errors import InternalError, UsageError
from fusec.frontend.exact_calls import is_exact
from fusec.ir.definition import by_name, sizes_in_axes
from fusec.ir.graph import Schedule, all_launches, launched_externs
from fusec.ir.program import Program
from fusec.ir.sum_order import axes_of_terms, sizes_of_sums


def check_named(inputs: Sequence[Any]) -> None:
    """Check that some size of a graph's inputs is named.

    Raises:
        UsageError: if none has: the graph would be compiled for these sizes alone.
    """
    if any(free_unbacked_symbols(i) for i in inputs if isinstance(i, torch.Tensor | torch.SymInt)):
        return
    raise UsageError(
        "batch_invariant: no size of this graph's inputs is named, so that it would be compiled "
        "for these sizes alone. Call fusec.name_size(x, 0) for each input x whose axis 0 is the "
        "batch, before each call, and compile with fullgraph=True: behind a graph break no size "
        "has its name."
    )


def check_invariance(
    gm: fx.GraphModule, schedule: Schedule, programs: Mapping[str, Program]
) -> None:
    """Check that the order of each sum of a graph depends on the number of its own terms alone.

    Raises:
        UsageError: naming calls of eager kernels that add floats.
        InternalError: naming a kernel whose loops have the size of something else in their bounds.
    """
    nodes = {node.name: node for node in gm.graph.nodes}
    adding = [call for call in launched_externs(schedule) if not is_exact(nodes[call.node])]
    if adding:
        refuse("; ".join(dict.fromkeys(f"{call.title} ({call.reason})" for call in adding)))
    for launch in all_launches(schedule):
        own = sizes_in_axes(axes_of_terms(launch.kernels))
        others = sizes_of_sums(programs[launch.name]) - own
        if others:
            names = ", ".join(size.name for size in by_name(others))
            raise InternalError(
                f"sums of {launch.name} run in loops over {names}, which are not their terms",
                stage="batch_invariant",
            )


def refuse(what: str) -> None:
    """Raise UsageError for something that runs as eager kernels, which may add floats."""
    raise UsageError(
        "batch_invariant: the order in which these eager kernels add is not known, and may "
        f"depend on the size of the batch: {what}. Compute them outside of the compiled function, "
        "or give their operation a decomposition (fusec.register_decomposition)."
    )
