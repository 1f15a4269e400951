"""Derive a graph's `Convention`, or why there is none, from AOTAutograd's metadata.

The metadata is no stable interface: whatever this module does not know of it, in any version of
torch, is a reason to leave the wrapper to AOTAutograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.runtime.calls.convention import FORMATS, Convention, Tangent, Training
from fusec.torch_interior import views_without_gradient

_MADE = ("non_alias", "unsafe_view_alias", "custom_function_view")
"""Output types that are new tensors to autograd."""


class NoConvention(Exception):
    """The graph has to be called by AOTAutograd's own wrapper: the reason."""


def convention_of(
    metadata: Any, backward: fx.GraphModule | None, deterministic: bool
) -> Convention:
    """Return the calling convention of a graph.

    Args:
        metadata: AOTAutograd's ``ViewAndMutationMeta``.
        backward: the graph of the gradients, one for each input; None at inference.
        deterministic: whether the kernels are, as ``Options.deterministic`` says.
    Raises:
        NoConvention: naming what a convention cannot express.
    """
    try:
        _refuse(metadata)
        outputs = tuple(_given(one) for one in metadata.output_info)
        written = tuple(metadata.mutated_graph_handled_indices_seen_by_autograd)
        training = None if backward is None else _training(metadata, backward, deterministic)
        return Convention(outputs, written, training)
    except AttributeError as error:
        raise NoConvention(f"this version of torch says nothing of it: {error}") from error


def _refuse(metadata: Any) -> None:
    """Raise NoConvention if AOTAutograd's wrapper does more than a convention can express."""
    more = {
        "inputs that are replaced after the call": metadata.num_mutated_inp_runtime_indices,
        "results that share memory with each other": metadata.num_intermediate_bases,
        "ordered effects": len(metadata.tokens),
        "gradients switched on or off": metadata.grad_enabled_mutation is not None,
        "a random state": metadata.is_rng_op_functionalized,
        "generators": metadata.num_graphsafe_rng_states,
        "writes in the backward": len(
            metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw
        ),
        "views made without gradients": len(views_without_gradient(metadata)),
        "shapes of inputs that change": any(
            one.mutates_metadata or one.mutation_inductor_storage_resize
            for one in metadata.input_info
        ),
        "objects that are saved": getattr(metadata, "num_opaque_objects_saved_for_bw", 0) or 0,
        "subclasses of tensors": any(
            type(meta).__name__ not in ("PlainTensorMeta", "int")
            for metas in (
                metadata.subclass_inp_meta,
                metadata.subclass_fw_graph_out_meta,
                metadata.subclass_tangent_meta,
            )
            for meta in metas
        ),
    }
    found = [name for name, some in more.items() if some]
    if found:
        raise NoConvention(", ".join(found))


def _given(output: Any) -> int | None:
    """Return the position of the input that a result is, or None for a new tensor."""
    kind = output.output_type.name
    if kind == "is_input":
        return int(output.base_idx)
    if kind not in _MADE:
        raise NoConvention("a result that is a view")
    return None


def _training(metadata: Any, backward: fx.GraphModule, deterministic: bool) -> Training:
    outputs = metadata.output_info
    wanted = [
        k
        for k, one in enumerate(outputs)
        if one.output_type.name in _MADE
        and issubclass(one.raw_type, torch.Tensor)
        and getattr(one, "requires_grad_for_backward", one.requires_grad)
    ]
    metas = metadata.subclass_tangent_meta
    if len(wanted) != len(metas):
        raise NoConvention("tangents of other values than results")
    checked = metadata.tensors_saved_for_backwards_with_vc_check_slice
    unchecked = metadata.num_tensors_saved_with_no_vc_check
    (gradients,) = backward.graph.output_node().args
    inputs = metadata.input_info
    sizes = metadata.num_symints_saved_for_bw or 0
    saved = len(backward.graph.find_nodes(op="placeholder")) - len(wanted) - unchecked - sizes
    if len(gradients) != len(inputs) or checked.start != len(outputs):  # type: ignore[arg-type]
        raise NoConvention("other values between results and what is saved")
    detached = tuple(
        k
        for k, (gradient, one) in enumerate(zip(gradients, inputs, strict=True))  # type: ignore[arg-type]
        if gradient is None and one.requires_grad and not one.is_leaf
    )
    return Training(
        tuple(bool(one.requires_grad) for one in outputs),
        tuple(_tangent(k, meta.memory_format) for k, meta in zip(wanted, metas, strict=True)),
        saved,
        unchecked,
        sizes,
        detached,
        any(one.requires_grad for one in inputs),
        deterministic,
    )


def _tangent(output: int, meta: Any) -> Tangent:
    if meta.memory_format is not None:
        names = {made: name for name, made in FORMATS.items()}
        return Tangent(output, names[meta.memory_format])
    sizes = (*meta.size, *meta.stride)
    if not all(type(n) is int for n in sizes):
        raise NoConvention("symbolic tangents")
    return Tangent(output, "", tuple(meta.size), tuple(meta.stride))
