"""Entries of the cache as artifacts of torch: ``torch.compiler.save_cache_artifacts()``.

What a process found in the cache or put there, kernels, starts and verdicts, is handed to torch's
collection, and what another process hands back is stored. Keys name versions and the processor, so
that an entry is found only where it is right. Importing this module registers the kind ``fusec``
with torch: ``import fusec.driver.backend`` before ``torch.compiler.load_cache_artifacts(...)``.
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
        """Return what torch calls these artifacts."""
        return "fusec"

    def populate_cache(self) -> None:
        """Store the entry in this user's cache, unless it is damaged."""
        blobs = decode(self.key, self.content)
        if blobs is not None:
            open_cache(Options.from_compile(None, None)).store(self.key, blobs)


def record(key: str, blobs: Mapping[str, bytes]) -> None:
    """Hand an entry to torch's collection."""
    CacheArtifactManager.record_artifact(Artifact.type(), key, encode(key, blobs))


if record not in listeners:
    listeners.append(record)
