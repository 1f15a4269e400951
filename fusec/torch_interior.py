"""Torch's private interfaces: the compiler's only module that uses them.

Tested with torch 2.11, 2.13 and 2.15, which all have these names. Only CUDA graph trees are used
elsewhere, by ``runtime/calls/cuda_graphs.py``, which checks for each part and does without if need
be.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass
from torch._decomp import _core_aten_decompositions_post_autograd as core_decompositions
from torch._decomp import get_decompositions
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, disable, maybe_mark_dynamic, symbolic_convert
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import SkipFrame, TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._dynamo.utils import counters, dynamo_timed, get_debug_dir
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.autograd_function import autograd_function_apply
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
from torch._higher_order_ops.flex_attention import _math_attention_inner as flex_scores
from torch._higher_order_ops.partitioner import HopJointGraph
from torch._logging import getArtifactLogger, trace_structured
from torch._logging.structured import INTERN_TABLE
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.autograd import _unsafe_preserve_version_counter as keep_versions
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
from torch.fx.experimental import _config as symbols_config
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as tracing_nothing
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import _get_qualified_name as qualified_name
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _disable_current_modes as disable_modes
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils.checkpoint import CheckpointPolicy

gradient_function: Callable[[], Any] = torch._C._current_autograd_node
"""Return the autograd function that runs in this thread, or None."""

EXAMPLE = "example_value"
"""The key under which Dynamo keeps a node's traced value in its ``meta``."""

SCANS_HAVE_GRADIENTS = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""Whether torch differentiates its scan. In torch 2.11 gradients are wrong where the first state
needs none, and a trace ends where the backward returns what it is given."""

data_of: object = getattr(torch._C._autograd, "_get_data_attr", None)
"""The callee of ``x.data`` in Dynamo's graphs."""


fake_mode: Callable[[], object | None] = functools.partial(
    torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
)
"""Return the ``FakeTensorMode`` that is on, or None."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bound_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, those left out at their defaults."""
    known = target._schema.arguments
    given = {a.name: value for a, value in zip(known, args, strict=False)}
    return {**{a.name: a.default_value for a in known}, **given, **kwargs}


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call writes, those in lists, too."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = bound_arguments(node.target, node.args, node.kwargs)
    written = pytree.tree_leaves([named[a.name] for a in schema.arguments if a.is_write])
    return [argument for argument in written if isinstance(argument, fx.Node)]


def composite_kernel(target: OpOverload) -> Callable[..., Any] | None:
    """Return torch's implementation of an operator by other operators; None if it has none."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    has = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)
    return functools.partial(target._op_dk, key) if has else None


def is_weight(tensor: object) -> bool:
    """Return True for a parameter or a buffer of a module, as Dynamo marks them."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def is_shipping() -> bool:
    """Return True inside ``aot_compile``, which wants a `SerializableCallable`."""
    return bool(functorch_config.bundled_autograd_cache)


def without_its_caches() -> AbstractContextManager[object]:
    """Switch AOTAutograd's caches off, which accept Inductor's code alone."""
    patched: AbstractContextManager[object] = functorch_config.patch(
        bundled_autograd_cache=False, force_autograd_cache=False, strict_autograd_cache=False,
        bypass_autograd_cache_key=False, enable_autograd_cache=False,
    )  # fmt: skip
    return patched


def contiguous_tangents() -> AbstractContextManager[object]:
    """Trace backwards for dense gradients of results, not for those that lie as the results do."""
    patched: AbstractContextManager[object] = functorch_config.patch(
        guess_tangent_strides_as_outputs=False
    )
    return patched


def whole_backward() -> AbstractContextManager[object]:
    """Compile backwards with their forwards, not when they first run."""
    patched: AbstractContextManager[object] = functorch_config.patch(
        force_non_lazy_backward_lowering=True
    )
    return patched


def sizes_of_any_value() -> AbstractContextManager[object]:
    """Trace without the assumption that symbolic sizes are not 0 or 1."""
    config: Any = symbols_config
    patched: AbstractContextManager[object] = config.patch(backed_size_oblivious=True)
    return patched


def functorch_digest() -> str:
    """Return a digest of AOTAutograd's settings."""
    return functorch_config.get_hash().hex()


def has_saved_tensor_hooks() -> bool:
    """Return True inside ``torch.autograd.graph.saved_tensors_hooks`` and its variants."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_modes() -> bool:
    """Return True inside a mode of ``__torch_dispatch__`` or ``__torch_function__``."""
    return bool(_get_current_dispatch_mode_stack()) or torch._C._len_torch_function_stack() > 0


def hooked_inputs() -> list[torch.Tensor]:
    """Return the traced inputs for which Dynamo registers the program's hooks after the graph."""
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:  # the graph is not Dynamo's
        return []
    hooks = translator.output.side_effects.tensor_hooks.values()
    return [tensor.as_proxy().node.meta["example_value"] for tensor, *_ in hooks]


