"""The judge that measures, on this machine: the library's calls against kernels in an interpreter.

Nothing depends on how fast either is: where a verdict is wanted, it stands in the cache.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusec.archive.graph import load_kernels
from fusec.codegen.targets import find_target
from fusec.driver import compiler
from fusec.driver.contests import (
    GroupContests,
    _fewer,
    convolution_contest,
    product_contest,
    timed_batch,
)
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, compile_to_source
from fusec.driver.race import Contest, RaceJudge, Races, decide, race_lock
from fusec.driver.trace import Trace
from fusec.errors import KernelFault
from fusec.frontend.fx_passes.channels_last import IMAGES
from fusec.frontend.fx_passes.memory_formats import format_choice
from fusec.frontend.fx_passes.packing import has_onednn
from fusec.ir.choice import Choice, Decided, Judge, judge_by_rule
from fusec.ir.graph import Extern, Kernel
from fusec.ir.machine import RaceTuning
from fusec.options import Options
from fusec.passes.fusion.contract import FUSED, LIBRARY
from fusec.passes.fusion.libraries import ATEN, library_choice, multiply_adds
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.online_softmax import online_softmax
from fusec.runtime.cache.store import Cache, fingerprint
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.race import rehearsal
from fusec.runtime.race.rehearsal import rehearse
from fusec.runtime.race.verdicts import CandidateTime, Verdict, all_verdicts
from fusec.tools.report import explain
from fusec.tools.report.observe import Observed, observe
from tests.calls import calls_of
from tests.frontend.fx_passes.test_memory_formats import rewritten
from tests.support import tune
from tests.triton_backend import InterpretedKernel
from tests.verdicts import decide_products

CPU = torch.device("cpu")


def linear_and_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


@pytest.fixture
def observed() -> Observed:
    inputs = (torch.randn(32, 16), torch.randn(48, 16), torch.randn(48))
    (seen,) = observe(linear_and_gelu, inputs, train=False, dynamic=False)
    return seen


def compiled(seen: Observed, judge: Judge = judge_by_rule, **more: Any) -> Compiled:
    options = Options.from_compile(None, {"strict": True, "cache": False, **more})
    context = CompileContext(find_target("sm_90"), options, Trace("g"), judge)
    return compile_to_source(seen.graph, context)


def make_judge(
    seen: Observed, cache: Cache, kind: type[RaceJudge] = RaceJudge, **chosen: str
) -> RaceJudge:
    """Return the judge of one compile: it races groups, fused kernels in an interpreter."""

    def prepare(made: Compiled) -> Callable[[list[Any]], Any]:
        kernels = {name: InterpretedKernel(p) for name, p in made.programs.items()}
        return executable.bind(made.wrapper, kernels, of_graph(seen.graph), CPU)

    options = Options.from_compile(None, {"race_budget_s": 20.0, **chosen})
    context = CompileContext(find_target("sm_90"), options, Trace("race"))
    contests = Open(context, prepare, CPU)
    return kind(Races(CPU, options.race_seconds("cuda"), "salt", cache), {"group": contests})


class Open(GroupContests):
    """Contests of all groups, as on a GPU: also where the model says which candidate is faster."""

    def _is_open(self, choice: Choice) -> bool:
        return True


class Ruled(RaceJudge):
    """A judge whose races are won by a given candidate."""

    winner = LIBRARY
    races_run = 0

    def race(self, contest: Contest, reference: str, budget_s: float) -> Verdict:
        type(self).races_run += 1
        laps = tuple(
            CandidateTime(c.name, 10.0 if c.name == self.winner else 20.0)
            for c in contest.candidates()
        )
        return Verdict(self.winner, laps, sizes=contest.sizes)


def kinds(made: Compiled) -> list[str]:
    return ["kernel" if isinstance(s, Kernel) else s.target for s in made.schedule.steps]


def test_a_race_runs_both_ways_and_each_computes_the_same(observed: Observed, tmp_path: Path):
    seen: list[Verdict] = []

    class Kept(RaceJudge):
        def race(self, contest: Contest, reference: str, budget_s: float) -> Verdict:
            seen.append(super().race(contest, reference, budget_s))
            return seen[-1]

    compiled(observed, make_judge(observed, Cache(tmp_path, limit_bytes=1 << 20), Kept))
    (verdict,) = seen
    assert {lap.name for lap in verdict.laps} >= {LIBRARY, "fused #0", "fused #1"}
    assert not any(lap.dropped and "wrong" in lap.dropped for lap in verdict.laps)
    assert all(lap.us is not None for lap in verdict.laps if lap.name in (LIBRARY, "fused #0"))


def test_a_verdict_on_kernels_is_that_of_the_sources_which_make_them(
    observed: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind, cache = type("Once", (Ruled,), {"races_run": 0}), Cache(tmp_path, limit_bytes=1 << 20)
    ptxas = tmp_path / "ptxas"  # as a part of what makes kernels
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    for version, races in (("this", 1), ("this", 1), ("next", 2)):
        ptxas.write_text(version)
        fingerprint.cache_clear()
        compiled(observed, make_judge(observed, cache, kind))
        assert kind.races_run == races
    fingerprint.cache_clear()


@pytest.mark.parametrize("winner", (LIBRARY, "fused #0", "fused #2"))
def test_the_winner_is_compiled_and_said_with_its_times(
    observed: Observed, tmp_path: Path, winner: str
):
    kind = type("Once", (Ruled,), {"winner": winner, "races_run": 0})
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    made = compiled(observed, make_judge(observed, cache, kind))
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
        expected = target.plans(coalesce(online_softmax(step)))[number]
        assert made.plans[name].warps == expected.warps
        assert [b.tile for b in made.plans[name].bindings] == [b.tile for b in expected.bindings]
    compiled(observed, make_judge(observed, cache, kind))
    assert kind.races_run == 1, "the second compile takes the verdict from the cache"


def test_a_raced_configuration_reaches_a_product_that_writes_an_input(tmp_path: Path):
    def update(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(F.gelu(x @ w))

    inputs = (torch.randn(256, 64), torch.randn(64, 256), torch.randn(256, 256))
    (seen,) = observe(update, tuple(i.bfloat16() for i in inputs), train=False, dynamic=False)
    kind = type("Third", (Ruled,), {"winner": "fused #2", "races_run": 0})
    made = compiled(seen, make_judge(seen, Cache(tmp_path, limit_bytes=1 << 20), kind))
    (step,) = made.schedule.steps
    assert isinstance(step, Kernel) and step.stores[0].buffer in made.schedule.graph.inputs
    target = find_target("sm_90")
    chosen = target.plans(coalesce(online_softmax(step)))[2]
    (plan,) = made.plans.values()
    assert [b.tile for b in plan.bindings] == [b.tile for b in chosen.bindings]
    assert (plan.warps, plan.descriptors) == (chosen.warps, chosen.descriptors)


def test_a_spent_budget_leaves_the_choice_to_the_model(observed: Observed, tmp_path: Path):
    kind = type("Spent", (Ruled,), {"races_run": 0})
    judge = make_judge(observed, Cache(tmp_path, limit_bytes=1 << 20), kind)
    judge.races.left_s = 0.0
    made = compiled(observed, judge)
    assert kind.races_run == 0
    assert any("modelled" in d.reason for d in made.decisions)


@pytest.mark.parametrize("us", [None, 10.0], ids=["nothing timed", "the reference alone"])
def test_a_race_without_time_to_compare_leaves_no_verdict(
    observed: Observed, tmp_path: Path, us: float | None
):
    class Late(RaceJudge):
        races_run = 0

        def race(self, contest: Contest, reference: str, budget_s: float) -> Verdict:
            type(self).races_run += 1
            first, *others = (candidate.name for candidate in contest.candidates())
            late = tuple(CandidateTime(name, dropped="no time left") for name in others)
            return Verdict(LIBRARY, (CandidateTime(first, us, us, us), *late), exhausted=True)

    cache = Cache(tmp_path, limit_bytes=1 << 20)
    made = compiled(observed, make_judge(observed, cache, Late))
    assert any("modelled" in d.reason for d in made.decisions)
    assert not all_verdicts(cache)
    compiled(observed, make_judge(observed, cache, Late))
    assert Late.races_run == 2, "a later compile may have the time"


def test_forced_ways_are_never_raced(observed: Observed, tmp_path: Path):
    kind = type("Never", (Ruled,), {"races_run": 0})
    judge = make_judge(observed, Cache(tmp_path, limit_bytes=1 << 20), kind)
    assert kinds(compiled(observed, judge, race="fused")) == ["kernel"]
    assert "aten.mm.default" in kinds(compiled(observed, judge, race="library"))
    assert kind.races_run == 0


def test_configurations_that_options_leave_out_have_verdicts_of_their_own(
    observed: Observed, tmp_path: Path
):
    kind = type("Counted", (Ruled,), {"winner": "fused #0", "races_run": 0})
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    for way in ("always", "never", "always"):
        compiled(observed, make_judge(observed, cache, kind, descriptors=way), descriptors=way)
    assert kind.races_run == 2


@pytest.mark.parametrize(("ratio", "raced"), [(5.0, False), (0.2, False), (1.5, True)])
def test_a_cpu_races_for_groups_whose_modelled_times_are_close(ratio: float, raced: bool):
    context = CompileContext(find_target("cpu"), Options(), Trace("race"))
    contests = GroupContests(context, lambda made: list, CPU)
    modelled = Decided(f"{FUSED}0" if ratio > 1 else LIBRARY, "", 10.0 - 10.0 / ratio, 10.0)
    group = SimpleNamespace(signature=f"{ratio}", sizes=())
    choice = Choice("group", lambda: "g", group, (LIBRARY,), lambda: modelled, FUSED)
    assert (contests(choice) is not None) is raced


def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    gate, up = w.chunk(2)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("winner", "fused"), [("oneDNN", False), ("fused #0", True)])
@pytest.mark.skipif(not has_onednn(), reason="this torch is built without oneDNN")
def test_a_kernel_of_few_rows_stands_against_every_library(winner: str, fused: bool, monkeypatch):
    """One that beats ATen may still lose to oneDNN."""
    verdicts: list[Verdict] = []
    decisions: list[Decided] = []

    class Told(RaceJudge):
        def __call__(self, choice: Choice) -> Decided:
            decided = super().__call__(choice)
            decisions.extend([decided] if choice.kind == "group" else [])
            return decided

        def race(self, contest: Contest, reference: str, budget_s: float) -> Verdict:
            verdicts.append(super().race(contest, reference, 60.0))
            times = {LIBRARY: 30.0, "oneDNN": 20.0, "fused #0": 25.0, winner: 10.0}
            laps = tuple(CandidateTime(name, us, us, us) for name, us in times.items())
            return Verdict(winner, laps)

    tune(monkeypatch, "races", clear=float("inf"))
    inputs = (torch.randn(4, 256), torch.randn(1024, 256))
    (seen,) = observe(gated, inputs, train=False, dynamic=False)
    options = Options.from_compile(None, {"strict": True, "cache": False, "race_budget_s": 60.0})
    target = compiler.target_for(CPU, options)
    groups = compiler._group_contests(seen.graph, target, options, CPU)
    judge = Told(races(left_s=60.0), {"group": groups})
    compile_to_source(seen.graph, CompileContext(target, options, Trace("g"), judge))
    (verdict,), (decided,) = verdicts, decisions
    assert set(verdict.times) == {LIBRARY, "oneDNN", "fused #0"}, verdict
    assert not any(lap.dropped and "wrong" in lap.dropped for lap in verdict.laps)
    assert decided.candidate.startswith(FUSED) is fused
    assert decided.saved_us == (10.0 if fused else -15.0)


# -- libraries -------------------------------------------------------------------------------------


class Measured(RaceJudge):
    """A judge of products whose races return given times."""

    def __init__(self, races: Races, onednn: float, spread: float = 0.0) -> None:
        super().__init__(races, PRODUCTS)
        self.onednn, self.spread, self.raced = onednn, spread, 0

    def race(self, contest: Contest, reference: str, budget_s: float) -> Verdict:
        self.raced += 1
        laps = (
            CandidateTime(ATEN, 10.0, 10.0 - self.spread, 10.0 + self.spread),
            CandidateTime("oneDNN", self.onednn, self.onednn, self.onednn),
        )
        return Verdict(min(laps, key=lambda lap: lap.us or 0.0).name, laps)


PRODUCTS = {"product": partial(product_contest, CPU, RaceTuning())}


def race_libraries(call: Extern, timed_product: int = 1 << 28) -> Verdict:
    contest = product_contest(CPU, RaceTuning(timed_product=timed_product), library_choice(call))
    return RaceJudge(races(), PRODUCTS).race(contest, ATEN, 20.0)


def linear_call(m: int = 64, k: int = 128, n: int = 256) -> Extern:
    (seen,) = observe(torch.nn.Linear(k, n), (torch.randn(m, k),), train=False, dynamic=False)
    context = CompileContext(find_target("cpu"), Options(), Trace("g"))
    (call,) = compile_to_source(seen.graph, context).schedule.externs
    return call


def races(cache: Cache | None = None, left_s: float = 20.0) -> Races:
    return Races(CPU, left_s, "salt", cache)


@pytest.mark.parametrize(("onednn", "winner"), [(5.0, "oneDNN"), (20.0, ATEN)])
def test_the_faster_library_is_named_with_both_times(onednn: float, winner: str):
    decided = Measured(races(), onednn)(library_choice(linear_call()))
    assert decided.candidate == winner
    assert decided.saved_us == 10.0 - onednn
    assert "ATen 10.0 us" in decided.reason and "oneDNN" in decided.reason


@pytest.mark.parametrize(("spread", "raced"), [(0.1, 1), (3.0, 2)])
def test_a_verdict_is_kept_if_its_reference_ran_steadily(tmp_path: Path, spread, raced):
    cache, count = Cache(tmp_path, limit_bytes=1 << 20), 0
    for _ in range(2):
        judge = Measured(races(cache), 5.0, spread)
        assert judge(library_choice(linear_call())).candidate == "oneDNN"
        count += judge.raced
    assert count == raced


def test_a_product_that_is_not_raced_goes_by_rule():
    judge = Measured(races(left_s=0.0), 5.0)
    decided = judge(library_choice(linear_call()))
    assert judge.raced == 0 and decided.candidate == ATEN
    assert decided.reason == "by rule: the library that it names; not raced: nothing is timed"


def test_one_process_races_at_a_time():
    held = race_lock(CPU).lock_file
    code = (
        "import sys; from filelock import FileLock\n"
        f"with FileLock({held!r}): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    judge = Measured(races(left_s=0.2), 5.0)
    assert judge(library_choice(linear_call())).candidate == ATEN
    assert judge.raced == 0 and judge.races.left_s <= 0
    other.communicate()
    judge = Measured(races(left_s=20.0), 5.0)
    assert judge(library_choice(linear_call())).candidate == "oneDNN"


def times(weight: torch.Tensor, rows: int = 64) -> Extern:
    """Return the call that multiplies by a weight [terms, columns] as it lies."""
    given = torch.randn(rows, len(weight)), weight
    (seen,) = observe(torch.mm, given, train=False, dynamic=False)
    context = CompileContext(find_target("cpu"), Options(), Trace("g"))
    (call,) = compile_to_source(seen.graph, context).schedule.externs
    return call


@pytest.mark.parametrize("transposed", (False, True))
def test_a_race_of_libraries_times_a_part_of_a_long_product(
    transposed: bool,
):
    call = times(torch.randn(256, 128).t() if transposed else torch.randn(128, 256))
    timed = _fewer(call, 1 << 19)
    *_, a, b = timed.views
    assert multiply_adds(timed) <= 1 << 19 < multiply_adds(call)
    assert (a.shape[1], b.shape[0]) == (call.views[-2].shape[1], call.views[-1].shape[0])
    assert a.is_dense and b.is_dense
    verdict = race_libraries(call, 1 << 19)
    assert {lap.name for lap in verdict.laps} == {ATEN, *call.alternatives}
    assert not any(lap.dropped and "wrong" in lap.dropped for lap in verdict.laps)
    assert all(lap.us is not None for lap in verdict.laps), verdict


@pytest.mark.parametrize(
    "fn", [lambda x: x @ x.t(), lambda x: x.t() @ x, lambda x: x @ x], ids=["xxt", "xtx", "xx"]
)
def test_a_matrix_that_is_both_factors_is_one_tensor_in_the_race(
    fn: Callable[[torch.Tensor], torch.Tensor],
):
    (seen,) = observe(fn, (torch.randn(128, 128),), train=False, dynamic=False)
    context = CompileContext(find_target("cpu"), Options(), Trace("g"))
    (call,) = compile_to_source(seen.graph, context).schedule.externs
    verdict = race_libraries(call, 1 << 20)
    assert all(lap.us is not None for lap in verdict.laps), verdict


def test_a_verdict_is_not_used_where_its_winner_is_not_offered(tmp_path: Path):
    choice = library_choice(linear_call())
    contest = product_contest(CPU, RaceTuning(), choice)
    verdict = Verdict("BLIS", (CandidateTime(ATEN, 2.0), CandidateTime("BLIS", 1.0)))
    assert decide(choice, contest, verdict).candidate == ATEN
    assert all(name in contest.key for name in choice.candidates)


def test_a_library_that_gives_other_numbers_never_wins(
    caplog: pytest.LogCaptureFixture,
):
    call = linear_call()
    doubled = replace(call, kwargs=(("alpha", 2.0),))

    class Offered(Extern):
        others = {"oneDNN": doubled}  # noqa: RUF012

    call = Offered(*(getattr(call, field.name) for field in fields(call)))
    with caplog.at_level("WARNING", logger="fusec.race"):
        verdict = race_libraries(call)
    assert verdict.winner == ATEN


def test_a_compiled_layer_calls_the_library_that_won_and_explain_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    layer, x = torch.nn.Linear(256, 256), torch.randn(64, 256)

    def compared() -> None:
        made = torch.compile(layer, backend="fusec", options={"strict": True})(x)
        torch.testing.assert_close(made, layer(x))

    with torch.no_grad():
        decide_products(monkeypatch, tmp_path, "oneDNN", compared)
        compared()
        (graph,) = explain(layer, x).graphs
    (said,) = [d for d in graph.decisions if d.b == "oneDNN"]
    assert said.taken and said.reason.startswith("measured: oneDNN 10.0 us, ATen 20.0 us")
    assert [call.op for call in graph.externs] == ["mkldnn._linear_pointwise.default"]


# -- symbolic sizes ----------------------------------------------------------------------------


def observed_rows(rows: int) -> Observed:
    layer = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU())
    (seen,) = observe(layer, (torch.randn(rows, 128),), train=False, dynamic=True)
    return seen


def symbolic_call(rows: int) -> Extern:
    context = CompileContext(find_target("cpu"), Options(), Trace("g"))
    (call,) = compile_to_source(observed_rows(rows).graph, context).schedule.externs
    return call


def test_a_product_of_any_number_of_rows_is_raced_once_for_sizes_of_a_class(tmp_path: Path):
    judge = RaceJudge(races(Cache(tmp_path, limit_bytes=1 << 20)), PRODUCTS)
    judge.races.keeps_all = True
    for rows, timed, kept in ((100, 100, 1), (120, 100, 1), (300, 300, 2)):
        decided = judge(library_choice(symbolic_call(rows)))
        assert decided.reason.startswith(f"measured at {timed} x 128 x 256: "), decided
        keys = list(all_verdicts(judge.races.cache))
        assert len(keys) == kept
        assert not any(str(rows) in key for key in keys)


def test_a_group_of_any_number_of_rows_is_raced_once_for_sizes_of_a_class(tmp_path: Path):
    kind = type("Once", (Ruled,), {"races_run": 0})
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    for rows, timed, raced in ((100, 100, 1), (120, 100, 1), (300, 300, 2)):
        seen = observed_rows(rows)
        made = compiled(seen, make_judge(seen, cache, kind))
        (said,) = [d for d in made.decisions if d.reason.startswith("measured")]
        assert re.match(rf"measured at \w+={timed}: ", said.reason), said
        assert kind.races_run == raced


# -- memory formats --------------------------------------------------------------------------------


KEPT = Decided("contiguous", "not now", -1.0)
RULED = Decided("channels-last", "by rule", 7.0)
LATE = replace(RULED, reason="by rule; not raced: there was no time")
UNTIMED = replace(RULED, reason="by rule; not raced: nothing is timed")


def formats(
    cache: Cache, budget_s: float, *, train: bool = False
) -> tuple[RaceJudge, list[Choice]]:
    """Return a judge, and the choices of the convolutions of a graph, two of which are equal."""
    races = Races(CPU, budget_s, "salt", cache, keeps_all=budget_s > 0)
    judge = RaceJudge(races, {"convolution": partial(convolution_contest, CPU, RaceTuning())})
    x, w = torch.randn(4, 8, 16, 16), torch.randn(8, 1, 3, 3, requires_grad=train)

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w, padding=1, groups=8)
        return F.conv2d(F.conv2d(y, w, padding=1, groups=8), w, stride=2, groups=8)

    found = rewritten(convolve, x, w, train=train, judge=lambda choice: KEPT)
    nodes = [n for gm in found for n in gm.graph.nodes if n.target in IMAGES]
    return judge, [format_choice(node, RULED) for node in nodes]


@pytest.mark.parametrize("train", (False, True))
def test_a_convolution_is_timed_in_both_formats(tmp_path: Path, train: bool):
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    judge, convolutions = formats(cache, 60.0, train=train)
    gains = [judge(choice) for choice in convolutions]
    assert all("contiguous" in gain.reason and "channels-last" in gain.reason for gain in gains)
    assert gains[0] == gains[1]  # alike
    assert len(list(all_verdicts(cache))) == (5 if train else 2)  # x has no gradient
    again, convolutions = formats(cache, 0.0, train=train)
    assert [again(choice) for choice in convolutions] == gains


def test_formats_go_by_rule_where_there_is_no_time(tmp_path: Path):
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    judge, convolutions = formats(cache, 0.0)
    assert [judge(choice) for choice in convolutions] == [UNTIMED] * 3
    assert not list(all_verdicts(cache))


def test_what_there_was_no_time_for_is_not_raced_at_the_next_start(tmp_path: Path):
    cache = Cache(tmp_path, limit_bytes=1 << 20)
    judge, convolutions = formats(cache, 60.0)
    judge.races.left_s = 0.0
    assert [judge(choice) for choice in convolutions] == [LATE] * 3
    again, convolutions = formats(cache, 60.0)
    assert [again(choice) for choice in convolutions] == [LATE] * 3


def test_a_long_convolution_is_timed_with_fewer_images():
    def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1)

    (gm,) = rewritten(dense, torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3))
    (node,) = (n for n in gm.graph.nodes if n.target in IMAGES)
    assert timed_batch(node, 1 << 26) == (1, 8.0)


def test_a_convolution_without_images_is_timed_with_one_that_counts_for_nothing():
    (gm,) = rewritten(lambda x, w: F.conv2d(x, w), torch.randn(0, 4, 8, 8), torch.randn(4, 4, 3, 3))
    (node,) = (n for n in gm.graph.nodes if n.target in IMAGES)
    assert timed_batch(node, 1 << 26) == (1, 0.0)


@pytest.mark.parametrize("race", ["fused", "library"])
def test_kernels_for_a_gpu_run_first_in_another_process(
    race: str, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that faults there is never loaded here. What calls a library has no part in that."""
    tasks: list[bytes] = []

    def helper(outcome: str) -> SimpleNamespace:
        pipe = SimpleNamespace(
            send_bytes=tasks.append, poll=lambda seconds: True, recv=lambda: outcome
        )
        return SimpleNamespace(is_alive=True, connection=pipe, end=lambda: None)

    def prepared(outcome: str) -> list[str]:
        """Return what is called, up to the load of blobs that have no kernels."""
        blobs = {"of": outcome.encode()}
        monkeypatch.setitem(compiler.BUILDS, "triton", lambda *_: blobs)
        rehearsal._helpers[:] = [helper(outcome)]
        options, device = Options.from_compile(None, {"cache": False}), torch.device("cuda", 0)
        make = compiler._group_contests(observed.graph, find_target("sm_90"), options, device)
        with calls_of(rehearse, load_kernels) as calls, pytest.raises((KernelFault, KeyError)):
            make.prepare(compiled(observed, race=race))
        return [call.function for call in calls]

    runs, faults = prepared(""), prepared("did not end in 20 s")
    rehearsal._helpers.clear()
    if race == "library":
        assert runs == faults == ["load_kernels"] and not tasks
        return
    assert (runs, faults) == (["rehearse", "load_kernels"], ["rehearse"])
    _, _, arguments, _ = pickle.loads(tasks[0])
    assert [one.shape for one in arguments] == [(32, 16), (48, 16), (48,)]
