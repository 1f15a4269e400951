"""The cache key of a Dynamo graph: AOTAutograd would give the same result for graphs of equal keys.

It covers all that AOTAutograd and fusec read of a graph: operations, arguments, the inputs' types,
shapes and strides, which of them require gradients or share memory, and the settings of torch that
affect decompositions. Names of modules are included: traces name launches after them.

A graph that may depend on more has no key: `NoKey` says why. Custom operations are Python that can
change, most higher-order ones are not inlined, symbolic sizes have guards, and so have numbers that
inputs hold.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fusec.frontend.origin import module_path
from fusec.torch_interior import (
    HigherOrderOperator,
    OpOverload,
    functorch_digest,
    has_modes,
    has_saved_tensor_hooks,
    is_distributed_data_parallel,
    is_guarded,
    pytree,
)

_ROOTS = ("torch", "_operator", "math", "builtins")
_NAMESPACES = ("aten", "prims")
_INLINED = ("tag_activation_checkpoint", "autograd_function_apply")
_LITERALS = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(None), type(...),
)  # fmt: skip


class NoKey(Exception):
    """Raised with the reason why a graph has no key."""


def dynamo_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Return a hexadecimal digest of a Dynamo graph, of its inputs and of torch's settings.

    Returns:
        None for a graph that a key could represent but for its custom operations: what they compute
        may change from process to process.
    Raises:
        NoKey: for anything else in the graph that a key cannot represent.
    """
    storages: dict[int, int] = {}
    given = "\n".join(_input(one, storages) for one in inputs)
    text = [*_settings(), given, *_lines(gm)]
    graphs = (part.graph for part in gm.modules() if isinstance(part, fx.GraphModule))
    targets = (node.target for graph in graphs for node in graph.nodes)
    if any(isinstance(t, OpOverload) and t.namespace not in _NAMESPACES for t in targets):
        return None
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def shares_memory(inputs: Sequence[Any]) -> bool:
    """Return True if two inputs share one storage."""
    storages = [i.untyped_storage()._cdata for i in inputs if isinstance(i, torch.Tensor)]
    return len(set(storages)) < len(storages)


def _lines(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        yield f"{node.op} {node.name} {_target(node)} {_text(node.args)} {_text(node.kwargs)}"
        yield module_path(node)
        if node.op == "get_attr":
            yield from _lines(_part(gm, str(node.target)))


def _part(gm: fx.GraphModule, name: str) -> fx.GraphModule:
    """Return the body of an operation that AOTAutograd inlines."""
    part = operator.attrgetter(name)(gm)
    if not isinstance(part, fx.GraphModule) or part.meta.get("_checkpoint_context_fn"):
        raise NoKey(f"the attribute {name}: a constant, or a choice of what a checkpoint saves")
    return part


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if _is_symbolic(node.meta.get("example_value")) or node.meta.get("custom"):
        raise NoKey("symbolic sizes, or an annotation")
    if node.op in ("placeholder", "output", "call_method", "get_attr"):
        return str(target)
    if isinstance(target, HigherOrderOperator) and target.name() in _INLINED:
        return str(target.name())
    if node.op != "call_function" or isinstance(target, HigherOrderOperator):
        raise NoKey(f"{node.op} {target}")
    if isinstance(target, OpOverload):
        return str(target)
    home = str(getattr(target, "__module__", None) or "builtins")
    found: Any = sys.modules.get(home) if home.partition(".")[0] in _ROOTS else None
    for name in (getattr(target, "__qualname__", ""), getattr(target, "__name__", "")):
        if found is not None and _attribute(found, name) is target:
            return f"{home}.{name}"
    raise NoKey(f"the function {target}")


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _is_symbolic(value: Any) -> bool:
    return any(
        isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
        or (isinstance(leaf, torch.Tensor) and leaf._has_symbolic_sizes_strides)
        for leaf in pytree.tree_leaves(value)
    )


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple | list):  # x[0, 1] is an element, x[[0, 1]] two rows
        kind = "tuple" if isinstance(value, tuple) else "list"  # torch.Size, fx's own lists
        return f"{kind}[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step))}"
    if type(value) not in _LITERALS:
        raise NoKey(f"an argument of type {type(value).__name__}")
    return f"{type(value).__name__} {value!r}"


def _input(value: Any, storages: dict[int, int]) -> str:
    if type(value) in (bool, int, float):
        return repr(value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NoKey(f"an input of type {type(value).__name__}")
    if value.layout is not torch.strided or value._has_symbolic_sizes_strides:
        raise NoKey(f"an input with layout {value.layout}, or symbolic sizes")
    facts = (
        value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.device,
        value.requires_grad, value.is_leaf, value._is_view(), value.is_inference(),
        value.is_conj(), value.is_neg(), getattr(value, "_dynamo_static_input_type", None),
        storages.setdefault(value.untyped_storage()._cdata, len(storages)),
    )  # fmt: skip
    return repr(facts)


def _settings() -> Iterator[str]:
    """Yield the global state of torch that AOTAutograd's result depends on."""
    if has_saved_tensor_hooks() or has_modes() or is_distributed_data_parallel():
        raise NoKey("hooks of saved tensors, modes, or DistributedDataParallel")
    if is_guarded():
        raise NoKey("conditions on sizes, or on numbers that inputs hold")
    devices = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    backends: Any = torch.backends  # its type stubs lack parts of mkldnn
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    yield repr((
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast,
        torch.is_autocast_cache_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        mkldnn.enabled, cudnn.enabled, cudnn.benchmark, cudnn.deterministic,
        # Each by itself: the getter of all of them raises where they differ.
        [part.fp32_precision for part in (backends, cuda.matmul, cudnn.conv, cudnn.rnn,
                                          mkldnn.matmul, mkldnn.conv, mkldnn.rnn)],
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_fp16_accumulation,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), functorch_digest(),
        backends.cpu.get_cpu_capability(),  # packed weights lie by it
    ))  # fmt: skip
