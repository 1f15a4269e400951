"""What the model says of measured launches: which are built, in which plan, and the errors."""

from __future__ import annotations

import json

import pytest

from bench import gpu_model
from bench.gpu_model import (
    KEPT,
    Launch,
    Modelled,
    launches_of,
    model,
    plan_text,
    summary,
    target_of,
)
from fusec.codegen.targets import HOPPER_MACHINE
from fusec.passes.schedule import gpu_plans
from tests.passes.schedule.flat import attention, products

RECORD = json.loads(KEPT.read_text())
ROLES = "128x256x64 warps=8 stages=3 descriptors cooperative programs=132"


def test_the_text_of_a_plan_is_its_tiles_and_tunables() -> None:
    plan, *_ = gpu_plans(products(8192, 4096, 1024), HOPPER_MACHINE)
    assert plan_text(plan) == ROLES
    plan, *_ = gpu_plans(attention(512, 1, 4096, 128), HOPPER_MACHINE)
    assert plan_text(plan) == "32x128 warps=8 stages=1"


def test_kept_launches_have_names_and_plans() -> None:
    kept = launches_of(RECORD)
    assert len(kept) == 96 and len(set(kept)) == 96
    assert kept[0] == Launch(
        "memory", "bias+gelu+residual 8192x4096", "forward", "inference", ("k0",), "", 66.8
    )
    assert sum(one.plan == ROLES for one in kept) == 6


def test_kernels_of_a_run_are_found_by_name_in_the_configuration_that_won() -> None:
    row = {
        "group": "products", "name": "linear+gelu vit-l", "mode": "forward",
        "kernel_us": {"mm_add_gelu_k0": 185.0, "Memset (Device)": 1.0},
        "races": [{"winner": "fused #2", "laps": []}],
    }  # fmt: skip
    fused, other = launches_of({"kind": "gpu", "results": [row]})
    assert fused == Launch("products", row["name"], "forward", "", ("mm_add_gelu_k0",), "#2", 185.0)
    (found,) = model([fused, other], target_of(RECORD))
    assert found.launch is fused and 0.5 < found.ratio < 2


@pytest.mark.slow
def test_a_launch_is_modelled_in_the_plan_that_it_was_measured_in() -> None:
    launches = [one for one in launches_of(RECORD) if one.name == "linear+gelu vit-l"]
    found = list(model(launches, target_of(RECORD)))
    offered = [one for one in launches if "pingpong" not in one.plan]  # what was offered then
    assert [one.launch for one in found] == offered and len(offered) == 3
    by_all, described, by_roles = (one.us for one in found)
    assert by_roles < min(by_all, described)
    gone = Launch("product", "linear+gelu vit-l", "forward", "inference", ("k0",), "7x7", 1.0)
    assert list(model([gone], target_of(RECORD))) == []


def test_errors_are_the_same_for_a_ratio_and_its_inverse() -> None:
    launch = Launch("memory", "a", "forward", "inference", ("k0",), "", 10.0)
    other = Launch("product", "b", "forward", "inference", ("k0",), "", 10.0)
    found = [Modelled(launch, us, "") for us in (8.0, 10.0, 12.5)] + [Modelled(other, 11.0, "")]
    memory, product, both = summary(found)
    assert memory[:2] == ("memory", 3) and product[:2] == ("product", 1) and both[:2] == ("all", 4)
    assert memory[2:] == pytest.approx((1.0, 0.25, 0.25))
    assert both[2:] == pytest.approx((1.1**0.25, 0.175, 0.25))


def test_the_command_prints_each_launch_and_the_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_model.main(["--only", "relu(x)*0.5+1"]) == 0
    out = capsys.readouterr().out
    assert "    89.4 " in out and "memory                          1  1.0" in out
    assert out.endswith("0 of 1 are not modelled\n")
