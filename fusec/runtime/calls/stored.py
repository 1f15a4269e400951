"""Compiled graphs that were stored, in the cache or in an archive: their description in JSON.

Worked example, one graph::

    {"inference": {"key": "3f2a...", "device": "cpu", "titles": {"k0": "add, gelu"},
                   "outside": {"calls": {}, "constants": []}}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusec.runtime.cache.memory_file import as_file
from fusec.runtime.calls.convention import Convention
from fusec.runtime.calls.outside import GraphReferences, described
from fusec.runtime.kernels import cpp_kernel


@dataclass(frozen=True, slots=True)
class Stored:
    """A compiled graph, with all that is needed to bind it without its FX graph.

    Attributes:
        name: "forward", "backward" or "inference".
        key: of its entry in the cache.
        titles: the names of its launches in traces.
        outside: the operators and constants that its wrapper takes from the graph.
    """

    name: str
    key: str
    device: torch.device
    titles: Mapping[str, str]
    outside: GraphReferences


def read_parts(rows: Any, convention: Convention) -> list[Stored]:
    """Return the graphs of a cache entry or an archive, as its JSON describes them.

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


def load_kernels(
    blobs: Mapping[str, bytes], rows: list[dict[str, Any]], device: torch.device
) -> Mapping[str, Callable[..., None]]:
    """Return launchers by kernel name.

    Args:
        blobs: with a shared library, or code for a GPU.
        rows: the manifest's rows of kernels.
    """
    if not rows:
        return {}
    if "kernels.so" in blobs:
        return cpp_kernel.load(as_file(blobs["kernels.so"]), rows)
    # Local: Triton takes 0.2 s to import, and only GPU graphs need it.
    from fusec.runtime.kernels import triton_kernel

    index = torch.cuda.current_device() if device.index is None else device.index
    return triton_kernel.unpack(blobs, index)