def is_distributed_data_parallel() -> bool:
    """Return True while the forward of a ``DistributedDataParallel`` is compiled."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def run_autograd(gm: fx.GraphModule, inputs: list[Any], **how: Any) -> Callable[..., Any]:
    """Compile a graph of Dynamo by AOTAutograd, with the arguments ``how``; return its callable.

    As torch's ``aot_autograd`` does. That imports Inductor's scheduler, 0.2 CPU-seconds, for the
    log of ``TORCH_COMPILE_DEBUG=1``, and flattens inputs: it is called if either is needed.
    """
    if debug_directory() is not None or any(isinstance(i, list | tuple | dict) for i in inputs):
        logged: Callable[..., Any] = aot_autograd(**how)(gm, inputs)
        return logged

    def compile_backward(*arguments: Any, **named: Any) -> Any:
        made = disable(how["bw_compiler"], reason="compiles a backward")(*arguments, **named)
        return disable(made, reason="is a compiled backward")

    counters["aot_autograd"]["total"] += 1
    try:
        with _knowing_numbers(), _saving_no_views():
            made = aot_module_simplified(gm, inputs, **{**how, "bw_compiler": compile_backward})
    except TensorifyScalarRestartAnalysis:
        raise
    except Exception:
        counters["aot_autograd"]["not_ok"] += 1
        raise
    counters["aot_autograd"]["ok"] += 1
    compiled: Callable[..., Any] = disable(made, reason="is a compiled graph")
    return compiled


class _Numbers(type(FakeTensor.__dict__["item_memo"])):  # type: ignore[misc]
    """The memo of ``item()`` of fake tensors, in which a guarded number survives a new trace.

    Torch clears the memo as a trace begins, because symbols without a value must be new in each. So
    it also forgets that Dynamo guards which number the ``i`` of ``x[1, i]`` is, and AOTAutograd
    cannot trace an element at an unknown place.
    """

    def __get__(self, obj: Any, objtype: Any = None) -> Any:
        known = None if obj is None else obj._item_memo
        if isinstance(known, torch.SymInt) and known.node.maybe_as_int() is not None:
            return known if obj._item_memo_vc == obj._version else None
        return super().__get__(obj, objtype)


@contextmanager
def _knowing_numbers() -> Iterator[None]:
    """Let AOTAutograd use, in this block, the numbers of inputs that Dynamo guards."""
    usual, numbers = FakeTensor.__dict__["item_memo"], _Numbers()
    numbers.__set_name__(FakeTensor, "item_memo")
    FakeTensor.item_memo = numbers
    try:
        yield
    finally:
        FakeTensor.item_memo = usual


@contextmanager
def _saving_no_views() -> Iterator[None]:
    """Let loops save, in this block, what views and copies are of, not themselves.

    The gradient of a step reads views, such as a weight transposed. Torch saves a copy of each for
    every iteration, unless a decomposition replaces the copy by the view, which a step must not
    return. Nor must it return what it saves of its own results, so that is copied here.
    """
    holder: Any = HopJointGraph
    usual = holder.partition

    def partition(joint: Any, *args: Any, **named: Any) -> Any:
        for node in joint.joint_gm.graph.nodes:
            if _moves(node.target):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        made = usual(joint, *args, **named)
        output = made.fw_gm.graph.output_node()
        returned: list[fx.Node] = []
        for node in output.args[0]:
            if node in returned:
                with made.fw_gm.graph.inserting_before(output):
                    clone = made.fw_gm.graph.call_function(torch.ops.aten.clone.default, (node,))
                clone.meta = dict(node.meta)
                node = clone
            returned.append(node)
        output.args = (tuple(returned),)
        return made

    holder.partition = partition
    try:
        yield
    finally:
        holder.partition = usual


def _moves(target: Any) -> bool:
    """Return True for a view, and for a copy."""
    if not isinstance(target, OpOverload):
        return False
    copies = torch.Tag.view_copy in target.tags or target is torch.ops.aten.clone.default
    return copies or target.is_view


def known_number(tensor: object) -> int | None:
    """Return the number that Dynamo has guarded a fake tensor to hold; None where it has not."""
    known = tensor.item_memo if isinstance(tensor, FakeTensor) else None
    return known.node.maybe_as_int() if isinstance(known, torch.SymInt) else None


def is_guarded() -> bool:
    """Return True if the current compile has guards on symbols: sizes, inputs' numbers."""
    context = TracingContext.try_get()
    symbols = getattr(context and context.fake_mode, "shape_env", None)
    return bool(symbols is not None and symbols.guards)


def keep_dynamo_names(gm: fx.GraphModule, part: fx.GraphModule) -> None:
    """Copy Dynamo's notes on a graph and on its inputs to a part of the graph."""
    part.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        part._param_name_to_source = gm._param_name_to_source
    keep_sources(gm.graph, part.graph)


