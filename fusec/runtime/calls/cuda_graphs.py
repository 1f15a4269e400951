"""Record compiled graphs as CUDA graphs, through torch's own cudagraph trees.

The trees (``torch._inductor.cudagraph_trees``) do the work: a first call to warm up, a recording
for each tuple of symbolic sizes, one memory pool for forward and backward, copies of inputs whose
addresses change, torch's random generator. This module decides which graphs may be recorded, and
which facts of a graph the trees get. Their interface is private to torch, so its parameters are
inspected before it is called; where it has changed, graphs run unrecorded.

A graph that is not recorded runs as it is, and the reason is logged once. A call takes one list and
empties it, as in ``runtime/calls/executable.py``.

Worked example, one recorder for the graphs of one forward and its backward::

    recorder = Recorder()
    forward = recorder.record(forward_call, forward_graph, "forward")
    backward = recorder.record(backward_call, backward_graph, "backward")
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import operator
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from fusec.runtime.calls.executable import BoxedCall
from fusec.torch_interior import (
    HigherOrderOperator,
    OpOverload,
    TracingContext,
    pytree,
    tensors_in,
    written_arguments,
)

logger = logging.getLogger("fusec.compile")

REQUIRED = {"device_index", "is_backward", "is_inference"}
"""Parameters that the trees must have; others are passed if this version has them."""

_TREES = "torch._inductor.cudagraph_trees"
_ON_HOST = {
    "cond", "while_loop", "map_impl", "scan", "run_and_save_rng_state", "run_with_rng_state",
}  # fmt: skip
"""Higher-order operations that read tensors, or a generator's state, on the host."""


class Recorder:
    """Records the graphs that AOTAutograd made of one graph of Dynamo.

    A backward is recorded if its forward was: only then do saved tensors keep their addresses.
    """

    def __init__(self) -> None:
        self._forward_device: int | None = None

    def record(self, call: BoxedCall, gm: fx.GraphModule, name: str) -> BoxedCall:
        """Return a call that records at its first calls and replays from then on, or ``call``.

        Args:
            gm: what ``call`` computes; its placeholders are the list's items.
            name: "forward", "backward" or "inference".
        """
        backward = name == "backward"
        if backward and self._forward_device is None:
            _say("its forward is not recorded", alarm=False)
            return call
        static = static_inputs(gm, backward=backward)
        reason = obstacle(gm, static) or interface_problem()
        if reason is not None:
            _say(reason, alarm=any(d.type == "cuda" for d in devices(gm)))
            return _between_recordings(call, self._forward_device) if backward else call
        (only,) = devices(gm)
        device = torch.cuda.current_device() if only.index is None else only.index
        if name == "forward":
            self._forward_device = device
        return _recorded(call, static, facts(gm, name, device))


def reset() -> None:
    """Forget all recordings of this process, and free their memory."""
    _say.cache_clear()
    if _TREES in sys.modules:
        _trees().reset_cudagraph_trees()


# -- what may be recorded --------------------------------------------------------------------------


def obstacle(gm: fx.GraphModule, static: Collection[int]) -> str | None:
    """Return why a graph cannot be recorded, or None.

    Args:
        static: positions of inputs whose addresses do not change.
    """
    found = devices(gm)
    if not any(device.type == "cuda" for device in found):
        return "it does not run on a CUDA device"
    if len(found) > 1:
        return f"it uses several devices: {', '.join(sorted(map(str, found)))}"
    if mutated := sorted(mutated_inputs(gm) - set(static)):
        names = [gm.graph.find_nodes(op="placeholder")[position].name for position in mutated]
        return f"it writes to inputs whose memory may move: {', '.join(names)}"
    for node in gm.graph.nodes:
        if node.op == "call_function" and (problem := _host_problem(node)):
            return f"{problem} ({node.name})"
    return _input_problem(gm) or _torch_objection(gm)


def devices(gm: fx.GraphModule) -> set[torch.device]:
    """Return the devices of all tensors of a graph; those without memory ("meta") do not count."""
    found = {tensor.device for node in gm.graph.nodes for tensor in _tensors(gm, node)}
    return {device for device in found if device.type != "meta"}


def mutated_inputs(gm: fx.GraphModule) -> set[int]:
    """Return the positions of inputs that an operation writes to, directly or by a view."""
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        for tensor in _tensors(gm, node):
            owners[tensor.untyped_storage()._cdata].add(position)
    found: set[int] = set()
    for node in gm.graph.nodes:
        for argument in written_arguments(node):
            for tensor in _tensors(gm, argument):
                found |= owners.get(tensor.untyped_storage()._cdata, set())
    return found


def static_inputs(gm: fx.GraphModule, *, backward: bool) -> list[int]:
    """Return the positions of inputs that are at the same address in each call.

    Of a forward or an inference graph these are parameters and buffers, as AOTAutograd knows them;
    of a backward, what its forward saved.
    """
    if backward:
        marks = ("tangents", "bwd_seed", "bwd_base_offset", "bwd_rng_state")  # with gradients
        return [
            position
            for position, node in enumerate(gm.graph.find_nodes(op="placeholder"))
            if isinstance(node.meta.get("val"), torch.Tensor)
            and not any(mark in node.name for mark in marks)
        ]
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return list(getattr(metadata, "static_input_indices", None) or ())


def _host_problem(node: fx.Node) -> str | None:
    """Return why an operation needs the host, or None."""
    target = node.target
    tags = target.tags if isinstance(target, OpOverload) else ()
    if torch.Tag.data_dependent_output in tags:
        return "a number that the host reads"
    if getattr(torch.Tag, "cudagraph_unsafe", None) in tags:  # not in each version of torch
        return "an operation that is marked as unsafe in CUDA graphs"
    if isinstance(target, HigherOrderOperator) and target.name() in _ON_HOST:
        return "control flow, or a generator's state, on the host"
    if _has_boolean_index(node):
        return "a boolean index, which the host counts"
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            return "a sparse tensor"
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and (
            free_unbacked_symbols(value)
        ):
            return "a size that depends on data"
    return None


