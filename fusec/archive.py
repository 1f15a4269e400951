"""Compiled graphs as bytes that another process, or another machine, runs without compiling.

An archive holds what the cache has of a graph of Dynamo: the calling convention, and of forward and
backward the wrapper, the kernels, and what the wrapper takes of its graph. It says what it was made
for, and is refused where that differs: fusec and torch of the same release, the target, and a
processor with the features that its code may use. Then kernels are loaded, and nothing is traced,
compiled or raced.

The bytes are those of an entry of the cache (``runtime/entry.py``): lengths and digests are checked
before anything is read. Digests find damage, they do not authenticate. The wrapper is Python and
kernels are native code: trust an archive as you trust a program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fusec
from fusec.codegen.targets import find_target
from fusec.compiler import Stored, bind_blobs, device_target
from fusec.errors import UsageError
from fusec.options import Options
from fusec.runtime.cache import cpu_features
from fusec.runtime.convention import Convention
from fusec.runtime.entry import decode, encode
from fusec.runtime.executable import BoxedCall
from fusec.runtime.outside import described
from fusec.torch_interior import SerializableCallable

FORMAT = 1
_KEY = "fusec archive"


class BadArchive(UsageError):
    """Bytes are no archive, or one that does not run here: the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One compiled graph of an archive.

    Attributes:
        row: what ``warm`` writes of it, as JSON has it.
        blobs: its entry in the cache.
    """

    name: str
    row: Mapping[str, Any]
    blobs: Mapping[str, bytes]


def pack(convention: Convention, parts: Sequence[Packed], target: str) -> bytes:
    """Return an archive.

    Args:
        parts: a forward and a backward, or an inference graph.
        target: what its kernels are for: "cpu", "sm_90".
    """
    about = {"format": FORMAT, "machine": _machine(target), "parts": {p.name: p.row for p in parts}}
    blobs = {f"{p.name}/{name}": blob for p in parts for name, blob in p.blobs.items()}
    head = {"about.json": json.dumps(about).encode(), "convention.json": convention.to_json()}
    return encode(_KEY, {**head, **blobs})


def unpack(content: bytes) -> Callable[..., Any]:
    """Return what is called with a graph's inputs, and returns its results in a list.

    Raises:
        BadArchive: saying what is wrong with the bytes, or what this machine lacks.
    """
    blobs = decode(_KEY, content)
    if blobs is None:
        raise BadArchive("These bytes are no archive of fusec, or they are damaged.")
    try:
        about = json.loads(blobs["about.json"])
        _check(about["format"], about["machine"])
        convention = Convention.from_json(blobs["convention.json"])
        parts = read_parts(about["parts"], convention)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadArchive(f"The archive says nothing that this version knows: {error!r}") from error
    return convention.around(*(_bind(part, blobs) for part in parts))


def read_parts(rows: Any, convention: Convention) -> list[Stored]:
    """Return what an entry, or an archive, says of its graphs.

    Raises:
        ValueError: for anything that ``warm`` does not write.
    """
    try:
        parts = [
            Stored(
                str(name),
                str(row["key"]),
                torch.device(row["device"]),
                {str(launch): str(title) for launch, title in row["titles"].items()},
                described(row["outside"]),
            )
            for name, row in rows.items()
        ]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(repr(error)) from error
    expected = ["inference"] if convention.training is None else ["forward", "backward"]
    if [part.name for part in parts] != expected:
        raise ValueError(f"graphs {', '.join(part.name for part in parts)}")
    return parts


def _bind(part: Stored, blobs: Mapping[str, bytes]) -> BoxedCall:
    prefix = f"{part.name}/"
    own = {n.removeprefix(prefix): blob for n, blob in blobs.items() if n.startswith(prefix)}
    if not {"wrapper.py", "named.py", "manifest.json"} <= own.keys():
        raise BadArchive(f"The archive has no whole graph {part.name!r}.")
    return bind_blobs(part, own, Options())


def _machine(target: str) -> dict[str, str]:
    return {
        "fusec": fusec.__version__,
        "torch": torch.__version__.partition("+")[0],
        "target": target,
        "processor": cpu_features() if find_target(target).device == "cpu" else "",
    }


def _check(version: Any, made_for: Mapping[str, str]) -> None:
    """Raise BadArchive where an archive was made for another machine."""
    if version != FORMAT:
        raise BadArchive(f"The archive has format {version!r}, this fusec reads {FORMAT}.")
    here = _machine(made_for["target"])
    for name in ("fusec", "torch"):
        if made_for[name] != here[name]:
            raise BadArchive(
                f"The archive was made with {name} {made_for[name]}, and {here[name]} is installed."
            )
    if find_target(made_for["target"]).device != "cpu":
        _check_device(made_for["target"])
    missing = set(made_for["processor"].split()) - set(here["processor"].split())
    if missing:
        raise BadArchive(
            "The archive's kernels use features of a processor that this one lacks: "
            f"{' '.join(sorted(missing))}. Build it here, or on a processor without them."
        )


def _check_device(target: str) -> None:
    if not torch.cuda.is_available():
        raise BadArchive(f"The archive's kernels are for {target}, and there is no CUDA device.")
    here = device_target(torch.device("cuda"))
    if target != here:
        raise BadArchive(f"The archive's kernels are for {target}; this device is {here}.")


class Shipped(SerializableCallable):
    """A compiled graph that ``torch.compile(...).aot_compile`` can save and load."""

    def __init__(self, call: Callable[..., Any], content: bytes) -> None:
        self._call, self._content = call, content

    @classmethod
    def serialize_compile_artifacts(cls, fn: Shipped) -> bytes:
        """Return the archive of a graph."""
        return fn._content

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Shipped:
        """Return the graph of an archive.

        Raises:
            BadArchive: where it does not run here.
        """
        return Shipped(unpack(data), data)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)