def keep_sources(graph: fx.Graph, copy: fx.Graph) -> None:
    """Copy Dynamo's sources of a graph's inputs to those of the same names in another one."""
    sources = {n.name: n._dynamo_source for n in graph.nodes if hasattr(n, "_dynamo_source")}
    for node in copy.find_nodes(op="placeholder"):
        node._dynamo_source = sources.get(node.name)


@contextmanager
def running_plainly() -> Iterator[None]:
    """Run calls of real tensors in this block without tracing, modes or autocast."""
    guards = (
        torch._C._DisableTorchDispatch(),
        torch._C._DisablePythonDispatcher(),
        torch._C._DisableAutocast(),
    )
    try:
        with torch.no_grad():
            yield
    finally:
        del guards


@contextmanager
def converting_fakes() -> Iterator[None]:
    """Let ``Module.to`` and similar methods convert fake parameters in this block.

    Torch swaps the contents of such a parameter, and refuses if there are weak references to it.
    The memo of the fake mode has one for each, for conversions of real tensors, which do not occur
    here.
    """
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.utils.weakref = weakref


@contextmanager
def forgetting_code() -> Iterator[None]:
    """Let Dynamo forget the functions that it first compiles in this block.

    It compiles them anew later, and tries again those that it gave up.
    """
    known, met = convert_frame.input_codes, convert_frame.Tracker()
    convert_frame.input_codes = met
    try:
        yield
    finally:
        convert_frame.input_codes = known
        codes = [reference() for reference in met.seen]
        for code in codes:
            if code is not None and code not in known:
                torch._C._dynamo.eval_frame.reset_code(code)


# -- torch's trace and logs ----------------------------------------------------------------------

trace_log = logging.getLogger("torch.__trace")
"""The logger behind ``TORCH_TRACE``. It never propagates; a handler gets each record's ``metadata``
and ``payload``."""


code_log = getArtifactLogger("torch.fusec", "output_code")
"""A child of ``torch``, whose handler prints the artifacts that TORCH_LOGS names."""


def prints_code() -> bool:
    """Return True under ``TORCH_LOGS=output_code``."""
    return code_log.isEnabledFor(logging.DEBUG)


def traces() -> bool:
    """Return True if torch's trace has a listener."""
    return bool(trace_log.handlers)


def traces_code() -> bool:
    """Return True if torch's trace has a listener for more than summaries."""
    return any(not getattr(handler, "summaries_only", False) for handler in trace_log.handlers)


def interned(number: int) -> str:
    """Return the text of a number in torch's trace: a file's name in a stack."""
    return next((text for text, known in INTERN_TABLE.items() if known == number), "")


def trace_artifact(name: str, text: Callable[[], str], *, json: bool = False) -> None:
    """Add a text to torch's trace, if it has a listener: one file in the report of ``tlparse``."""
    encoding = "json" if json else "string"
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=text
    )


def compile_id() -> str:
    """Return Dynamo's number of the compile that runs, such as "0/1"; "" if none does."""
    found = CompileContext.current_compile_id()
    return "" if found is None else str(found)


def compile_numbers() -> tuple[int, int]:
    """Return Dynamo's number of the function that it compiles, and how often it has before."""
    found = CompileContext.current_compile_id()
    return (-1, 0) if found is None else (found.frame_id or 0, found.frame_compile_id or 0)


def debug_directory() -> str | None:
    """Return the directory that ``TORCH_COMPILE_DEBUG=1`` asks for; None where it does not."""
    return get_debug_dir() if os.environ.get("TORCH_COMPILE_DEBUG") == "1" else None


def compile_phase(name: str) -> AbstractContextManager[object]:
    """Time a phase for ``torch._dynamo.utils.compile_times`` and the timeline of the trace."""
    timed: AbstractContextManager[object] = dynamo_timed(f"fusec.{name}")
    return timed


def replay_no_view_twice(metadata: Any) -> None:
    """Have AOTAutograd make a detached result from its base by strides, not by replaying its views.

    Of results that differ in ``requires_grad`` alone it makes one from the other, but replays the
    views from the base: ``y.t().detach(), y.t()`` would be transposed twice.
    """
    for position, one in enumerate(metadata.output_info):
        of_a_result = one.output_type.name == "alias_of_intermediate_base_is_user_output"
        if of_a_result and not one.requires_grad and hasattr(one, "view_meta_sequence"):
            metadata.output_info[position] = replace(one, view_meta_sequence=None)


def views_without_gradient(metadata: Any) -> tuple[int, ...]:
    """Return the results that are views of tensors with gradients, made under ``no_grad``.

    Their metadata requires gradients, though they have none. AOTAutograd makes them again outside
    of the graph as views with gradients.
    """
    return tuple(
        position
        for position, one in enumerate(metadata.output_info)
        if one.requires_grad and not getattr(one, "requires_grad_for_backward", True)
    )
