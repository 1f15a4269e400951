"""Ranks agree on what races decided, whatever each of them measures."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fusec.driver.race import Contest
from fusec.passes.fusion.contract import LIBRARY
from fusec.runtime.cache.store import Cache
from fusec.runtime.race.ranks import Ranks, find_ranks
from fusec.runtime.race.verdicts import CandidateTime, Verdict, all_verdicts
from fusec.tools.report.observe import Observed
from tests.distributed.ranks import run_ranks
from tests.driver.test_race import Ruled, compiled, kinds, make_judge, observed

__all__ = ["observed"]  # a fixture

FUSED, SEPARATE = ["kernel"], ["aten.mm.default", "kernel"]


def judge_of(
    seen: Observed, path: Path, store: Any, winner: str, left_s: float = 20.0
) -> tuple[Ruled, type[Ruled]]:
    """Return the judge of a rank whose races are won by ``winner``, and its class."""
    kind = type("Rank", (Ruled,), {"winner": winner, "races_run": 0})
    judge = make_judge(seen, Cache(path, limit_bytes=1 << 20), kind)
    judge.races.ranks, judge.races.left_s = Ranks(store), left_s
    return judge, kind


@pytest.mark.parametrize("first, second", [(LIBRARY, "fused #0"), ("fused #0", LIBRARY)])
def test_the_first_rank_s_verdict_holds_for_the_second(observed, tmp_path, first, second):
    store = dist.HashStore()
    one, _ = judge_of(observed, tmp_path / "1", store, first)
    two, kind = judge_of(observed, tmp_path / "2", store, second)
    wanted = SEPARATE if first == LIBRARY else FUSED
    assert kinds(compiled(observed, one)) == kinds(compiled(observed, two)) == wanted
    assert kind.races_run == 0


def test_ranks_that_race_at_the_same_time_take_what_was_published_first(observed, tmp_path):
    store = dist.HashStore()
    one, _ = judge_of(observed, tmp_path / "1", store, LIBRARY)
    two, kind = judge_of(observed, tmp_path / "2", store, "fused #0")

    def meanwhile(self: Ruled, contest: Contest, reference: str, budget_s: float) -> Verdict:
        compiled(observed, one)
        return Ruled.race(self, contest, reference, budget_s)

    kind.race = meanwhile
    assert kinds(compiled(observed, two)) == SEPARATE
    assert kind.races_run == 1


def test_a_verdict_of_the_cache_yields_to_a_published_one(observed, tmp_path):
    alone, _ = judge_of(observed, tmp_path / "2", dist.HashStore(), "fused #0")
    assert kinds(compiled(observed, alone)) == FUSED
    store = dist.HashStore()
    one, _ = judge_of(observed, tmp_path / "1", store, LIBRARY)
    two, _ = judge_of(observed, tmp_path / "2", store, "fused #0")
    assert kinds(compiled(observed, one)) == kinds(compiled(observed, two)) == SEPARATE


def test_a_rank_without_time_leaves_all_of_them_to_the_model(observed, tmp_path):
    store = dist.HashStore()
    one, _ = judge_of(observed, tmp_path / "1", store, LIBRARY, left_s=0.0)
    two, kind = judge_of(observed, tmp_path / "2", store, "fused #0")
    for judge in (one, two):
        made = compiled(observed, judge)
        assert any("modelled" in d.reason for d in made.decisions)
    assert kind.races_run == 0
    assert not all_verdicts(Cache(tmp_path / "1", limit_bytes=1 << 20))


def test_a_store_that_fails_leaves_a_rank_to_its_own_verdict(observed, tmp_path):
    class Broken:
        def check(self, names: list[str]) -> bool:
            raise dist.DistNetworkError("gone")

        compare_set = check

    judge, _ = judge_of(observed, tmp_path, Broken(), "fused #0")
    Broken.compare_set = lambda self, *args: Broken.check(self, [])
    assert kinds(compiled(observed, judge)) == FUSED


def test_there_is_nobody_to_agree_with_in_a_process_alone():
    assert find_ranks() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert find_ranks() is None
    finally:
        dist.destroy_process_group()


def agree(rank: int) -> None:
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=20))
    ranks = find_ranks()
    assert ranks is not None and ranks.published("key") is None
    dist.barrier()
    own = Verdict(f"way {rank}", (CandidateTime(f"way {rank}", 1.0),))
    agreed = ranks.agree("key", own)
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, agreed.winner)
    assert everybody[0] == everybody[1]
    assert ranks.published("key") == agreed


def test_two_processes_agree_through_their_store():
    run_ranks(agree)
