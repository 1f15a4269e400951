"""Dynamo graphs that must run uncompiled, since AOTAutograd would hide or lose an effect.

And frames that must run in plain Python, since Dynamo itself would lose one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import (
    ASSIGNMENTS,
    called_name,
    is_in_place,
    reaches_beyond_memory,
    relies_on_its_place,
    tensor_of,
    written_by,
)
from fusec.frontend.aliasing.regenerated_views import hooks_what_it_writes, loses_gradients
from fusec.frontend.aliasing.saved_changes import (
    modifies_function_saved_tensor,
    modifies_saved_tensor,
)
from fusec.frontend.fx_passes.fx_nodes import fakes_of
from fusec.torch_interior import pytree, tensors_in


def writes_another_kind(gm: fx.GraphModule) -> bool:
    """Return True if a tensor cannot hold what a call writes to it, as integers no product of f32.

    The trace does not ask it of all operations in place, nor of ``out=``, and writes a rounded
    copy. What a call would write has the type of its result where it makes a tensor of its own.
    Worked example: ``counts *= weights``, where ``counts * weights`` is f32.
    """
    return any(_is_of_another_kind(node) for node in gm.graph.nodes)


def _is_of_another_kind(node: fx.Node) -> bool:
    places = written_by(node)
    operations = _out_of_place(node) if places else []
    if not operations:
        return False
    named = {name: value for name, value in node.kwargs.items() if name != "out"}
    written, args, named = fx.map_arg(
        (places, node.args, named), lambda n: n.meta.get("example_value")
    )
    written = fakes_of(tensors_in(written))
    real = not any(map(_is_complex, pytree.tree_leaves((args, named))))
    if not written or (real and all(w.is_floating_point() for w in written)):
        return False
    for operation in operations:
        with suppress(Exception), torch.no_grad(), written[0].fake_mode:
            made = tensors_in(operation(*args, **named))
            return not all(
                torch.can_cast(m.dtype, w.dtype) for m, w in zip(made, written, strict=False)
            )
    return is_in_place(node)  # eager refuses, too, as it does ``addcdiv_`` of integers


def _is_complex(leaf: Any) -> bool:
    return leaf.is_complex() if isinstance(leaf, torch.Tensor) else isinstance(leaf, complex)


def _out_of_place(node: fx.Node) -> list[Callable[..., Any]]:
    """Return ``torch.mul`` for ``x.mul_`` or ``torch.mul(out=x)``, and what else has the name."""
    name = called_name(node)
    if node.kwargs.get("out") is not None and callable(node.target):
        return [node.target]
    owners: tuple[Any, ...] = (torch, torch.ops.aten) if is_in_place(node) else ()
    if (assignment := name.strip("_")) in ASSIGNMENTS:
        owners, name = (operator,), f"__{assignment[1:]}___"
    return [getattr(owner, name[:-1]) for owner in owners if hasattr(owner, name[:-1])]


def writes_a_number(gm: fx.GraphModule) -> bool:
    """Return True if an f64 number that the graph is given is written, which AOTAutograd loses.

    It does so on CPUs. Worked example: ``step.add_(1)``, where ``step = torch.zeros((),
    dtype=torch.float64)``. What is written to a view or to a clone of such a number is kept.
    """
    places = [place for node in gm.graph.nodes for place in written_by(node)]
    given = [place for place in places if isinstance(place, fx.Node) and place.op in _GIVEN]
    return any(tensor is not None and _is_number(tensor) for tensor in map(tensor_of, given))


def _is_number(tensor: torch.Tensor) -> bool:
    alone = tensor.dim() == 0 and tensor.dtype is torch.float64
    return alone and tensor.device.type == "cpu"


_GIVEN = ("placeholder", "get_attr")


def scales_integers(gm: fx.GraphModule) -> bool:
    """Return True for ``addcmul_`` with a value of integers, or ``addcdiv_`` by a quotient of them.

    Eager scales the one by 0, for ``value=0.5``, and refuses the other. Dynamo replaces both by
    ``prims.fma`` of a product or a quotient and a copy, which neither do so nor refuse other kinds.
    """
    calls = [node for node in gm.graph.nodes if called_name(node) == "fma"]
    quotients = [n for call in calls for n in call.all_input_nodes if called_name(n) == "div"]
    return not (
        all(all(_are_floats(call)) for call in calls)
        and all(any(_are_floats(q)) for q in quotients)
    )


def _are_floats(call: fx.Node) -> list[bool]:
    traced = tensors_in([node.meta.get("example_value") for node in call.all_input_nodes])
    return [tensor.is_floating_point() for tensor in traced]


_REASONS = (
    (writes_another_kind, "it writes numbers to a tensor of another kind: eager raises"),
    (writes_a_number, "it writes an f64 number that it is given, which AOTAutograd loses"),
    (reaches_beyond_memory, "it has a window into memory that reaches beyond it"),
    (relies_on_its_place, "it changes, or differentiates, an input by its place in memory"),
    (loses_gradients, "AOTAutograd loses what it does to gradients"),
    (modifies_saved_tensor, "its backward raises, as it does in eager"),
)


def only_for_eager(gm: fx.GraphModule) -> str | None:
    """Return why a Dynamo graph must run uncompiled, or None if it may be compiled."""
    return next((reason for holds, reason in _REASONS if holds(gm)), None)


def only_for_python(gm: fx.GraphModule) -> str | None:
    """Return why a frame that Dynamo has captured must run in plain Python, or None."""
    if scales_integers(gm):
        return "it has another form of addcmul_ or addcdiv_ for integers than eager"
    if modifies_function_saved_tensor(gm):
        return "it changes what an autograd.Function has saved: eager's backward raises"
    if hooks_what_it_writes():
        return "it puts a hook on an input that it writes: the hook would see another gradient"
    return None
