"""Races that others have run: a verdict in the cache decides, as from an earlier compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusec.driver.race import Races
from fusec.options import Options
from fusec.passes.fusion.libraries import ATEN
from fusec.runtime.cache.store import open_cache
from fusec.runtime.race.verdicts import CandidateTime, Verdict, store_verdict
from tests.calls import calls_of


def decide_products(
    monkeypatch: pytest.MonkeyPatch, directory: Path, winner: str, compile_all: Callable[[], Any]
) -> None:
    """Compile once, and keep for the compiles behind that a library won each race of a product.

    Args:
        directory: of the cache, which is new: what was compiled to ask for races is not in it.
    """
    torch._dynamo.reset()
    monkeypatch.setenv("FUSEC_CACHE", "0")
    with calls_of(Races.verdict) as races:
        compile_all()
    monkeypatch.delenv("FUSEC_CACHE")
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(directory))
    cache = open_cache(Options.from_compile(None, None))
    verdict = Verdict(winner, (CandidateTime(ATEN, 20.0), CandidateTime(winner, 10.0)))
    for race in races:
        if race.arguments["reference"] == ATEN:
            salt, key = race.arguments["self"].salt, race.arguments["key"]
            store_verdict(cache, f"{salt} {key}", verdict)
    torch._dynamo.reset()
