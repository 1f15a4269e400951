"""Tests lie where their module lies; this says where else, and why.

``fusec/passes/dag.py`` has its tests in ``tests/passes/test_dag.py``. A module that is one part
of something is tested with it: such files are listed here, as is what only whole compiles can show.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = 60
"""Lines up to which a module needs no tests of its own."""

ELSEWHERE = {
    # The command line is tested as a user meets it.
    "tools/cli/bisect": "tools/bisect/test_bisect",
    "tools/cli/build": "export/test_building",
    "tools/cli/cache": "tools/test_cli",
    "tools/cli/check": "tools/test_cli_check",
    "tools/cli/doctor": "tools/test_cli",
    "tools/cli/dump": "tools/test_cli",
    "tools/cli/inputs": "tools/test_cli_line",
    "tools/cli/line": "tools/test_cli_line",
    "tools/cli/lock": "tools/test_cli_lock",
    "tools/cli/model": "tools/test_cli",
    "tools/cli/output": "tools/test_cli",
    "tools/cli/profile": "tools/test_cli_profile",
    "tools/cli/report": "tools/test_cli_report",
    "tools/cli/run": "tools/test_cli_run",
    # A bisection is one thing, and each of its parts is read off what it ends with.
    "tools/bisect/questions": "tools/bisect/test_bisect",
    "tools/bisect/hunt": "tools/bisect/test_bisect",
    "driver/contests": "driver/test_race",
    "frontend/aot/only_eager": "ops/test_errors",
    "frontend/aot/trials": "frontend/aot/test_eager_strides",
    "frontend/fx_passes/columns": "frontend/fx_passes/test_rolled_columns",
    "frontend/linears": "docs/test_add_a_candidate",
    "codegen/cpp/stages": "driver/test_stages",
    "ir/bounds": "ir/test_index",
    "ir/buffer": "ir/test_expr",
    "ir/choice": "driver/test_race",
    "ir/cpu_tuning": "codegen/test_targets",
    "ir/machine": "codegen/test_targets",
    "tools/bisect/interpret": "test_planted",
    "tools/bisect/recorder": "tools/bisect/test_bisect",
    "tools/bisect/smaller": "tools/bisect/test_excerpt",
    "tools/bisect/source": "tools/bisect/test_excerpt",
    "tools/bisect/trial": "tools/bisect/test_bisect",
    # Parts of lowering, of the printers and of the form that is printed.
    "codegen/cpp/index": "codegen/cpp/test_printer",
    "codegen/cpp/lane_order": "codegen/cpp/test_vector_tiles",
    "codegen/lowering/layout": "codegen/lowering/test_lower",
    "codegen/lowering/orient": "codegen/test_contraction",
    "codegen/lowering/tasks": "codegen/lowering/test_lower",
    "codegen/cpp/prelude": "codegen/test_prelude",
    "codegen/cpp/tile_storage": "codegen/cpp/test_vector_tiles",
    "codegen/cpp/tile_uses": "codegen/cpp/test_vector_tiles",
    "codegen/triton/arguments": "codegen/triton/test_printer",
    "codegen/triton/form": "codegen/triton/test_printer",
    "codegen/triton/index": "codegen/triton/test_printer",
    "codegen/triton/operations": "codegen/triton/test_printer",
    "codegen/cpp/transposed": "codegen/lowering/test_lower",
    "codegen/cpp/vector_nest": "codegen/cpp/test_vector_tiles",
    "passes/kernel/unroll": "passes/kernel/test_unroll_windows",
    # The emulator's parts are tested by what kernels do in it.
    "tools/emulator/tile_rules": "tools/emulator/test_engine",
    "tools/emulator/decode": "tools/emulator/test_parse",
    "tools/emulator/vocabulary": "tools/emulator/test_rules",
    # Archives are read as they are written.
    "export/tracing": "export/test_building",
    "runtime/interior": "export/test_building",
    "archive/graph": "export/test_packing",
    "archive/shipped": "export/test_packing",
    "runtime/calls/stored": "driver/test_warm",
    "archive/model": "export/test_building",
    # What C runs is tested by a program in C.
    "export/native_code": "native/test_native",
    "export/size_formulas": "export/test_building",
    # What every compile runs through.
    "driver/build": "runtime/cache/test_store",
    "driver/launches": "runtime/calls/test_ranges",
    "driver/compiler": "runtime/cache/test_store",
    "tools/dumps": "tools/test_cli",
    "driver/pipeline": "driver/test_stages",
    "processors": "tools/test_cli_line",
    "driver/context": "driver/test_stages",
    "driver/structures": "driver/test_stages",
    "torch_interior": "driver/test_backend",
    "driver/trace": "driver/test_stages",
    # Operations are tested by what they compute.
    "frontend/ops/activations": "frontend/ops/test_pointwise",
    "frontend/ops/arithmetic": "frontend/ops/test_pointwise",
    "frontend/ops/attention": "ops/test_contractions",
    "frontend/call": "frontend/test_capture",
    "frontend/fx_passes/channel_folding": "frontend/fx_passes/test_freezing",
    "frontend/fx_passes/channels_last": "frontend/fx_passes/test_memory_formats",
    "frontend/ops/comparisons": "frontend/ops/test_pointwise",
    "frontend/ops/creation": "ops/test_creation",
    "frontend/ops/domain": "frontend/ops/test_reductions",
    "frontend/fx_passes/draws": "ops/test_random",
    "frontend/fallbacks": "ops/test_lowering",
    "frontend/ops/grouped": "ops/test_grouped",
    "frontend/ops/order": "ops/test_order",
    "frontend/ops/interpolation": "ops/test_interpolation",
    "frontend/key": "frontend/test_input_objects",
    "frontend/fx_passes/masked_writes": "ops/test_masked_writes",
    "frontend/operands": "frontend/test_capture",
    "frontend/origin": "frontend/test_capture",
    "frontend/ops/pooling": "frontend/ops/test_reductions",
    "frontend/parts": "test_higher_order",
    "frontend/ops/products": "ops/test_contractions",
    "frontend/ops/random": "ops/test_random",
    "frontend/ops/registry": "frontend/test_capture",
    "frontend/ops/scaled_products": "ops/test_scaled_products",
    "frontend/ops/scans": "ops/test_reductions",
    "frontend/aliasing/saved_changes": "frontend/aliasing/test_snapshots",
    "frontend/ops/scatters": "ops/test_indexing",
    "frontend/size_facts": "frontend/test_shapes",
    "frontend/value": "frontend/test_shapes",
    "frontend/fx_passes/weights": "frontend/fx_passes/test_freezing",
    # Structures have their printed form, verifier and interpreter tested together.
    "ir/argument": "ir/test_verify",
    "ir/contraction": "passes/schedule/test_tiling",
    "ir/definition": "ir/test_verify",
    "ir/disjoint": "ir/test_verify",
    "ir/dtype": "ir/test_expr",
    "ir/extern": "frontend/test_effects",
    "ir/graph": "ir/test_verify",
    "tools/interpreter/expression": "tools/interpreter/test_graph",
    "tools/interpreter/program": "ir/test_program",
    "ir/host": "passes/memory/test_buffers",
    "ir/memory": "passes/memory/test_buffers",
    "ir/monoid": "ir/test_combine",
    "ir/online": "codegen/test_online",
    "ir/rewrite": "ir/test_expr",
    "ir/text": "ir/test_expr",
    "ir/verify_program": "ir/test_program",
    # Parts of a pass, and passes whose effect is a kernel's.
    "passes/fusion/axis_classes": "passes/fusion/test_unify",
    "passes/graph/rfactor": "passes/graph/test_split_reduction",
    "passes/graph/rows": "passes/graph/test_chunk",
    "passes/schedule/contraction": "passes/schedule/test_tiling",
    "passes/schedule/descriptors": "codegen/triton/test_descriptors",
    "passes/schedule/plan": "passes/schedule/test_rowwise",
    "passes/graph/squares": "passes/graph/test_split_reduction",
    "passes/stage": "driver/test_stages",
    # A report is read as a whole.
    "tools/report/emulation": "tools/test_cli_check",
    "tools/report/expect": "tools/test_expect",
    "tools/report/explanation_text": "tools/test_report",
    "tools/report/explanation": "tools/test_report",
    "tools/report/html/drawn": "tools/report/html/test_document",
    "tools/report/traffic": "tools/report/html/test_document",
    "tools/report/observe": "tools/test_report",
    "tools/report/lock_changes": "tools/report/test_lock",
    "tools/report/run_script": "tools/test_cli_run",
    "tools/report/stages": "tools/test_cli",
    "tools/report/static_report": "tools/test_cli_check",
    # What only a process, a library or several ranks can show.
    "runtime/kernels/cpp_kernel": "codegen/cpp/test_printer",
    "runtime/cache/entry": "runtime/cache/test_store",
    "runtime/calls/executable": "codegen/host/test_wrapper",
    "runtime/race/ranks": "distributed/test_verdicts",
    "runtime/kernels/table": "codegen/test_table_static",
}
"""Module -> the file that has its tests."""


def modules() -> list[str]:
    """Return the modules that need tests, by their path in ``fusec``."""
    files = sorted((ROOT / "fusec").rglob("*.py"))
    return [
        file.relative_to(ROOT / "fusec").with_suffix("").as_posix()
        for file in files
        if not file.name.startswith("__") and len(file.read_text().splitlines()) > SMALL
    ]


def mirrored(module: str) -> Path:
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.name}.py"


@pytest.mark.parametrize("module", modules())
def test_a_module_has_its_tests_beside_it_or_where_the_list_says(module: str) -> None:
    where = ELSEWHERE.get(module)
    if where is None:
        assert mirrored(module).exists(), f"no {mirrored(module)}, and no line in ELSEWHERE"
    else:
        assert (ROOT / "tests" / f"{where}.py").exists()
        assert not mirrored(module).exists(), f"{module} has tests of its own now"


def test_the_list_names_modules_that_are_there() -> None:
    gone = [module for module in ELSEWHERE if not (ROOT / "fusec" / f"{module}.py").exists()]
    assert gone == []
