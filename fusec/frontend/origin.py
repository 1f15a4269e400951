"""The origin of an FX node: the user's source line, without the machine's paths.

A stack trace as Dynamo records it is a list of frames, outermost first::

    File "/home/me/model.py", line 41, in forward
        y = x + r

The last frame that is not inside the torch package is the user's. Worked example: the frame above
becomes ``model.py:41 in forward: y = x + r``. A frame of code that is in no file has no second
line: ``NO_TEXT`` takes its place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusec.ir.graph import Origin
from fusec.torch_interior import OpOverload

_FRAME = re.compile(
    r'^ *File "(?P<path>[^\n]*)", line (?P<line>\d+), in (?P<where>[^\n]*)'
    r'(?:\n(?! *File ")(?P<code>[^\n]*))?',
    re.MULTILINE,
)
NO_TEXT = "(no file has this line: exec, python -c, or a cell that is gone)"
"""Placeholder for a source line whose text Python cannot find."""
_HELD = "_modules|_parameters|_buffers|_orig_mod"
"""Attributes that hold a module's parts; paths omit them: they are not the user's names."""
_INSIDE = r"\.__\w+__(?:\[\d+\])?(?:\.cell_contents)?"
"""Python's own containers in an expression: ``__dict__``, ``__self__``, the cells of a closure."""
_ROOT = re.compile(rf"^L\['\w+'\]|^G(?=\[)|{_INSIDE}|\['(?:{_HELD})'\]|\b(?:{_HELD})\b")
_ARGUMENT = re.compile(r"^L\['(\w+)'\]$")
_GETATTR = re.compile(r"getattr\(((?:(?!getattr\().)*), '([^']*)'\)")
_NAMES = re.compile(r"\['?([^'\]]+)'?\]|([^.\[\]]+)")
_LIBRARY = re.compile(r"[/\\]torch[/\\]")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
_LINE_LIMIT = 80
_BACKWARD = re.compile(r"_backward(_data)?$")
_FORWARD = {"threshold": "relu"}
"""Stem of a backward operation's name -> the forward operation, where that is named otherwise."""
_TAKEN_APART = {torch.ops.aten.addmm, torch.ops.aten.baddbmm, torch.ops.aten.addmv}


def origin_of(node: Any) -> Origin:
    """Return the operation that the program calls, and the source line, of an FX node."""
    trace = node.meta.get("stack_trace")
    source = source_line(trace) if isinstance(trace, str) else None
    return Origin((op_name(called(node)),), () if source is None else (source,))


def called(node: Any) -> Any:
    """Return the operation that the program calls and from which an FX node was decomposed.

    The product and the sum of a decomposed product with a bias are returned as themselves.
    """
    whole = node.meta.get("original_aten")
    apart = isinstance(whole, OpOverload) and whole.overloadpacket not in _TAKEN_APART
    return whole if apart else node.target


def name_by_forward(nodes: Iterable[Any]) -> None:
    """Set ``original_aten`` to the forward's operation for nodes that a backward's formula adds.

    A gradient's formula begins with values that depend on no gradient, such as the normalised row
    of a layer norm; the forward computes and saves them, and does not call ``layer_norm_backward``.
    """
    for node in nodes:
        whole = node.meta.get("original_aten")
        if not isinstance(whole, OpOverload) or not _BACKWARD.search(whole.overloadpacket.__name__):
            continue
        name = _BACKWARD.sub("", whole.overloadpacket.__name__)
        forward = getattr(torch.ops.aten, _FORWARD.get(name, name), None)
        if forward is not None:
            node.meta["original_aten"] = getattr(forward, forward.overloads()[0])


def module_path(node: Any) -> str:
    """Return the path of an FX node's innermost module, "h.3.mlp"; "" for none or the outermost.

    Dynamo records a stack of modules by the expressions that lead there, ``L['self'].h.3.mlp`` or
    ``L['self']._modules['h']._modules['3']``; a backward's nodes have their forward's.
    """
    stack = module_stack(node)
    return dotted(str(list(stack.values())[-1][0])) if stack else ""


def module_stack(node: Any) -> Mapping[str, tuple[Any, Any]]:
    """Return key -> (expression, class) of the modules around an FX node, the outermost first."""
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def model_name(graph: Any) -> str:
    """Return a label that identifies a graph's model: its outermost class and first source line."""
    stacks = map(module_stack, graph.graph.nodes)
    kinds = (next(iter(stack.values()))[1] for stack in stacks if stack)
    kind = next((getattr(k, "__name__", str(k)).rpartition(".")[2] for k in kinds), "")
    lines = (line for node in graph.graph.nodes for line in origin_of(node).source)
    place = next((line.partition(": ")[0] for line in lines), "")
    return printable(", ".join(filter(None, (kind, place)))) or "a graph"


def user_name(placeholder: Any) -> str:
    """Return the program's name of an input of a Dynamo graph: "net.1.running_mean", "x"."""
    given = placeholder.meta.get("grapharg")
    expression = str(given.source.name) if given is not None and given.source else ""
    argument = _ARGUMENT.match(expression)
    return argument[1] if argument else dotted(expression)


def input_names(graph: Any, given: Sequence[str]) -> dict[str, str]:
    """Return placeholder name -> the program's name of that input, for a graph of AOTAutograd.

    Args:
        given: the program's names of the inputs of Dynamo's graph, in order.
    """
    found: dict[str, str] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        number = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(number, int) and number < len(given) and given[number]:
            found[node.name] = given[number]
    return found


@functools.lru_cache(maxsize=4096)
def dotted(expression: str) -> str:
    """Return the dotted path of one of Dynamo's source expressions: "h.3.mlp"."""
    while _GETATTR.search(expression):  # of names that are not identifiers
        expression = _GETATTR.sub(r"\1['\2']", expression)
    parts = _NAMES.findall(_ROOT.sub("", expression))
    return printable(".".join(name for pair in parts for name in pair if name))


def extern_name(target: Any) -> str:
    """Return the full name of a callable: as ``torch.ops`` spells it, where it is an operator."""
    return str(target) if isinstance(target, OpOverload) else op_name(target)


def op_name(target: Any) -> str:
    """Return ``add.Tensor`` for ``aten.add.Tensor``; other namespaces keep their name."""
    name = getattr(target, "__qualname__", None) or str(target)
    if hasattr(target, "_overloadname"):
        name = str(target).removeprefix("aten.")
    elif hasattr(target, "name") and callable(target.name):
        name = str(target.name())
    return printable(name)


@functools.lru_cache(maxsize=4096)
def source_line(trace: str) -> str | None:
    """Return ``file:line in function: code`` of the innermost frame of the user's code."""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return None
    own = [frame for frame in frames if not _LIBRARY.search(frame["path"])]
    frame = (own or frames)[-1]
    name = re.split(r"[/\\]", frame["path"])[-1]
    code = (frame["code"] or "").strip() or NO_TEXT
    if len(code) > _LINE_LIMIT:
        code = code[: _LINE_LIMIT - 3] + "..."
    where, _ = unresumed(frame["where"].strip())
    return printable(f"{name}:{frame['line']} in {where}: {code}")


def unresumed(function: str) -> tuple[str, int]:
    """Return the user's function and the line after which Dynamo resumes it; 0 for a whole one.

    After a graph break Dynamo compiles ``torch_dynamo_resume_in_forward_at_7``.
    """
    resumed = _RESUMED.match(function)
    return (resumed[1], int(resumed[2])) if resumed else (function, 0)


def printable(text: str) -> str:
    """Escape everything that could end a comment or steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
