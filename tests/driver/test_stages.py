"""The list of stages: nothing is rewritten outside it, its order is sound, each stage is checked.

The table in docs/design.md is made of the list; ``--update-goldens`` writes it.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fusec.codegen.parametrize import FunctionCall, Functions
from fusec.codegen.targets import find_target
from fusec.codegen.triton.form import Form
from fusec.driver.context import CompileContext
from fusec.driver.partition import Joint
from fusec.driver.stages import FUSE, PASSES, all_stages
from fusec.driver.structures import Planned
from fusec.driver.trace import Trace
from fusec.errors import InvalidIR
from fusec.ir.choice import Choice, Decided
from fusec.ir.dtype import F32
from fusec.ir.expr import Load, Var
from fusec.ir.graph import Def, Graph, Kernel, Schedule, Store
from fusec.ir.host import HostProgram
from fusec.ir.index import Axis, Size, index
from fusec.ir.program import Program, Put
from fusec.options import Options
from fusec.passes.schedule.plan import Plan
from fusec.passes.stage import Stage, fold
from fusec.tools.dumps import Records
from fusec.tools.report.observe import observe
from tests.ir.graphs import buffer, graph, layer_norm, load

ROOT = Path(__file__).parents[2]
STAGES = {stage.name: stage for stage in all_stages()}

# -- nothing outside -------------------------------------------------------------------------------

STRUCTURES = {
    "Graph", "Schedule", "Kernel", "FlatKernel", "Program", "Form", "Functions",
    "fx.GraphModule", "fx.Graph",
}  # fmt: skip
HOMES = {
    "fusec/driver/stages.py",
    "fusec/codegen/cpp/stages.py",
    "fusec/codegen/cpp/vector_tiles.py",
    "fusec/codegen/triton/form.py",
}
ELSEWHERE = {
    ("fusec/tools/emulator/launch.py", "decoded"): "a program of PTX instructions, no stage's",
    ("fusec/codegen/targets.py", "split_loop"): "the row that says whether the stage does it",
    (
        "fusec/passes/fusion/horizontal.py",
        "coalesce",
    ): "what a kernel would be: members are compared flat",
    ("fusec/passes/memory/in_place.py", "in_reading_order"): "what two stages have in common",
    ("fusec/passes/memory/in_place.py", "redirected"): "the same",
    ("fusec/passes/fusion/store_parts.py", "redirected"): "the same",
    **{
        (f"fusec/passes/kernel/{stage}.py", name): "what the stages that unroll have in common"
        for stage in ("unroll_pairs", "unroll_parts", "unroll_windows", "unroll_terms")
        for name in ("added_up", "unrolled")
        if (stage, name) != ("unroll_terms", "added_up")
    },
    ("fusec/codegen/lowering/lower.py", "lower_transformed"): "the part of it for one schedule",
    ("fusec/passes/schedule/__init__.py", "coalesce"): "what a merged kernel would be: is it legal",
    ("fusec/passes/schedule/vector_loops.py", "run_scans"): "the same",
    ("fusec/passes/schedule/vector_loops.py", "coalesce"): "the same",
    ("fusec/passes/fusion/split_loop.py", "online_softmax"): "what a kernel would be: its cost",
    ("fusec/passes/kernel/nested_sums.py", "coalesce"): "what a kernel would be: its rows' loads",
    (
        "fusec/driver/pipeline.py",
        "by_pointers",
    ): "the second kernel of one program, for other addresses",
    ("fusec/driver/contests.py", "choose_libraries"): "another library as a candidate of a group",
    (
        "fusec/tools/report/static_rules.py",
        "sink",
    ): "a report on printed accesses, which changes nothing",
    ("fusec/tools/report/static_rules.py", "join_pairs"): "the same",
    ("fusec/tools/bisect/interpret.py", "lower"): "a planned kernel computes what its program does",
}
"""Uses of a rewrite that are no stage, and why."""


def rewrites(modules: dict[str, ast.Module]) -> dict[str, str]:
    """Return the functions from a structure to the next, by name: the file that each stands in."""
    found = {}
    for path, tree in modules.items():
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.returns is None or not node.args.args:
                continue
            taken = node.args.args[0].annotation
            if taken is None or ast.unparse(taken) not in STRUCTURES:
                continue
            given = {ast.unparse(n) for n in ast.walk(node.returns) if not isinstance(n, ast.Load)}
            if given & STRUCTURES:
                found[node.name] = path
    return found


def outside(modules: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield the files that import a rewrite although they are no list of stages."""
    known = rewrites(modules)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            for name in node.names if isinstance(node, ast.ImportFrom) else ():
                if known.get(name.name, path) != path and path not in HOMES:
                    yield path, name.name


