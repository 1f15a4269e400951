"""Compiled graphs as bytes that another process, or another machine, runs without compiling.

An archive holds the same as the cache of a graph of Dynamo: the calling convention, and of forward
and backward the wrapper, the kernels, and the objects that the wrapper takes from its graph.
``archive/graph.py`` reads it, and describes the checks before anything runs.

The bytes are in the format of the cache (``runtime/cache/entry.py``): lengths and digests are
checked before anything is read. Digests find damage, they do not authenticate. The wrapper is
Python and kernels are native code: trust an archive as you trust a program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fusec.archive import graph as loading
from fusec.archive.graph import BadArchive, Spec
from fusec.archive.shipped import Shipped
from fusec.archive.sizes import SizeCondition
from fusec.codegen.targets import Target
from fusec.driver.aot_metadata import NoConvention, convention_of
from fusec.driver.backend import compile_with
from fusec.driver.context import CompileContext
from fusec.driver.warm import Start
from fusec.errors import Unsupported
from fusec.export.size_formulas import specs_of
from fusec.runtime.cache.entry import encode
from fusec.runtime.calls.convention import Convention
from fusec.torch_interior import TracingContext, without_its_caches

__all__ = ["BadArchive", "Packed", "Shipped", "pack", "packed", "ship"]


@dataclass(frozen=True, slots=True)
class Packed:
    """One compiled graph of an archive.

    Attributes:
        row: its description as ``warm`` writes it, for JSON.
        blobs: its entry in the cache.
        arguments, conditions: the specs of its arguments, and the conditions on their sizes.
    """

    name: str
    row: Mapping[str, Any]
    blobs: Mapping[str, bytes]
    arguments: tuple[Spec, ...] = ()
    conditions: tuple[SizeCondition, ...] = ()


def pack(
    convention: Convention,
    parts: Sequence[Packed],
    target: Target,
    beside: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return the bytes of an archive.

    Args:
        parts: a forward and a backward, or an inference graph.
        target: the target of its kernels.
        beside: further blobs, by name.
    """
    about = {
        "format": loading.FORMAT,
        "machine": loading.machine(target.name, target.device),
        "parts": {part.name: part.row for part in parts},
    }
    head = {"about.json": json.dumps(about).encode(), "convention.json": convention.to_json()}
    blobs = {f"{p.name}/{name}": blob for p in parts for name, blob in p.blobs.items()}
    content = {**head, **(beside or {}), **blobs}
    described = loading.digest_beside(content)
    for part in parts:
        end = loading.Contract(described, part.arguments, part.conditions)
        content[f"{part.name}/wrapper.py"] += str(end).encode()
    return encode(loading.KEY, content)


def packed(start: Start) -> tuple[Convention, list[Packed]]:
    """Return the convention and the compiled graphs of a graph of Dynamo, as an archive holds them.

    Raises:
        Unsupported: naming what of it cannot be saved.
    """
    tracing = TracingContext.try_get()
    assert tracing is not None
    backward = start.parts.get("backward")
    graph = None if backward is None else backward.gm
    try:
        convention = convention_of(tracing.fw_metadata, graph, start.options.deterministic)
    except NoConvention as reason:
        raise Unsupported(f"a graph with {reason} cannot be saved") from reason
    parts = [
        Packed(name, part.row(), part.trace.entry, *specs_of(_inputs(part.gm)))
        for name, part in start.parts.items()
    ]
    for part in parts:
        if part.row["outside"] is None:
            raise Unsupported(start.parts[part.name].obstacle())
    return convention, parts


def _inputs(gm: fx.GraphModule) -> list[Any]:
    """Return the traced values of a graph's inputs."""
    return [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]


# -- torch.compile(...).aot_compile ----------------------------------------------------------------


def ship(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_one: Callable[..., Any],
    context: CompileContext,
) -> Shipped:
    """Return a compiled graph of Dynamo that torch can save.

    Raises:
        Unsupported: naming what of it cannot be saved.
    """
    whole = Start(gm, "", context.options)
    with without_its_caches():
        compile_with(gm, example_inputs, whole.noting(compile_one), context)
        convention, parts = packed(whole)
        call = convention.around(*(part.call for part in whole.parts.values()))
        return Shipped(call, pack(convention, parts, context.target))
