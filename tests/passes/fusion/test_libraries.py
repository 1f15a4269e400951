"""Products are called in the library that a judge decides for; equal ones share a decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.ir.choice import Choice, Decided, judge_by_rule
from fusec.ir.decision import Decision
from fusec.ir.extern import BiasedProduct, Linear, Product
from fusec.ir.graph import Extern, Schedule
from fusec.ir.index import Size, index
from fusec.ir.machine import RaceTuning
from fusec.options import Options
from fusec.passes.fusion.fuse import separate
from fusec.passes.fusion.libraries import ATEN, choose_libraries, describe_call, multiply_adds
from fusec.runtime.calls import executable
from fusec.tools.report.observe import observe
from tests.calls import calls_of
from tests.ir.graphs import buffer, graph, mm, whole
from tests.support import check, tune, values
from tests.verdicts import decide_products

ALL = RaceTuning(product=0)
ONEDNN = Linear("oneDNN", "mkldnn._linear_pointwise.default", ("none", (), ""))


def product(name: str, m: int, k: int, n: int) -> Extern:
    a, b = whole(buffer(f"{name}_a", m, k)), whole(buffer(f"{name}_b", k, n))
    effect = Product("aten.addmm.default", "aten.addmm_.default", (ONEDNN,))
    return replace(mm(name, a, b, buffer(name, m, n)), effect=effect)


def schedule(*calls: Extern) -> Schedule:
    inputs = [view.buffer for call in calls for view in call.views]
    return separate(graph(tuple(inputs), calls, *(call.writes[0] for call in calls)))


def targets(made: Schedule) -> list[str]:
    return [call.target for call in made.externs]


def test_the_named_library_gets_the_call_with_its_second_factor_transposed() -> None:
    call = product("p", 4, 3, 6)
    made = choose_libraries(schedule(call), ALL, lambda _: Decided("oneDNN", "said", 2.0))
    (taken,) = made.externs
    a, b, *rest = taken.args
    assert taken.target == ONEDNN.target and rest == [None, "none", (), ""]
    assert a == call.args[0]
    assert b.shape == (index(6), index(3)) and b.strides == (index(1), index(6))
    (said,) = made.decisions
    assert said == Decision("mm.default", "oneDNN", True, "said", 2.0, "ATen")


def test_a_small_part_of_the_products_is_not_raced() -> None:
    raced = []

    def choose(choice: Choice) -> Decided:
        raced.append(choice.subject.writes[0].name)
        return Decided(ATEN, "said")

    many = [product(f"p{k}", 4, 3, 6) for k in range(2)]
    choose_libraries(schedule(*many, product("q", 64, 32, 32)), ALL, choose)
    assert raced == ["q"]
    raced.clear()
    choose_libraries(schedule(*many, product("q", 64, 4, 4)), ALL, choose)
    assert raced == ["q", "p0"]


def test_a_bias_goes_along() -> None:
    call = product("p", 4, 3, 6)
    bias = whole(buffer("bias", 6))
    biased = replace(call, args=(bias, *call.args), effect=BiasedProduct((ONEDNN,)))
    (other,) = biased.alternatives.values()
    assert other.args[:3] == (call.args[0], call.args[1].transposed, bias)


def test_a_bias_with_gaps_is_offered_to_no_other_library() -> None:
    call = product("p", 4, 3, 6)
    every_other = replace(whole(buffer("bias", 6)), strides=(index(2),))
    biased = replace(call, args=(every_other, *call.args), effect=BiasedProduct((ONEDNN,)))
    assert not biased.alternatives


def test_sums_that_may_have_no_term_are_offered_to_no_other_library() -> None:
    call = product("p", 4, 3, 6)
    a, b = call.args

    def terms(least: int) -> Extern:
        k = index(Size("k", 3, least))
        return replace(
            call, args=(replace(a, shape=(a.shape[0], k)), replace(b, shape=(k, b.shape[1])))
        )

    assert terms(1).alternatives and not terms(0).alternatives


def test_a_schedule_without_another_library_is_kept() -> None:
    before = schedule(replace(product("p", 4, 3, 6), effect=Product("", "", ())))
    assert choose_libraries(before, ALL, lambda _: Decided("oneDNN", "", 1.0)) is before


def test_alike_calls_are_asked_for_once_and_those_with_most_work_first() -> None:
    asked = []

    def choose(choice: Choice) -> Decided:
        asked.append(multiply_adds(choice.subject))
        return Decided("oneDNN" if asked[-1] == 64 else ATEN, "said", 1.0)

    calls = (product("wide", 4, 4, 5), *(product(f"p{i}", 4, 4, 4) for i in range(3)))
    made = choose_libraries(schedule(*calls), ALL, choose)
    assert asked == [64, 80]
    assert targets(made) == ["aten.mm.default", *[ONEDNN.target] * 3]
    assert [d.reason for d in made.decisions] == ["said"] * 4


def test_small_products_go_by_rule_and_so_do_all_where_nothing_is_timed() -> None:
    calls = (product("small", 4, 4, 4), product("large", 4, 4, 40))
    asked: list[Extern] = []

    def choose(choice: Choice) -> Decided:
        asked.append(choice.subject)
        return Decided("oneDNN", "said", 1.0)

    made = choose_libraries(schedule(*calls), replace(ALL, product=100), choose)
    assert targets(made) == ["aten.mm.default", ONEDNN.target]
    assert len(asked) == 1
    assert sorted(d.taken for d in made.decisions) == [False, True]
    ruled = choose_libraries(schedule(*calls), replace(ALL, product=100), judge_by_rule)
    assert targets(ruled) == ["aten.mm.default"] * 2
    assert all(d.reason.startswith("by rule") for d in ruled.decisions)


@pytest.mark.parametrize(("hint", "shown"), [(1, "<=1"), (100, "<=128"), (128, "<=128")])
def test_a_symbolic_size_is_described_by_its_class(hint: int, shown: str) -> None:
    rows = index(Size("rows", hint))
    call = product("p", 4, 3, 6)
    a, b = call.views
    dynamic = replace(call, args=(replace(a, shape=(rows, a.shape[1])), b))
    assert describe_call(dynamic) == f"mm.default f32[{shown},3](3,1) f32[3,6](6,1)"


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("train", (False, True))
def test_every_product_of_a_layer_may_go_to_onednn(train: bool) -> None:
    decided = Decided("oneDNN", "said", 1.0)
    context = CompileContext(find_target("cpu"), Options(), Trace("g"), lambda choice: decided)
    layer, found = torch.nn.Linear(128, 256), []
    for seen in observe(layer, (torch.randn(64, 128),), train=train, dynamic=False):
        found += compile_to_source(seen.graph, context).schedule.externs
    assert len(found) == (3 if train else 1)  # the gradients of the rows and of the weight
    assert {call.target for call in found} == {ONEDNN.target}


@needs_onednn
def test_what_onednn_computes_is_eager_s_with_gradients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tune(monkeypatch, "races", product=1)
    layer = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 8))

    def compared() -> None:
        check(layer, values(16, 24), train=True)

    decide_products(monkeypatch, tmp_path, "oneDNN", compared)
    with calls_of(executable._Operators.__getattr__) as called:
        compared()
    assert "_linear_pointwise" in [call.arguments["name"] for call in called]
