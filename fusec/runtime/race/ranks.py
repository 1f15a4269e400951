"""What ranks agree on: the first to publish a verdict decides for all that ask for the same one.

A race that each rank runs by itself may end differently on each, and then equal computations of
equal inputs would differ in their last bits. Verdicts therefore go through the store by which the
ranks of the default process group met. Nobody waits for anybody: ranks that compile other graphs,
or none, are asked for nothing. A store that fails leaves each rank to its own verdict.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch.distributed as dist

from fusec.runtime.race.verdicts import Verdict

logger = logging.getLogger("fusec.race")

_PREFIX = "fusec/verdict/"


class Ranks:
    """The verdicts that the ranks around one store have in common.

    Args:
        store: a ``torch.distributed.Store``.
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    def published(self, key: str) -> Verdict | None:
        """Return the verdict that a rank has published under a key, or None."""
        try:
            name = _name(key)
            if not self.store.check([name]):  # ``get`` would wait for it
                return None
            return Verdict.from_json(self.store.get(name).decode())
        except (RuntimeError, ValueError) as error:
            logger.warning("ranks cannot read each other's verdicts: %s", error)
            return None

    def agree(self, key: str, verdict: Verdict) -> Verdict:
        """Publish a verdict under a key, and return the one that was published first."""
        try:
            first = self.store.compare_set(_name(key), "", verdict.to_json())
            return Verdict.from_json(first.decode())
        except (RuntimeError, ValueError) as error:
            logger.warning("ranks cannot agree on a verdict: %s", error)
            return verdict


def find_ranks() -> Ranks | None:
    """Return the ranks of the default process group; None if there is none, or one rank alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Ranks(dist.distributed_c10d._get_default_store())


def _name(key: str) -> str:
    return _PREFIX + hashlib.sha256(key.encode()).hexdigest()