READERS = {
    "find_parts", "graphs_in", "plain_parts", "all_kernels", "all_launches", "capture", "copied",
    "fusec",
}  # fmt: skip
"""Functions that return parts of what they are given, or a copy, and the backend itself."""


def test_every_rewrite_is_a_stage():
    files = sorted((ROOT / "fusec").rglob("*.py"))
    modules = {f.relative_to(ROOT).as_posix(): ast.parse(f.read_text()) for f in files}
    assert len(rewrites(modules)) > 25
    found = {(path, name) for path, name in outside(modules) if name not in READERS}
    assert found == set(ELSEWHERE)


def test_a_rewrite_outside_the_list_is_found():
    planted = {
        "fusec/passes/tidy.py": ast.parse("def tidy(graph: Graph) -> Graph: ..."),
        "fusec/driver/compiler.py": ast.parse("from fusec.passes.tidy import tidy"),
        "fusec/driver/stages.py": ast.parse("from fusec.passes.tidy import tidy"),
    }
    assert list(outside(planted)) == [("fusec/driver/compiler.py", "tidy")]


def test_names_are_unique_and_what_a_stage_needs_stands_before_it():
    names = [stage.name for stage in all_stages()]
    assert len(set(names)) == len(names)
    for stage in all_stages():
        before = names[: names.index(stage.name)]
        assert set(stage.needs) <= set(before), stage.name


def test_each_stage_gives_what_the_next_one_takes():
    for inner in (FUSE, PASSES):
        for one, following in itertools.pairwise(inner):
            assert one.gives == following.takes


# -- each is checked -------------------------------------------------------------------------------


def _graph() -> Graph:
    x, y = buffer("x", 4), buffer("y", 4)
    m = Axis("m", index(8))  # reads beyond the end of x
    return graph((x,), (Def(y, (m,), Load(x, (index(m),))),), y)


def _kernel() -> Kernel:
    m, n = Axis("m", index(4)), Axis("n", index(4))
    return Kernel(
        "k", (m,), (), (Store(buffer("y", 4), (index(n),), Load(buffer("x", 4), (index(m),))),)
    )


def _program() -> Program:
    y = buffer("y", 4)
    put = Put(y.flat(), index(0), Var("never_defined", F32, frozenset()), None)
    return Program("k", (), (y,), (), (), (), (put,))


def _fx() -> fx.GraphModule:
    made = fx.Graph()
    x = made.placeholder("x")
    late = made.call_function(torch.neg, (x,))
    with made.inserting_before(late):
        early = made.call_function(torch.neg, (x,))
    made.output(early)
    early.args = (late,)  # read before it is made
    return fx.GraphModule(nn.Module(), made)


ILLEGAL: dict[str, Any] = {
    "Dynamo's graph": _fx,
    "FX graph": _fx,
    "two FX graphs": lambda: (_fx(), _fx()),
    "Graph": _graph,
    "Schedule": lambda: Schedule(_graph(), (_kernel(),)),
    "Kernel": _kernel,
    "FlatKernel": _kernel,
    "Plan": lambda: Planned(_kernel(), Plan(())),
    "HostProgram": lambda: HostProgram(_graph(), (_kernel(),)),
    "Program": _program,
    "Form": lambda: Form(_program(), {}),
    "Functions": lambda: Functions({"k": _program()}, {}, {"k": FunctionCall("k")}),
}


def context(target: str = "cpu", **chosen: Any) -> CompileContext:
    options = Options.from_compile(None, {"verify": True, "strict": True, **chosen})
    return CompileContext(find_target(target), options, Trace("test"))


@pytest.mark.parametrize("name", [name for name in STAGES if name != "capture"])
def test_what_a_stage_breaks_is_found_behind_it(name: str):
    stage = STAGES[name]
    broken = replace(stage, run=lambda structure, _: ILLEGAL[stage.gives]())
    with pytest.raises(InvalidIR) as found:
        context().apply(broken, ILLEGAL[stage.takes]() if stage.takes in ILLEGAL else _joint())
    assert found.value.stage == name


def _joint() -> Joint:
    return Joint(_fx(), (), 1, {})


