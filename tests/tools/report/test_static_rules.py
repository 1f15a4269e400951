"""Each rule on a kernel that breaks it, and on one that it excepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fusec.ir.index import Axis, index
from fusec.tools.report.explanation import GraphReport
from fusec.tools.report.static_report import StaticChecks
from fusec.tools.report.static_rules import (
    RULES,
    SMALL,
    UNALIGNED,
    Access,
    CheckedKernel,
    Demand,
    find_faults,
)
from fusec.tools.static_checks import DotTile, GlobalAccess, StaticReport

LANE, OTHER = Axis("c", index(2048)), Axis("r", index(64))
CLEAN = StaticReport(
    target="sm_90",
    threads=128,
    registers=40,
    spill_bytes=0,
    shared_bytes=0,
    accesses=(GlobalAccess(1, "load", 16, 2), GlobalAccess(2, "store", 16, 2)),
    converted=(),
    barriers=0,
    instructions=100,
    blocks=12,
    occupancy=0.75,
    dots=(),
    mma=0,
    loops=0,
    dot_loops=0,
)
PRODUCT = replace(
    CLEAN,
    registers=200,
    shared_bytes=98304,
    occupancy=0.12,
    blocks=2,
    dots=(DotTile(128, 128, 64, "bf16"),),
    wgmma=8,
    loops=1,
    dot_loops=1,
)


def access(kind: str, line: int, width: int, **fields: object) -> Access:
    demand = Demand(kind, "x", 2, 2048, LANE, "")
    found = GlobalAccess(line, kind, width, 32 // width)
    return Access(replace(demand, **fields), line, f"line {line}", (found,))


def kernel(static: StaticReport | None = CLEAN, **fields: object) -> CheckedKernel:
    accesses = (access("load", 1, 16), access("store", 2, 16))
    made = CheckedKernel(
        "inference", "k0", "pointwise", "k0", static, "", accesses, 8192, 67_108_864, 15.6
    )
    return replace(made, **fields)


def seen(checked: CheckedKernel) -> dict[str, str]:
    found = [*find_faults((checked,)), *find_faults((checked,), fault=False)]
    return {finding.rule: finding.seen for finding in found}


def test_clean_kernels_break_no_rule() -> None:
    assert seen(kernel()) == {}
    assert seen(kernel(PRODUCT, kind="contraction")) == {}


def test_every_rule_has_a_name_of_its_own_and_sentences() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.advice.endswith("."), rule.name


def broken(static: StaticReport, **facts: object) -> CheckedKernel:
    return kernel(replace(static, **facts))


BROKEN = {
    "spills": broken(CLEAN, spill_bytes=20),
    "narrow-access": kernel(accesses=(access("load", 1, 16), access("store", 2, 2))),
    "layout-conversion": broken(CLEAN, converted=(2048,)),
    "no-wgmma": broken(PRODUCT, wgmma=0, mma=128),
    "no-mfma": broken(PRODUCT, target="gfx942", wgmma=0, mma=0, shared_bytes=32768),
    "serialised-wgmma": broken(PRODUCT, serialised=("C7510: serialized",)),
    "synchronous-loop": broken(PRODUCT, idle_dot_loops=1),
    "shared-memory": broken(PRODUCT, shared_bytes=232449, blocks=0),
    "registers": broken(PRODUCT, registers=255, threads=512),
    "dependent-launch": broken(CLEAN, dependent=True, unordered=("ld.global.b32 %r1, [%rd1];",)),
    "thin-loop": kernel(
        replace(CLEAN, loops=1), accesses=(access("load", 1, 4, left_out=SMALL, elements=16),)
    ),
    "occupancy": broken(CLEAN, occupancy=0.25, blocks=4),
    "issue-bound": broken(CLEAN, instructions=400),
}


@pytest.mark.parametrize(("target", "name"), [("sm_80", "mma.sync"), ("gfx942", "MFMA")])
def test_a_report_names_products_as_their_processor_does(target: str, name: str) -> None:
    found = broken(PRODUCT, target=target, wgmma=0, mma=8)
    graph = GraphReport("inference", (), (), 1, 1, 1, 1, 1, ())
    report = StaticChecks(target, (graph,), (found,))
    assert f"  k0: 8 {name}" in report.text().splitlines()


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_is_broken_alone(rule: str) -> None:
    assert list(seen(BROKEN[rule])) == [rule]


def test_kernel_that_does_not_build_is_a_fault_and_nothing_else() -> None:
    assert seen(kernel(None, problem="ptxas died")) == {"build": "ptxas died"}


def test_every_rule_is_tested() -> None:
    assert {*BROKEN, "build"} == {rule.name for rule in RULES}


def test_warnings_are_no_faults() -> None:
    warnings = {rule.name for rule in RULES if not rule.fault}
    assert warnings == {"thin-loop", "occupancy", "issue-bound"}
    assert find_faults(tuple(BROKEN[name] for name in sorted(warnings))) == ()


EXCEPTED = {
    "16 spilled bytes beside a product": broken(PRODUCT, spill_bytes=16),
    "a narrow access that cannot be wider": kernel(
        accesses=(access("load", 1, 16), access("store", 2, 2, left_out=SMALL))
    ),
    "4 % of the bytes are narrow": kernel(
        accesses=(*[access("load", n, 16) for n in range(24)], access("store", 30, 2))
    ),
    "a converted vector": broken(CLEAN, converted=(256,)),
    "conversions of a reduction": replace(BROKEN["layout-conversion"], kind="reduction"),
    "conversions of a transpose": replace(
        BROKEN["layout-conversion"],
        accesses=(access("load", 1, 16), access("store", 2, 16, axis=OTHER)),
    ),
    "conversions between element sizes": replace(
        BROKEN["layout-conversion"],
        accesses=(access("load", 1, 16), access("store", 2, 16, itemsize=4)),
    ),
    "conversions of ragged rows": replace(
        BROKEN["layout-conversion"], accesses=(access("load", 1, 2, left_out=UNALIGNED),)
    ),
    "mma.sync on sm_80": broken(PRODUCT, target="sm_80", wgmma=0, mma=128),
    "mma.sync of 32 rows": broken(PRODUCT, wgmma=0, mma=64, dots=(DotTile(32, 128, 64, "bf16"),)),
    "mma.sync of f64": broken(PRODUCT, wgmma=0, mma=64, dots=(DotTile(64, 64, 64, "f64"),)),
    "232448 bytes of shared memory": broken(PRODUCT, shared_bytes=232448),
    "a loop with a few small accesses": kernel(
        replace(CLEAN, loops=1),
        accesses=(access("load", 1, 16), access("load", 2, 4, left_out=SMALL)),
    ),
    "low occupancy beside a product": broken(PRODUCT, occupancy=0.06),
    "low occupancy with loads enough": broken(
        CLEAN, occupancy=0.25, blocks=4, accesses=(GlobalAccess(1, "load", 16, 4),)
    ),
    "instructions of a loop": broken(CLEAN, instructions=400, loops=1),
    "instructions of a short kernel": kernel(replace(CLEAN, instructions=400), floor_us=0.5),
}


@pytest.mark.parametrize("case", EXCEPTED)
def test_exception_holds(case: str) -> None:
    assert seen(EXCEPTED[case]) == {}


def test_narrow_stores_of_a_product_are_a_fault() -> None:
    product = replace(BROKEN["narrow-access"], static=PRODUCT, kind="contraction")
    assert list(seen(product)) == ["narrow-access"]


def test_shared_memory_of_sm_80_is_less() -> None:
    assert seen(broken(PRODUCT, target="sm_80", shared_bytes=166912)) == {}
    assert "166912" in seen(broken(PRODUCT, target="sm_80", shared_bytes=166913))["shared-memory"]


def test_what_was_seen_names_line_and_amount() -> None:
    said = seen(BROKEN["narrow-access"])["narrow-access"]
    assert "50%" in said and "2 bytes at a time in line 2: line 2" in said
    assert seen(BROKEN["spills"])["spills"].startswith("20 bytes are spilled at 40 registers")
    assert seen(BROKEN["issue-bound"])["issue-bound"] == "6.2 instructions a byte, over 5.5"


def test_instructions_per_byte_counts_every_program() -> None:
    assert kernel().instructions_per_byte == pytest.approx(100 * 128 * 8192 / 67_108_864)
    assert kernel(PRODUCT).instructions_per_byte is None


def test_every_rule_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    assert [rule.name for rule in RULES if f"| `{rule.name}` |" not in page] == []
