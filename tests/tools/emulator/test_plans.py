"""Each schedule and each plan that a race may choose, in the emulator, beside eager and fp64.

Each program runs several times with one set of kernels, its warps in other orders each time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import pytest
import torch

from fusec.codegen import targets
from fusec.codegen.targets import Target
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.passes.schedule import SCHEDULES, columnwise, contraction, pointwise, rowwise
from fusec.passes.schedule.plan import Plan, print_plan
from fusec.tools.report.comparison import compare
from fusec.tools.report.emulation import Emulator
from tests.tools.emulator.programs import MEMORY, PRODUCTS, Program, layer_norm, row

ORDERS = 3
NAMES = [m.__name__.rpartition(".")[2] for m in (contraction, pointwise, rowwise, columnwise)]


@dataclass(slots=True)
class Offer:
    """Plans kernels by the n-th of what a target offers, or its last one.

    Attributes:
        most: plans that some kernel is offered.
        shown: the plans that were taken, with the names of their schedules.
    """

    number: int
    most: int = 1
    shown: list[str] = field(default_factory=list)

    def of(self, target: Target) -> Target:
        theirs = target.codegen.plans

        def plans(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
            offered = theirs(kernel, machine)
            taken = offered[min(self.number, len(offered) - 1)]
            accepted = [s.accepts(kernel, machine) for s in SCHEDULES]
            self.most = max(self.most, len(offered))
            schedule = NAMES[accepted.index(True)]
            self.shown.append(f"{schedule} {print_plan(kernel.name, taken)}")
            return (taken,)

        return replace(target, codegen=replace(target.codegen, plans=plans))


def run(program: Program, number: int, target: str = "sm_90") -> Offer:
    """Run a program with the n-th plan of its kernels, and check what it computes."""
    torch._dynamo.reset()
    offer = Offer(number)
    emulator = Emulator.of(target, {"verify": True, "strict": True, "race": "fused"}, seed=number)
    emulator.target = offer.of(emulator.target)
    calls = [program.inputs] * ORDERS
    found = compare(program.fn, *calls, train=program.train, backend=emulator.backend)
    assert program.draws or found.faults == (), f"{offer.shown}\n{found}"
    assert any(one.launches for one in emulator.kernels)
    return offer


def run_all(program: Program, target: str = "sm_90") -> str:
    """Run a program with each plan that a race may choose, and return the plans."""
    number, most, shown = 0, 1, set()
    while number < most:
        offer = run(program, number, target)
        number, most = number + 1, offer.most
        shown.update(offer.shown)
    return "\n".join(sorted(shown))


QUICK = ("layer norm", "a split sum of columns", "a foreach kernel", "dropout")
DIAGONAL = (
    ("linear of odd sizes", 2),
    ("linear of a GELU", 1),
    ("causal attention", 1),
    ("linear of few rows", 5),
    ("linear in int8", 0),
)
"""Programs and the plans that they run with where there is no time for all."""
OLDER = ("linear and GELU", "causal attention", "swiglu", "linear in int8")


def some(name: str) -> object:
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [some(name) for name in MEMORY])
def test_a_schedule_is_right_in_several_orders_of_warps(name: str) -> None:
    shown = "\n".join(run(MEMORY[name], 0).shown)
    assert re.search(MEMORY[name].shown, shown, re.DOTALL), shown


@pytest.mark.slow
def test_rows_that_stay_packed_across_their_sums_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two multiprocessors each has several rows."""
    known = targets.TARGETS["sm_90"]
    few = replace(known, machine=replace(known.machine, units=2, parts=4))
    monkeypatch.setitem(targets.TARGETS, "sm_90", few)
    norm = Program(layer_norm, [row(0, 17, 12288), row(1, 12288), row(2, 12288)], "", train=True)
    assert any("lanes(2048)" in plan and "packed" in plan for plan in run(norm, 0).shown)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "number"), DIAGONAL)
def test_a_plan_that_is_offered_is_right(name: str, number: int) -> None:
    offer = run(replace(PRODUCTS[name], train=False), number)
    assert offer.most > number, offer.shown


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_plan_that_is_offered_is_right(name: str) -> None:
    shown = run_all(PRODUCTS[name])
    assert re.search(PRODUCTS[name].shown, shown, re.DOTALL), shown


HEADS = {
    "causal": (1, 1, 384, 64),
    "of 128 features": (1, 2, 256, 128),
    "causal of 128 features": (1, 1, 256, 128),
    "grouped": (1, 4, 256, 128),
    "causal, grouped": (1, 4, 256, 64),
    "ragged": (1, 2, 200, 64),
    "causal, ragged": (1, 2, 200, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("case", HEADS)
def test_gradients_of_an_attention_are_added_to_memory(case: str, number: int) -> None:
    """On a machine where launches cost nothing and products much, few heads are worth it."""
    shape = HEADS[case]
    keys = (1, 2, *shape[2:]) if "grouped" in case else shape

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal="causal" in case, enable_gqa="grouped" in case
        )

    inputs = [torch.randn(s, dtype=torch.bfloat16) for s in (shape, keys, keys)]
    offer, emulator = (
        Offer(number),
        Emulator.of("sm_90", {"verify": True, "strict": True, "race": "fused"}, number),
    )
    few = replace(emulator.target.machine, launch_us=0.0, units=2, products_per_us=3e4)
    emulator.target = offer.of(replace(emulator.target, machine=few))
    torch._dynamo.reset()
    found = compare(attention, *[inputs] * ORDERS, train=True, backend=emulator.backend)
    assert found.faults == (), found
    assert any(one.name.endswith("_part") for one in emulator.kernels), offer.shown


@pytest.mark.slow
@pytest.mark.parametrize("name", OLDER)
def test_each_plan_of_an_older_gpu_is_right(name: str) -> None:
    shown = run_all(replace(PRODUCTS[name], train=False), "sm_80")
    assert "descriptors" not in shown and shown.count("contraction") > 2, shown