_PLACES = "List[Optional[Tensor]]"


def _has_boolean_index(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    pairs = () if schema is None else zip(schema.arguments, node.args, strict=False)
    # Places along each axis, or None: what index, index_put and their kin take.
    lists: list[Any] = [given for argument, given in pairs if str(argument.type) == _PLACES]
    indices = [a for given in lists for a in given if isinstance(a, fx.Node)]
    kinds = (torch.bool, torch.uint8)
    return any(getattr(index.meta.get("val"), "dtype", None) in kinds for index in indices)


def _torch_objection(gm: fx.GraphModule) -> str | None:
    """Return why torch's own list of operations, which has a few more, rejects a graph."""
    try:
        # Local: only graphs that may be recorded need it.
        from torch._inductor.utils import get_first_incompatible_cudagraph_node
    except ImportError:
        return None
    node = get_first_incompatible_cudagraph_node(gm)
    return f"an operation that torch does not record ({node.name})" if node is not None else None


def _input_problem(gm: fx.GraphModule) -> str | None:
    """Return why integer inputs alone do not tell a graph's calls apart, or None."""
    given: set[Any] = set()
    needed: set[Any] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            given |= free_symbols(value)
        elif isinstance(value, torch.Tensor):
            needed |= free_symbols(value)
        elif not isinstance(value, int | None):
            return f"an input that is neither a tensor nor an integer ({node.name})"
    if needed - given:
        missing = ", ".join(sorted(map(str, needed - given)))
        return f"a size that is no input of its own: {missing}"
    return None


# -- arguments of the trees ------------------------------------------------------------------------


def facts(gm: fx.GraphModule, name: str, device_index: int) -> dict[str, Any]:
    """Return the arguments by which torch's trees get the facts of a graph."""
    return {
        "device_index": device_index,
        "is_backward": name == "backward",
        "is_inference": name == "inference",
        "stack_traces": [n.stack_trace if n is not None else None for n in _outputs(gm)],
        "constants": tuple(_constants(gm)),
        "placeholders": _placeholder_info(gm),
        "mutated_input_idxs": tuple(sorted(mutated_inputs(gm))),
    }


def _recorded(call: BoxedCall, static: Sequence[int], told: dict[str, Any]) -> BoxedCall:
    """Return ``call`` as the trees wrap it.

    They wrap it at the first call, because they look for integers among the inputs, which are
    symbols while a graph is compiled.
    """
    run: BoxedCall | None = None

    def recorded(args: list[Any]) -> Any:
        nonlocal run
        if run is None:
            taken = _parameters(_trees())
            known = {name: v for name, v in told.items() if taken is None or name in taken}
            run = _trees().cudagraphify_impl(call, args, static, **known)
        return run(args)

    return recorded


def _between_recordings(call: BoxedCall, device_index: int | None) -> BoxedCall:
    """Return an unrecorded backward that tells the trees, which recorded its forward, that it runs.

    Otherwise they would wait for a backward of that forward.
    """

    def plain(args: list[Any]) -> Any:
        manager = _trees().get_manager(device_index, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return call(args)

    return plain


def _trees() -> Any:
    # Local: it takes half a second to import, and only graphs that are recorded need it.
    return importlib.import_module(_TREES)


def interface_problem() -> str | None:
    """Return what torch's trees lack in this version of torch, or None."""
    try:
        trees = _trees()
        needed = ("cudagraphify_impl", "reset_cudagraph_trees", "get_manager")
        absent = {name for name in needed if not hasattr(trees, name)}
        taken = _parameters(trees) if not absent else None
    except Exception as error:  # whatever its import raises: the model runs without recordings
        return f"torch's cudagraph trees do not load: {type(error).__name__}: {error}"
    absent |= REQUIRED - taken if taken is not None else set()
    return f"torch's cudagraph trees have no {', '.join(sorted(absent))}" if absent else None


def _parameters(trees: Any) -> set[str] | None:
    """Return the names of the trees' parameters; None if they take any."""
    inner = getattr(trees, "cudagraphify", trees.cudagraphify_impl)
    parameters = inspect.signature(inner).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


def _placeholder_info(gm: fx.GraphModule) -> Sequence[Any]:
    """Return descriptions of the inputs for the trees' messages; () if torch has none."""
    try:
        from torch._inductor.cudagraph_utils import get_placeholder_info  # local, as above
    except ImportError:
        return ()
    return list(get_placeholder_info(gm.graph))


# -- graphs ----------------------------------------------------------------------------------------


@functools.cache
def _say(reason: str, *, alarm: bool) -> None:
    """Log once per process why a graph is not recorded; as a warning if ``alarm``."""
    logger.log(
        logging.WARNING if alarm else logging.INFO,
        "CUDA graphs: a graph runs without being recorded: %s",
        reason,
    )


def _outputs(gm: fx.GraphModule) -> list[fx.Node | None]:
    """Return a graph's outputs; None for a result that is no node."""
    (results,) = gm.graph.output_node().args
    results = results if isinstance(results, tuple | list) else (results,)
    return [node if isinstance(node, fx.Node) else None for node in results]


def _constants(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Yield the tensors that are part of the module: they outlive each call."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(gm)
        if isinstance(value, torch.Tensor):
            yield value


def _tensors(gm: fx.GraphModule, node: fx.Node) -> list[torch.Tensor]:
    """Return a node's traced tensors; for an untraced ``get_attr``, the attribute itself."""
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(gm)
    return tensors_in(value)
