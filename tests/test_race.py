"""The judge that measures, on this machine: the library's calls against kernels in an interpreter.

Nothing depends on how fast either is: where a verdict is wanted, it stands in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.targets import find_target
from fusec.ir.graph import Extern, Kernel
from fusec.options import Options
from fusec.passes.coalesce import coalesce
from fusec.passes.contract import Cut
from fusec.pipeline import Compiled, compile_to_source
from fusec.race import LIBRARY, DeviceJudge
from fusec.report.observe import Observed, observe
from fusec.runtime import executable
from fusec.runtime.cache import Cache
from fusec.runtime.verdicts import Lap, Verdict, all_verdicts
from fusec.stages import Context
from fusec.trace import Trace
from tests.triton_backend import InterpretedKernel

CPU = torch.device("cpu")


def linear_and_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


@pytest.fixture
def observed() -> Observed:
    inputs = (torch.randn(32, 16), torch.randn(48, 16), torch.randn(48))
    (seen,) = observe(linear_and_gelu, inputs, train=False, dynamic=False)
    return seen


def compiled(seen: Observed, judge: Callable[[Cut], DeviceJudge] | None, **more: Any) -> Compiled:
    options = Options.from_compile(None, {"strict": True, "cache": False, **more})
    context = Context(find_target("sm_90"), options, Trace("g"), judge)
    return compile_to_source(seen.graph, context)


def make_judge(
    seen: Observed, cache: Cache, kind: type[DeviceJudge] = DeviceJudge, **chosen: str
) -> Callable[[Cut], DeviceJudge]:
    def prepare(made: Compiled) -> Callable[[list[Any]], Any]:
        kernels = {name: InterpretedKernel(p) for name, p in made.programs.items()}
        return executable.bind(made.wrapper, kernels, seen.graph, CPU)

    def make(cut: Cut) -> DeviceJudge:
        options = Options.from_compile(None, {"race_budget_s": 20.0, **chosen})
        context = Context(find_target("sm_90"), options, Trace("race"))
        return kind(cut, context, CPU, prepare, "salt", cache)

    return make


class Ruled(DeviceJudge):
    """A judge whose races end as it is told."""

    winner = LIBRARY
    races = 0

    def race(self, group: Any) -> Verdict:
        type(self).races += 1
        laps = tuple(Lap(w.name, 10.0 if w.name == self.winner else 20.0) for w in self.ways(group))
        return Verdict(self.winner, laps)


def kinds(made: Compiled) -> list[str]:
    return ["kernel" if isinstance(s, Kernel) else s.target for s in made.schedule.steps]


def test_a_race_runs_both_ways_and_each_computes_the_same(observed: Observed, tmp_path: Path):
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    compiled(observed, make_judge(observed, cache))
    (verdict,) = all_verdicts(cache).values()
    assert {lap.name for lap in verdict.laps} >= {LIBRARY, "fused #0", "fused #1"}
    assert not any(lap.dropped and "wrong" in lap.dropped for lap in verdict.laps)
    assert all(lap.us is not None for lap in verdict.laps if lap.name in (LIBRARY, "fused #0"))


@pytest.mark.parametrize("winner", (LIBRARY, "fused #0", "fused #2"))
def test_the_winner_is_compiled_and_said_with_its_times(
    observed: Observed, tmp_path: Path, winner: str
):
    kind = type("Once", (Ruled,), {"winner": winner, "races": 0})
    judge = make_judge(observed, Cache(tmp_path, limit_bytes=1 << 20), kind)
    made = compiled(observed, judge)
    library = any(isinstance(s, Extern) for s in made.schedule.steps)
    assert library is (winner == LIBRARY), kinds(made)
    (said,) = [d for d in made.decisions if d.reason.startswith("measured")]
    assert said.taken is (winner != LIBRARY)
    assert f"{winner} 10" in said.reason
    if not library:
        number = int(winner[-1])
        (name,) = made.plans
        (step,) = made.schedule.steps
        assert isinstance(step, Kernel)
        target = find_target("sm_90")
        expected = target.plans(coalesce(target.algebra(step)))[number]
        assert made.plans[name].warps == expected.warps
        assert [b.tile for b in made.plans[name].bindings] == [b.tile for b in expected.bindings]
    compiled(observed, judge)
    assert kind.races == 1, "the second compile takes the verdict from the cache"


def test_a_raced_configuration_reaches_a_product_that_writes_an_input(tmp_path: Path):
    def update(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(F.gelu(x @ w))

    inputs = (torch.randn(256, 64), torch.randn(64, 256), torch.randn(256, 256))
    (seen,) = observe(update, tuple(i.bfloat16() for i in inputs), train=False, dynamic=False)
    kind = type("Third", (Ruled,), {"winner": "fused #2", "races": 0})
    made = compiled(seen, make_judge(seen, Cache(tmp_path, limit_bytes=1 << 20), kind))
    (step,) = made.schedule.steps
    assert isinstance(step, Kernel) and step.stores[0].buffer in made.schedule.graph.inputs
    target = find_target("sm_90")
    chosen = target.plans(coalesce(target.algebra(step)))[2]
    (plan,) = made.plans.values()
    assert [b.tile for b in plan.bindings] == [b.tile for b in chosen.bindings]
    assert (plan.warps, plan.descriptors) == (chosen.warps, chosen.descriptors)


def test_a_spent_budget_leaves_the_choice_to_the_model(observed: Observed, tmp_path: Path):
    kind = type("Spent", (Ruled,), {"races": 0})
    base = make_judge(observed, Cache(tmp_path, limit_bytes=1 << 20), kind)

    def spent(cut: Cut) -> DeviceJudge:
        judge = base(cut)
        judge.left_s = 0.0
        return judge

    made = compiled(observed, spent)
    assert kind.races == 0
    assert any("modelled" in d.reason for d in made.decisions)


def test_a_race_without_time_to_measure_leaves_no_verdict(observed: Observed, tmp_path: Path):
    class Late(Ruled):
        races = 0

        def race(self, group: Any) -> Verdict:
            type(self).races += 1
            laps = tuple(Lap(way.name, dropped="no time left") for way in self.ways(group))
            return Verdict(LIBRARY, laps, exhausted=True)

    cache = Cache(tmp_path, limit_bytes=1 << 20)
    judge = make_judge(observed, cache, Late)
    made = compiled(observed, judge)
    assert any("modelled" in d.reason for d in made.decisions)
    assert not all_verdicts(cache)
    compiled(observed, judge)
    assert Late.races == 2, "a later compile may have the time"


def test_forced_ways_are_never_raced(observed: Observed, tmp_path: Path):
    kind = type("Never", (Ruled,), {"races": 0})
    judge = make_judge(observed, Cache(tmp_path, limit_bytes=1 << 20), kind)
    assert kinds(compiled(observed, judge, race="fused")) == ["kernel"]
    assert "aten.mm.default" in kinds(compiled(observed, judge, race="library"))
    assert kind.races == 0


def test_configurations_that_options_leave_out_have_verdicts_of_their_own(
    observed: Observed, tmp_path: Path
):
    kind = type("Counted", (Ruled,), {"winner": "fused #0", "races": 0})
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    for way in ("always", "never", "always"):
        compiled(observed, make_judge(observed, cache, kind, descriptors=way), descriptors=way)
    assert kind.races == 2
