"""The file of ``fusec lock``: what is written is read, all else refused, changes are in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fusec.errors import UsageError
from fusec.ir.decision import Decision
from fusec.passes.fusion.fuse import DETOUR
from fusec.tools.report.lock import (
    Chosen,
    Lock,
    LockedCall,
    LockedGraph,
    LockedKernel,
    Part,
    describe_target,
    read_target,
)
from fusec.tools.report.lock_changes import Changes, compare_locks
from fusec.tools.report.lock_file import parse_lock, print_lock
from fusec.tools.report.stages import choose_target
from tests.support import threads as run_with

ADD = Part("add", "h.*", "model.py:40 in forward: h = x + self.attn(x)")
NORM = Part("layer_norm", "h.*.ln_2", "model.py:41 in forward: h = self.ln_2(h)")
GELU = Part("gelu", "h.*.c_fc", "model.py:42 in forward: return F.gelu(self.c_fc(h))")
MM = Part("mm", "h.*.c_fc", GELU.line)
MEAN = Part("mean", "h.*", "model.py:42 in forward: h = h - h.mean(0)")

WHOLE = LockedKernel((ADD, NORM, GELU), 3_145_728, "768 as lanes(1024), warps 1", times=2)
CALL = LockedCall("mm", MM, "ATen", "contraction: runs in the library", 4096)
GRAPH = LockedGraph("forward", 3, 6_295_552, 1 << 20, (WHOLE,), (CALL,), ("4096 rows by 512",))
ASKED = ("model.py:Block(64)", "--input", "f32[8,64]", "--train", "--option", "race=library")
LOCK = Lock(
    "fusec 0.1.0, torch 2.9.0",
    ASKED,
    "cpu, 16 lanes, tiles",
    (GRAPH, replace(GRAPH, name="backward", kernels=(), loops=())),
    (
        Chosen("group 0123456789abcdef mm + gelu", "fused #2"),
        Chosen("product mm f32[4,2](2,1)", "oneDNN"),
    ),
)

UPPER = LockedKernel((ADD, NORM), 2048, buffers=frozenset({"add", "var_mean_mean"}))
LOWER = LockedKernel((GELU,), 1024, buffers=frozenset({"gelu"}))
SLOWER = Decision("add+var_mean_mean", "gelu", False, "modelled slower than two kernels", -12.5)


def changes(old: LockedGraph, new: LockedGraph) -> list[str]:
    """What changed between two graphs, the numbers of the whole graph aside."""
    found = compare_locks(replace(LOCK, graphs=(old,)), replace(LOCK, graphs=(new,)))
    numbers = ("forward: launches", "forward: bytes", "forward: peak")
    return [line for line in found if not line.startswith(numbers)]


def with_kernels(*kernels: LockedKernel, decisions: tuple[Decision, ...] = ()) -> LockedGraph:
    return replace(GRAPH, kernels=kernels, decisions=decisions)


# -- the file --------------------------------------------------------------------------------------


def test_a_file_is_one_fact_a_line() -> None:
    text = print_lock(LOCK)
    assert text.splitlines()[:19] == [
        "{",
        ' "fusec lock": 3,',
        ' "made_by": "fusec 0.1.0, torch 2.9.0",',
        f' "asked": {json.dumps(ASKED)},',
        ' "target": "cpu, 16 lanes, tiles",',
        ' "graphs": [',
        "  {",
        '   "name": "forward",',
        '   "launches": 3,',
        '   "bytes": 6295552,',
        '   "peak": 1048576,',
        '   "kernels": [',
        "    {",
        '     "parts": [',
        f'      {{"op": "add", "module": "h.*", "line": "{ADD.line}"}},',
        f'      {{"op": "layer_norm", "module": "h.*.ln_2", "line": "{NORM.line}"}},',
        f'      {{"op": "gelu", "module": "h.*.c_fc", "line": "{GELU.line}"}}',
        "     ],",
        '     "bytes": 3145728,',
    ]
    assert '  {"choice": "product mm f32[4,2](2,1)", "candidate": "oneDNN"}' in text.splitlines()


def test_what_was_written_is_read() -> None:
    assert parse_lock(print_lock(LOCK), "model.lock") == LOCK
    assert json.loads(print_lock(LOCK))["graphs"][0]["loops"] == ["4096 rows by 512"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"fusec lock": 3', '"fusec lock": 2', "its form is 2, and this fusec reads 3"),
        ('"fusec lock": 3,', "", "its form is None"),
        ('"launches":', '"lunches":', "one of graphs has the fields name, launches, bytes, peak"),
        ('"launches": 3', '"launches": "three"', "launches: 'three' is no count"),
        ('"bytes": 6295552', '"bytes": 6295552.5', "bytes: 6295552.5 is no count"),
        ('"bytes": 6295552', '"bytes": -1', "bytes: -1 is no count"),
        ('"op": "add"', '"op": 7', "op: 7 is no text"),
        ('"asked": [', '"asked": "x', "Expecting"),
        ('"--train"', "7", "one of asked: 7 is no text"),
        ('"oneDNN"', '""', "'' of 'product mm f32[4,2](2,1)' is no candidate that exists"),
        ('"fused #2"', '"fused"', "'fused' of 'group 0123456789abcdef mm + gelu' is no candidate"),
        ("\n}", "\n}}", "Extra data"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_field(old: str, new: str, why: str) -> None:
    text = print_lock(LOCK)
    assert old in text
    with pytest.raises(UsageError, match=r"'model.lock' is no file of `fusec lock`: ") as raised:
        parse_lock(text.replace(old, new, 1), "model.lock")
    assert why in str(raised.value)


def test_a_file_that_ends_too_soon_is_refused_at_any_line() -> None:
    lines = print_lock(LOCK).splitlines(keepends=True)
    for count in range(len(lines)):
        with pytest.raises(UsageError, match=r"'model.lock' is no file of `fusec lock`: "):
            parse_lock("".join(lines[:count]), "model.lock")


@pytest.mark.parametrize(
    "described",
    [
        "cpu, 16 lanes, tiles",
        "cpu, 16 lanes, pairs",
        "cpu, 8 lanes",
        "cpu, 16 lanes, tiles, 3 threads",
        "sm_90",
    ],
)
def test_a_target_is_read_as_it_is_described(described: str) -> None:
    assert describe_target(read_target(described)) == described


@pytest.mark.parametrize(
    "described",
    ["cpu", "cpu, 3 lanes", "cpu, 8 lanes, 1 threads", "cpu, x lanes", "sm_90, tiles", "sm_1"],
)
def test_a_target_that_is_none_is_refused(described: str) -> None:
    with pytest.raises(UsageError):
        read_target(described)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cpu_is_looked_at_with_the_threads_that_a_run_has(threads: int) -> None:
    with run_with(threads):
        assert choose_target("cpu").machine.threads == threads


# -- changes ---------------------------------------------------------------------------------------


def test_nothing_changed() -> None:
    assert compare_locks(LOCK, LOCK) == ()
    assert str(Changes("model.lock", ())) == "model.lock: as it was"


def test_lines_that_moved_and_modules_of_other_names_are_no_change() -> None:
    moved = replace(NORM, line=NORM.line.replace(":41", ":57"))
    renamed = replace(moved, module="h.*.norm", line="model.py:57 in forward: h = self.norm(h)")
    for part in (moved, renamed):
        assert changes(GRAPH, with_kernels(replace(WHOLE, parts=(ADD, part, GELU)))) == []


def test_a_fusion_that_was_lost_names_the_pair_the_price_and_the_line() -> None:
    one = replace(WHOLE, times=1)
    new = with_kernels(UPPER, LOWER, decisions=(SLOWER,))
    assert changes(with_kernels(one), new) == [
        "forward: `h.*.ln_2` no longer fuses with `h.*.c_fc`: modelled slower than two kernels, "
        f"by 12.5 us, at {GELU.line}"
    ]
    parts = (ADD, replace(GELU, module="h.*"))
    apart = [replace(UPPER, parts=parts[:1]), replace(LOWER, parts=parts[1:])]
    (only,) = changes(with_kernels(replace(one, parts=parts)), with_kernels(*apart))
    assert only.startswith("forward: `add` no longer fuses with `gelu`: the one reads nothing")


def test_a_line_that_the_lock_does_not_have_is_named_first() -> None:
    mean = LockedKernel((MEAN,), 64, buffers=frozenset({"mean"}))
    decision = replace(SLOWER, reason=DETOUR, saved_us=None)
    new = with_kernels(UPPER, mean, LOWER, decisions=(decision,))
    first, second = changes(with_kernels(replace(WHOLE, times=1)), new)
    assert first.endswith(f"{DETOUR}; new is `mean`, at {MEAN.line}")
    assert second == f"forward: a kernel is new: `mean`, at {MEAN.line}"


def test_alike_layers_are_one_sentence() -> None:
    pair = (replace(UPPER, times=2), replace(LOWER, times=2))
    (only,) = changes(GRAPH, with_kernels(*pair, decisions=(SLOWER,)))
    assert "no longer fuses with" in only and only.endswith("(2 times)")


def test_kernels_that_fuse_now_are_a_change() -> None:
    (only,) = changes(with_kernels(UPPER, LOWER), with_kernels(replace(WHOLE, times=1)))
    assert only.startswith("forward: `h.*.ln_2` and `h.*.c_fc` fuse now")


def test_a_new_eager_kernel_has_its_reason_and_line() -> None:
    sort = LockedCall("sort", replace(MEAN, op="sort"), "ATen", "sorting", 64)
    new = replace(GRAPH, calls=(CALL, sort))
    assert changes(GRAPH, new) == [
        f"forward: `sort` is an eager kernel now: sorting, at {MEAN.line}"
    ]
    assert changes(new, GRAPH) == [f"forward: `sort` is no eager kernel any more, at {MEAN.line}"]


def test_an_operation_that_left_its_kernel_is_named() -> None:
    (left,) = changes(GRAPH, with_kernels(replace(WHOLE, parts=(ADD, NORM), times=2)))
    assert left.startswith("forward: `gelu` is not computed with `h.*.ln_2` any more")
    (came,) = changes(with_kernels(replace(WHOLE, parts=(ADD, NORM), times=2)), GRAPH)
    assert came.startswith("forward: `gelu` is computed with `h.*.ln_2` now")


def test_details_of_a_launch_are_changes() -> None:
    other = replace(WHOLE, bytes=2 * WHOLE.bytes, sums="768 as loop*16", members=4)
    found = changes(GRAPH, replace(with_kernels(other), calls=(replace(CALL, library="oneDNN"),)))
    assert [line.partition(", at ")[0] for line in found] == [
        "forward: `add + layer_norm + gelu` sums in another order: 768 as loop*16; was: 768 as "
        "lanes(1024), warps 1",
        "forward: `add + layer_norm + gelu` runs 4 alike kernels, was 1 (2 times)",
        "forward: `add + layer_norm + gelu` moves 6.29 MB, was 3.15 MB (+100%)",
        "forward: `mm` is computed by oneDNN, was by ATen",
    ]


def test_numbers_of_a_graph_graphs_targets_and_choices_are_changes() -> None:
    graph = replace(GRAPH, launches=5, bytes=2 * GRAPH.bytes, peak=GRAPH.peak // 2, loops=())
    choices = (LOCK.choices[0], replace(LOCK.choices[1], candidate="ATen"))
    new = replace(LOCK, target="cpu, 8 lanes", graphs=(graph,), choices=choices)
    assert compare_locks(LOCK, new) == (
        "target: cpu, 8 lanes, was cpu, 16 lanes, tiles",
        "graph backward is gone",
        "forward: loops: none; were 4096 rows by 512",
        "forward: launches: 5, were 3",
        "forward: bytes moved: 12.6 MB, was 6.3 MB (+100%)",
        "forward: peak memory: 524 kB, was 1.05 MB (-50%)",
        "product mm f32[4,2](2,1): ATen, was oneDNN",
    )
