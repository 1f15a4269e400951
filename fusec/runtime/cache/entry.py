"""The file format of one cache entry: named blobs behind a manifest of lengths and digests.

    header    magic (8 bytes), format version (u32), length of the manifest (u32), its SHA-256
    manifest  JSON: {"key": ..., "blobs": [{"name": ..., "length": ..., "sha256": ...}, ...]}
    blobs     their bytes, one after the other, in the manifest's order; then the file ends

Integers are little-endian. `decode(key, encode(key, blobs)) == blobs`, and any other bytes, a
truncated or longer file and an entry that was stored under another key included, decode to None.
The digests find damage. They do not authenticate: the directory's permissions do that.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

# As in PNG, the line ends in the magic show a transfer that translated text.
MAGIC = b"fusec\x00\r\n"
VERSION = 1
ABOUT = "about.json"
"""Name of the blob that describes an entry to people; it is the entry's first blob."""
HEADER = struct.Struct("<8sII32s")


def encode(key: str, blobs: Mapping[str, bytes]) -> bytes:
    """Return the content of the file that holds `blobs` under `key`."""
    described = [
        {"name": name, "length": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
        for name, blob in blobs.items()
    ]
    manifest = json.dumps({"key": key, "blobs": described}).encode()
    header = HEADER.pack(MAGIC, VERSION, len(manifest), hashlib.sha256(manifest).digest())
    return b"".join((header, manifest, *blobs.values()))


def decode(key: str, content: bytes) -> dict[str, bytes] | None:
    """Return the blobs that were stored under `key`, or None if `content` is not exactly that."""
    manifest = _manifest(content)
    if manifest is None:
        return None
    try:
        rest = memoryview(content)[HEADER.size + len(manifest) :]
        return _decode_blobs(key, json.loads(manifest), rest)
    except (ValueError, KeyError, TypeError, RecursionError):  # intact, but not by `encode`
        return None


def read_head(file: BinaryIO) -> tuple[str, bytes]:
    """Return the key of an entry and its first blob if that is ``ABOUT``; "", b"" if damaged."""
    header = file.read(HEADER.size)
    length = HEADER.unpack(header)[2] if len(header) == HEADER.size else 0
    try:
        found = json.loads(_manifest(header + file.read(length)) or b"")
        first: dict[str, Any] = next(iter(found["blobs"]), {"name": ""})
        return str(found["key"]), file.read(first["length"]) if first["name"] == ABOUT else b""
    except (ValueError, KeyError, TypeError):
        return "", b""


def _manifest(content: bytes) -> bytes | None:
    """Return the manifest at the start of `content`; None if header or digest do not match it."""
    if len(content) < HEADER.size:
        return None
    magic, version, length, digest = HEADER.unpack_from(content)
    manifest = content[HEADER.size : HEADER.size + length]
    if (magic, version) != (MAGIC, VERSION) or len(manifest) != length:
        return None
    return manifest if hashlib.sha256(manifest).digest() == digest else None


def _decode_blobs(key: str, manifest: dict[str, object], rest: memoryview) -> dict[str, bytes]:
    """Return the blobs that `manifest` describes; raise ValueError if `rest` holds others."""
    described = manifest["blobs"]
    if manifest["key"] != key or not isinstance(described, list):
        raise ValueError("an entry of another key")
    blobs: dict[str, bytes] = {}
    for blob in described:
        name, content = blob["name"], bytes(rest[: blob["length"]])
        if len(content) != blob["length"] or hashlib.sha256(content).hexdigest() != blob["sha256"]:
            raise ValueError(f"blob {name!r} is damaged")
        blobs[name] = content
        rest = rest[len(content) :]
    if rest:
        raise ValueError("bytes behind the last blob")
    return blobs
