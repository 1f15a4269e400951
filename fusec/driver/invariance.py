"""What ``batch_invariant`` asks of a graph: each check names what is in its way.

The order in which an element's terms are added is the same for each value of a named size, one
without a traced value (``frontend/named_sizes.py``), since

1. one code runs for all of them: Dynamo guards no such size, and all that plans by sizes takes a
   constant in its place (``UNSEEN``);
2. nothing is timed, and no setting of the process is asked (``Options.by_rule``);
3. a kernel's sums run in loops whose bounds have no size but those of their own terms
   (``ir/sum_order.py``), and none is added to memory: this is checked for each program;
4. no call of an eager kernel adds floats (``frontend/fallbacks.py``): this is checked, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fusec.errors import InternalError, UsageError
from fusec.frontend.fallbacks import is_exact
from fusec.ir.definition import by_name, sizes_in_axes
from fusec.ir.graph import Schedule, all_launches, launched_externs
from fusec.ir.program import Program
from fusec.ir.sum_order import axes_of_terms, sizes_of_sums
from fusec.torch_interior import EXAMPLE


def check_named(gm: fx.GraphModule) -> None:
    """Check that a size of a Dynamo graph's inputs is named, and that one layout serves its values.

    Where the named axis has size 1, its stride says nothing: a tensor whose rows are not outermost
    for 2 of them may be row-major for 1, which would be another graph, with another order of sums.

    Raises:
        UsageError: if no size is named, or a named axis does not stand in memory as in the shape.
    """
    inputs = [node.meta.get(EXAMPLE) for node in gm.graph.find_nodes(op="placeholder")]
    sized = [value for value in inputs if isinstance(value, torch.Tensor | torch.SymInt)]
    if not any(map(free_unbacked_symbols, sized)):
        raise UsageError(
            "batch_invariant: no size of this graph's inputs is named: it would be compiled for "
            "these sizes alone. Call fusec.name_size(x, 0) for each input x whose axis 0 is the "
            "batch, before each call: an input that is not named fixes the size of all. Compile "
            "with fullgraph=True: behind a graph break no size has its name."
        )
    for tensor in sized:
        if isinstance(tensor, torch.Tensor) and not all(
            stands_in_order(tensor, axis)
            for axis, size in enumerate(tensor.shape)
            if free_unbacked_symbols(size)
        ):
            shape, strides = (list(map(str, n)) for n in (tensor.shape, tensor.stride()))
            raise UsageError(
                f"batch_invariant: an input of shape [{', '.join(shape)}] has the strides "
                f"[{', '.join(strides)}]: rows of a named axis have to stand in memory as in the "
                "shape, or a single one would be another layout. Pass "
                "x.clone(memory_format=torch.contiguous_format)."
            )


def stands_in_order(tensor: torch.Tensor, axis: int) -> bool:
    """Return True if the axes before a named one are outside of it in memory, others inside."""
    symbols = free_unbacked_symbols(tensor.shape[axis])
    outside = [bool(symbols & free_unbacked_symbols(stride)) for stride in tensor.stride()]
    if outside != [k < axis for k in range(tensor.dim())]:
        return False
    strides = tensor.stride()
    inside = [strides[k] * (tensor.shape[k] - 1) for k in range(axis + 1, tensor.dim())]
    known = all(isinstance(n, int) for n in (strides[axis], *inside))
    return not known or strides[axis] > sum(inside)


def check_invariance(
    gm: fx.GraphModule, schedule: Schedule, programs: Mapping[str, Program]
) -> None:
    """Check that the order of each sum of a graph depends on the number of its own terms alone.

    Raises:
        UsageError: naming calls of eager kernels that add floats.
        InternalError: naming a kernel whose loops have the size of something else in their bounds.
    """
    nodes = {node.name: node for node in gm.graph.nodes}
    calls = launched_externs(schedule)
    adding = [call for call in calls if call.node not in nodes or not is_exact(nodes[call.node])]
    if adding:
        refuse("; ".join(dict.fromkeys(f"{call.title} ({call.reason})" for call in adding)))
    for launch in all_launches(schedule):
        if programs[launch.name].added:
            raise InternalError(
                f"sums of {launch.name} have no order: programs add to memory",
                stage="batch_invariant",
            )
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
