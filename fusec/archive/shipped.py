"""What torch saves of a graph inside ``aot_compile``: an archive, loaded without a compiler.

Torch's loader has imported Dynamo, whose interface this takes; ``fusec.load`` does without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusec.archive.graph import unpack
from fusec.torch_interior import SerializableCallable


class Shipped(SerializableCallable):
    """A compiled graph that ``torch.compile(...).aot_compile`` can save and load.

    Files name it by this module: it stays where it is.
    """

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
        return Shipped(unpack(data).call, data)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)
