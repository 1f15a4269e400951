"""Compute once what a graph defines twice.

Spec: ``graph -> graph``. Two definitions of equal type and layout whose expressions are equal but
for the names of their axes are one: later readers load the first. A model that builds its causal
mask in every layer has one mask after this. Definitions that are returned, or handed to an impure
extern, stay apart, for a caller may tell them apart.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.canonical import canonical
from fusec.ir.expr import Buffer
from fusec.ir.graph import Argument, Def, Extern, Graph, View, argument_views, extern_views
from fusec.ir.index import Axis
from fusec.ir.rewrite import reading, rewrite


def share(graph: Graph) -> Graph:
    """Return the graph with each distinct definition once."""
    fixed = {v.buffer for v in argument_views(graph.outputs)}
    for node in graph.nodes:
        if isinstance(node, Extern) and node.impure:
            fixed.update(v.buffer for v in extern_views(node))
    first: dict[tuple[object, ...], Buffer] = {}
    instead: dict[Buffer, Buffer] = {}
    nodes: list[Def | Extern] = []
    for node in graph.nodes:
        if isinstance(node, Extern):
            nodes.append(_reread(node, instead))
            continue
        line = _redirect(node, instead)
        identity = _identity(line)
        known = first.setdefault(identity, line.buffer)
        if known is line.buffer or line.buffer in fixed or known in fixed:
            nodes.append(line)
        else:
            instead[line.buffer] = known
    if not instead:
        return graph
    return replace(graph, nodes=tuple(nodes))


def _identity(line: Def) -> tuple[object, ...]:
    """Return what is equal for definitions that compute the same, whatever their axes are."""
    found = canonical(line)
    read = (leaf for leaf in found.leaves if leaf is not line.buffer and not isinstance(leaf, Axis))
    return (line.buffer.shape, line.buffer.strides, found.form, *read)


def _redirect(line: Def, instead: dict[Buffer, Buffer]) -> Def:
    if not instead:
        return line
    (expr,) = rewrite((line.expr,), reading(instead))
    return line if expr is line.expr else replace(line, expr=expr)


def _reread(extern: Extern, instead: dict[Buffer, Buffer]) -> Extern:
    if not any(v.buffer in instead for v in extern_views(extern)):
        return extern

    def changed(arg: Argument) -> Argument:
        if isinstance(arg, View) and arg.buffer in instead:
            return replace(arg, buffer=instead[arg.buffer])
        return tuple(map(changed, arg)) if isinstance(arg, tuple) else arg

    kwargs = tuple((name, changed(value)) for name, value in extern.kwargs)
    return replace(extern, args=tuple(map(changed, extern.args)), kwargs=kwargs)
