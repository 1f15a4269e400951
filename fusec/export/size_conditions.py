"""Conditions on the sizes of an archive's graphs, and the names that users give sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusec.archive import sizes
from fusec.archive.graph import Spec
from fusec.errors import Unsupported
from fusec.export.size_formulas import specs_of
from fusec.frontend.shapes import SizeMap
from fusec.ir.atoms import Size
from fusec.ir.formula import formula_of
from fusec.ir.index import Index, index
from fusec.torch_interior import pytree


def not_empty(values: Sequence[Any]) -> tuple[sizes.SizeCondition, ...]:
    """Return the conditions under which no traced tensor is empty.

    A trace for sizes of any value does not guard that, and ``x[:, -1]`` would read out of bounds.
    """
    known = SizeMap().plain()
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    extents = dict.fromkeys(n for tensor in tensors for n in known.tensor(tensor).shape)
    return tuple(
        (">=", formula_of(n - n.const), 1 - n.const)
        for n in extents
        if not (n.is_constant or _grows(n)) or n in map(index, known.used.values())
    )


def shape_guards(gm: fx.GraphModule) -> tuple[sizes.SizeCondition, ...]:
    """Return the conditions on sizes under which a graph of ATen runs as it was traced.

    Raises:
        Unsupported: as ``specs_of`` does.
    """
    nodes = gm.graph.nodes
    traced = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    given = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    return tuple(dict.fromkeys((*not_empty(traced), *specs_of(given)[1])))


def _grows(extent: Index) -> bool:
    """Return True for an extent that is at least one if all sizes are."""
    signs = (c > 0 and all(isinstance(a, Size) for a in atoms) for atoms, c in extent.terms)
    return extent.const >= 0 and all(signs)


def renamed_spec(spec: Spec, names: Mapping[str, str]) -> Spec:
    """Return the spec of an argument with its sizes renamed; raises as ``renamed``."""
    match spec:
        case (dtype, tuple() as shape, tuple() as strides):
            own, steps = (tuple(renamed(n, names) for n in each) for each in (shape, strides))
            return dtype, own, steps
        case (kind, formula):
            return kind, renamed(formula, names)
    return None


def renamed(formula: Any, names: Mapping[str, str]) -> Any:
    """Return a formula or condition with its sizes renamed.

    Raises:
        Unsupported: for a size without a new name: no input has it as an extent.
    """
    match formula:
        case str():
            if formula not in names:
                raise Unsupported(f"a size {formula} that no input has by itself")
            return names[formula]
        case (sign, *parts):
            return sign, *(renamed(part, names) for part in parts)
    return formula
