"""Names of a graph's arguments and results for C, beside the signature of its function.

The signature (``native.py``) has types and sizes by position, because the library is
compiled before any names are known. A line here describes an argument or a result:

    needs x86_64 avx avx2        the features of the processor
    size B                       of each dynamic size; several may have one name
    input 1 batch['mask']        an argument, numbered in the order of the model's call
    weight up.weight             a tensor of the weights' file
    or head.weight               another name of it
    held rope.frequencies        a value in the archive, the blob "held/" and the name
    unread                       an argument that is not read
    result result['logits']      the name of each result
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusec.archive import trees
from fusec.errors import UsageError

NAMES = "names.txt"


def describe_native(
    calling: Mapping[str, Any],
    signature: str,
    returned: int,
    needed: str,
    sizes: Mapping[str, str],
) -> str:
    """Return the names for a signature.

    Args:
        calling: as ``archive.model.read_calling`` reads it.
        sizes: names of the signature's sizes.
        returned: how many results the graph has.
        needed: the features of the processor.
    Raises:
        UsageError: for written weights, results that are no tensors, and names that C cannot read.
    """
    rows = [line.split() for line in signature.splitlines()[1:]]
    arguments = [kind for kind, *_ in rows if kind in ("argument", "written", "unread")]
    lines = [f"needs {needed}"]
    # The graph's other arguments are sizes, which have lines of their own.
    lines += [f"size {sizes[rest[0]]}" for kind, *rest in rows if kind == "size"]
    given: list[Any] = [k for k in calling["graph"] if k is None or isinstance(k, int)]
    places = zip(given, arguments, strict=True)
    read = sorted(k for k, kind in places if kind != "unread" and k < len(calling["tensors"]))
    for position, kind in zip(given, arguments, strict=True):
        lines += _argument(calling, position, kind, read)
    paths = dict(trees.tensors_of(calling["result"], "result"))
    if returned != sum(kind == "result" for kind, *_ in rows):
        raise UsageError("a result that is no tensor, which C cannot be given.")
    lines += [f"result {paths.get(k, 'result')}" for k in range(returned)]
    for line in lines:
        if not line.isprintable() or not line.isascii() or set(line) & set('"\\'):
            raise UsageError(f"C reads no such name: {line!r}. Give it letters and digits.")
    return "".join(f"{line}\n" for line in lines)


def _argument(calling: Mapping[str, Any], position: int, kind: str, read: list[int]) -> list[str]:
    tensors = calling["tensors"]
    if kind == "unread":
        return ["unread"]
    if position < len(tensors):
        return [f"input {read.index(position)} {tensors[position]['path']}"]
    row = calling["weights"][position - len(tensors)]
    first, *others = row["names"]
    if kind == "written":
        raise UsageError(
            f"the model writes to {first}, and a model in C has no state that calls share: make it "
            "an input, or call eval()."
        )
    if row["held"]:
        return [f"held {first}"]
    return [f"weight {first}", *(f"or {name}" for name in others)]
