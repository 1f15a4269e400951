"""Entries of the cache as artifacts of torch: ``torch.compiler.save_cache_artifacts()``.

Each entry that a process loads or stores (kernels, starts, verdicts) is added to torch's collection
of artifacts; a collection that is loaded is stored in the cache. Keys contain versions and the
processor, so that an entry is only found where it is valid. Importing this module registers the
kind ``fusec``: ``import fusec.backend`` before ``torch.compiler.load_cache_artifacts(...)``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusec.options import Options
from fusec.runtime.cache.entry import decode, encode
from fusec.runtime.cache.store import listeners, open_cache
from fusec.torch_interior import CacheArtifact, CacheArtifactFactory, CacheArtifactManager


@CacheArtifactFactory.register
class Artifact(CacheArtifact):
    """One entry: its key, and the content of its file."""

    @staticmethod
    def type() -> str:
        """Return the name of this kind of artifact in torch's registry."""
        return "fusec"

    def populate_cache(self) -> None:
        """Store the entry in this user's cache, unless it is damaged."""
        blobs = decode(self.key, self.content)
        if blobs is not None:
            open_cache(Options.from_compile(None, None)).store(self.key, blobs)


def record(key: str, blobs: Mapping[str, bytes]) -> None:
    """Add an entry to torch's collection of artifacts."""
    CacheArtifactManager.record_artifact(Artifact.type(), key, encode(key, blobs))


if record not in listeners:
    listeners.append(record)
