"""The modules of a graph: the class of each, and the module that a kernel belongs to.

A kernel computes the nodes that its stored values depend on, up to values that other launches
store. It belongs to the module of these nodes, or to their innermost common one; where that is the
model or a mere container, it is named after the first and the last. Nodes that several kernels
compute (a mask, the angles of a rotation) count only where a kernel has no others. Examples::

    h.3.ln_2                                   h.3.ln_2
    h.3 (its own sum), h.3.ln_2                h.3.ln_2
    h.3.mlp.c_fc, h.3.mlp.act                  h.3.mlp
    h.3.mlp.c_proj, h.3, h.4.ln_1              h.3.mlp.c_proj..h.4.ln_1
    rotary (others, too), h.3.attn             h.3.attn
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from types import FrameType

from torch import fx, nn

from fusec.frontend.origin import dotted, module_path, module_stack, printable
from fusec.ir.expr import reach
from fusec.ir.names import identifier

BETWEEN = ".."
"""Separates the first and the last of several modules."""
CONTAINERS = frozenset(("Sequential", "ModuleList", "ModuleDict", ""))
"""Classes whose names do not describe their content; "" is one that is never called."""


def module_kinds(graph: fx.GraphModule) -> dict[str, str]:
    """Return path -> class name of the modules that enclose a graph's nodes, directly or not."""
    found: dict[str, str] = {}
    for node in graph.graph.nodes:
        for expression, kind in module_stack(node).values():
            name = kind if isinstance(kind, str) else kind.__name__
            found[dotted(str(expression))] = name.rpartition(".")[2]
    for path in list(found):
        while path := path.rpartition(".")[0]:
            found.setdefault(path, "")
    found.pop("", None)
    return found


def calling() -> str:
    """Return the path and class of the module whose call is being compiled: "h.3 (Block)".

    After a graph break Dynamo compiles a part of a model by itself. Its graph lacks that part's
    path; the Python stack has it. The whole model is its class alone; outside of any module, "".
    """
    called = _called()
    if not called:
        return ""
    inner, outer = called[0], called[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), "")
    kind = type(inner).__name__
    return printable(f"{path} ({kind})" if path else kind)


def name_in_model(gm: fx.GraphModule) -> None:
    """Rename the modules of a Dynamo graph to their paths in the model that is being called.

    Dynamo names modules by the compiled function's expressions: after a graph break, ``self`` may
    be a part of the model, ``L['self'].ln_2``, or a local may hold one, ``L['block']``. The keys of
    the module stacks are the modules' ids. Where no model is being called (a function loops over
    its layers), the names stay.
    """
    called = _called()
    if not called:
        return
    inner, outer = called[0], called[-1]
    paths = {str(id(module)): path for path, module in outer.named_modules()}
    part = paths.get(str(id(inner)), "")
    around = {str(id(inner)): (f"{_SELF}.{part}", type(inner))} if part else {}
    for graph in (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)):
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack", {})
            named = {
                key: (_in_model(name, paths.get(key.partition("@")[0], ""), part), kind)
                for key, (name, kind) in stack.items()
            }
            if (around or named) and node.op.startswith("call_"):
                node.meta["nn_module_stack"] = around | named


def _in_model(name: str, path: str, part: str) -> str:
    """Return a module's expression from the model's root, or ``name`` if its path is not known."""
    known = not path or (not part and name.startswith(_SELF))
    return name if known else f"{_SELF}.{path}"


def _called() -> list[nn.Module]:
    """Return the modules whose calls are on the Python stack, the innermost first."""
    frame: FrameType | None = sys._getframe()
    called: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is _CALL and isinstance(frame.f_locals.get("self"), nn.Module):
            module = frame.f_locals["self"]
            called.append(getattr(module, "_orig_mod", module))
        frame = frame.f_back
    return called


_SELF = "L['self']"
_CALL = nn.Module._call_impl.__code__


def kernel_modules(
    graph: fx.GraphModule, stored: Mapping[str, Sequence[str]], eager: Iterable[str]
) -> dict[str, str]:
    """Return kernel name -> the path of the module that it belongs to; "" for the model itself.

    Args:
        stored: the buffers that each kernel stores.
        eager: the names of the nodes that run as eager kernels.
    """
    nodes = {identifier(node.name): node for node in graph.graph.nodes}
    made = {kernel: stored_nodes(nodes, buffers) for kernel, buffers in stored.items()}
    ends = {node for some in made.values() for node in some}
    ends |= {nodes[identifier(name)] for name in eager if identifier(name) in nodes}
    kinds = module_kinds(graph)
    computed = {kernel: _computed(some, ends) for kernel, some in made.items()}
    kernels_of = Counter(node for nodes in computed.values() for node in nodes)
    alone = {node for node, kernels in kernels_of.items() if kernels == 1}

    def around(nodes: set[fx.Node]) -> str:
        ordered = (node for node in graph.graph.nodes if node in nodes)
        return _around([module_path(node) for node in ordered], kinds)

    return {kernel: around(nodes & alone) or around(nodes) for kernel, nodes in computed.items()}


def stored_nodes(nodes: Mapping[str, fx.Node], buffers: Iterable[str]) -> list[fx.Node]:
    """Return the nodes that buffers are named after; a buffer may have none.

    The buffer of one of several results has its node's name with a suffix: ``var_mean_0``. Nodes of
    such buffers are returned only if no buffer holds a node's single result.

    Args:
        nodes: by their names, as identifiers.
    """
    names = list(buffers)
    named = (nodes[name] for name in names if name in nodes)
    whole = [node for node in named if not isinstance(node.meta.get("val"), tuple | list)]
    return whole or [node for name in names if (node := node_of_part(nodes, name)) is not None]


def node_of_part(nodes: Mapping[str, fx.Node], name: str) -> fx.Node | None:
    """Return the node of a buffer with a part of its results: ``sum_2`` for ``sum_2_part``."""
    while name := name.rpartition("_")[0]:
        if name in nodes:
            return nodes[name]
    return None


def _computed(stored: Iterable[fx.Node], ends: set[fx.Node]) -> set[fx.Node]:
    """Return stored nodes and the nodes that they are computed from, up to other stored nodes.

    Without constants: equal ones share a node, whose module is that of the first use.
    """

    def inside(node: fx.Node) -> list[fx.Node]:
        calls = (n for n in node.all_input_nodes if n.op == "call_function" and n not in ends)
        return [call for call in calls if call.all_input_nodes]

    return set(reach(stored, inside))


def _around(paths: Sequence[str], kinds: Mapping[str, str]) -> str:
    """Return the name of several modules, given in graph order: a path, or a range of two."""
    named = list(dict.fromkeys(filter(None, paths)))
    inner = [a for a in named if not any(b.startswith(f"{a}.") for b in named)]
    if len(inner) < 2:
        return inner[0] if inner else ""
    first, last = min(inner).split("."), max(inner).split(".")
    both = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    common = ".".join(part for part, _ in both)
    if kinds.get(common, "") not in CONTAINERS:
        return common
    return f"{inner[0]}{BETWEEN}{inner[-1]}"