def test_a_kernel_that_coalesce_leaves_as_it_was_is_found_behind_it():
    m, n = Axis("m", index(4)), Axis("n", index(4))
    store = Store(buffer("y", 4, 4), (index(m), index(n)), load(buffer("x", 4, 4), m, n))
    kernel = Kernel("k", (m, n), (), (store,))
    context().apply_each(STAGES["coalesce"], {"k": kernel})
    with pytest.raises(InvalidIR) as found:
        context().apply_each(replace(STAGES["coalesce"], run=lambda k, _: k), {"k": kernel})
    assert found.value.stage == "coalesce"


def test_an_access_in_range_for_the_traced_sizes_is_an_error_where_strict(
    caplog: pytest.LogCaptureFixture,
):
    """Dynamo guards ``n <= 9`` of ``x[:n]``, a relation that no proof of ranges knows."""
    n, x = Axis("n", index(Size("n", 6))), buffer("x", 9)
    y = buffer("y", n.extent)
    reads = graph((x,), (Def(y, (n,), load(x, n)),), y)
    beyond = graph((x,), (Def(y, (n,), load(x, index(n) + 4)),), y)
    with caplog.at_level("INFO", "fusec.verify"):
        tolerant = context(strict=False)
        tolerant.apply(replace(STAGES["share"], run=lambda structure, _: reads), reads)
    assert "load of x at n is not provably in [0, 9)" in caplog.text
    for wrong, strict in ((reads, True), (beyond, False)):
        broken = replace(STAGES["share"], run=lambda structure, _, made=wrong: made)
        with pytest.raises(InvalidIR, match="is not provably in"):
            context(strict=strict).apply(broken, reads)


def test_nothing_is_verified_unless_it_is_wanted():
    broken = replace(STAGES["share"], run=lambda structure, _: _graph())
    assert isinstance(context(verify=False).apply(broken, layer_norm(4, 8)), Graph)


# -- each is kept ----------------------------------------------------------------------------------


def test_a_stage_that_changes_nothing_says_so():
    records = Records()
    fold(FUSE, layer_norm(4, 8), replace(context(), observe=(records.observe,)))
    assert not records.kept["share"].changed
    assert records.kept["fuse"].changed
    assert records.kept["inline"].text.startswith("graph example(")


def test_what_is_only_tried_leaves_no_record():
    records = Records()
    fold(FUSE, layer_norm(4, 8), replace(context(), observe=(records.observe,)).quiet())
    assert not records.kept


# -- inner lists -----------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.layer_norm(F.gelu(layer(x)), (1024,))
        return x


def judged(count: int) -> int:
    """Return how many groups of a model's layers are judged."""
    groups = []

    def judge(choice: Choice) -> Decided:
        groups.append(choice.subject)
        return Decided("fused #0", "said", 1.0)

    (seen,) = observe(Layers(count), (torch.randn(1024, 1024),), target=find_target("sm_90"))
    one = replace(context("sm_90", verify=False), judge=judge)
    captured, _ = STAGES["capture"].run(seen.graph, one)
    schedule = fold(PASSES, captured, one)
    products = [d for d in schedule.decisions if d.reason == "said"]
    assert len(products) == count, "each layer is such a group"
    return len(groups)


def test_groups_that_are_alike_are_judged_once():
    assert judged(3) == judged(6) <= 3


# -- the table -------------------------------------------------------------------------------------

DESIGN = ROOT / "docs" / "design.md"
HEAD = "| stage | in → out | what it does |\n|---|---|---|\n"
PRINTED = (
    "| printer | Form (GPU), Program (CPU) → source | `codegen/triton/`, `codegen/cpp/` |\n"
    "| wrapper | HostProgram → source | the graph's `call(args)`: a line for each statement |\n"
    "| native | HostProgram → source | the same in C++, for C: `export/native.py` |\n"
)


def row(stage: Stage) -> str:
    does = stage.does
    if stage.inner:
        does += (
            f". Runs `{stage.inner[0].name}` to `{stage.inner[-1].name}` for each graph it tries"
        )
    return f"| `{stage.name}` | {stage.takes} → {stage.gives} | {does} |\n"


def test_the_table_of_the_design_is_the_list(request: pytest.FixtureRequest):
    page = DESIGN.read_text(encoding="utf-8")
    before, head, rest = page.partition(HEAD)
    assert head, "docs/design.md has no table of stages"
    lines = rest.splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if not line.startswith("|"))
    table = "".join(map(row, all_stages())) + PRINTED
    if request.config.getoption("--update-goldens"):
        DESIGN.write_text(before + head + table + "".join(lines[end:]), encoding="utf-8")
    else:
        assert "".join(lines[:end]) == table, "see --update-goldens"
