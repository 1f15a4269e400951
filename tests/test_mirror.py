"""Tests lie where their module lies; this says where else, and why.

``fusec/passes/share.py`` has its tests in ``tests/passes/test_share.py``. A module that is one part
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
    "cli/bisect": "bisect/test_bisect",
    "cli/build": "test_building",
    "cli/cache": "test_cli",
    "cli/check": "test_cli_check",
    "cli/completion": "test_cli_line",
    "cli/doctor": "test_cli",
    "cli/dump": "test_cli",
    "cli/inputs": "test_cli_line",
    "cli/line": "test_cli_line",
    "cli/lock": "test_cli_lock",
    "cli/model": "test_cli",
    "cli/output": "test_cli",
    "cli/profile": "test_cli_profile",
    "cli/report": "test_cli_report",
    "cli/run": "test_cli_run",
    # A bisection is one thing, and each of its parts is read off what it ends with.
    "bisect/finding": "bisect/test_bisect",
    "bisect/hunt": "bisect/test_bisect",
    "bisect/meaning": "test_planted",
    "bisect/paces": "bisect/test_bisect",
    "bisect/questions": "bisect/test_bisect",
    "bisect/recorder": "bisect/test_bisect",
    "bisect/smaller": "bisect/test_excerpt",
    "bisect/slices": "bisect/test_bisect",
    "bisect/source": "bisect/test_excerpt",
    "bisect/steps": "test_planted",
    "bisect/trial": "bisect/test_bisect",
    # Parts of lowering, of the printers and of the form that is printed.
    "codegen/cpp_form": "codegen/test_vector_tiles",
    "codegen/lane_order": "codegen/test_vector_tiles",
    "codegen/layout": "codegen/test_lower",
    "codegen/orient": "codegen/test_contraction",
    "codegen/tasks": "codegen/test_lower",
    "codegen/tile_storage": "codegen/test_vector_tiles",
    "codegen/tile_uses": "codegen/test_vector_tiles",
    "codegen/triton_arguments": "codegen/test_triton",
    "codegen/triton_form": "codegen/test_triton",
    "codegen/triton_index": "codegen/test_triton",
    "codegen/triton_ops": "codegen/test_triton",
    "codegen/transposed": "codegen/test_lower",
    "codegen/vector_nest": "codegen/test_vector_tiles",
    # The emulator's parts are tested by what kernels do in it.
    "emulator/decode": "emulator/test_parse",
    "emulator/flow": "emulator/test_engine",
    "emulator/vocabulary": "emulator/test_rules",
    # Archives are read as they are written.
    "building/description": "test_building",
    "building/tracing": "test_building",
    "runtime/interior": "test_building",
    "runtime/loading": "test_archive",
    "runtime/model": "test_building",
    # What C runs is tested by a program in C.
    "codegen/native_sizes": "native/test_native",
    "codegen/native_writes": "native/test_native",
    "native_names": "native/test_native",
    "size_formulas": "test_building",
    # What every compile runs through.
    "compiler": "runtime/test_cache",
    "dumps": "test_cli",
    "pipeline": "test_stages",
    "processors": "test_cli_line",
    "structures": "test_stages",
    "torch_interior": "test_backend",
    "trace": "test_stages",
    # Operations are tested by what they compute.
    "frontend/activations": "frontend/test_pointwise",
    "frontend/arithmetic": "frontend/test_pointwise",
    "frontend/attention": "ops/test_contractions",
    "frontend/call": "frontend/test_capture",
    "frontend/channel_folding": "frontend/test_freezing",
    "frontend/channels_last": "frontend/test_memory_formats",
    "frontend/comparisons": "frontend/test_pointwise",
    "frontend/creation": "ops/test_creation",
    "frontend/domain": "frontend/test_reductions",
    "frontend/draws": "ops/test_random",
    "frontend/fx_nodes": "frontend/test_softmax_gradients",
    "frontend/fallbacks": "ops/test_lowering",
    "frontend/foreach": "ops/test_optimizers",
    "frontend/interpolation": "ops/test_interpolation",
    "frontend/key": "frontend/test_input_objects",
    "frontend/masked_writes": "ops/test_masked_writes",
    "frontend/operands": "frontend/test_capture",
    "frontend/origin": "frontend/test_capture",
    "frontend/overlap": "ops/test_inplace",
    "frontend/pooling": "frontend/test_reductions",
    "frontend/parts": "test_higher_order",
    "frontend/products": "ops/test_contractions",
    "frontend/promotion": "ops/test_promotion",
    "frontend/random": "ops/test_random",
    "frontend/random_ops": "ops/test_random",
    "frontend/registry": "frontend/test_capture",
    "frontend/scans": "ops/test_reductions",
    "frontend/saved_changes": "frontend/test_snapshots",
    "frontend/scatters": "ops/test_indexing",
    "frontend/size_facts": "frontend/test_shapes",
    "frontend/value": "frontend/test_shapes",
    "frontend/weights": "frontend/test_freezing",
    # Structures have their printed form, verifier and interpreter tested together.
    "ir/argument": "ir/test_verify",
    "ir/arena": "passes/test_arena",
    "ir/contraction": "passes/schedule/test_tiling",
    "ir/definition": "ir/test_verify",
    "ir/disjoint": "ir/test_verify",
    "ir/dtype": "ir/test_expr",
    "ir/extern": "frontend/test_effects",
    "ir/formula": "test_building",
    "ir/graph": "ir/test_verify",
    "ir/interp_expr": "ir/test_interp",
    "ir/interp_program": "ir/test_program",
    "ir/interp_scalar": "ir/test_scalar",
    "ir/memory": "passes/test_memory",
    "ir/monoid": "ir/test_combine",
    "ir/online": "codegen/test_online",
    "ir/rewrite": "ir/test_expr",
    "ir/text": "ir/test_expr",
    "ir/verify_program": "ir/test_program",
    # Parts of a pass, and passes whose effect is a kernel's.
    "passes/axis_classes": "passes/test_unify",
    "passes/machine": "codegen/test_targets",
    "passes/recompute": "codegen/test_contraction",
    "passes/rfactor": "passes/test_split_reduction",
    "passes/rows": "passes/test_chunk",
    "passes/schedule/contraction": "passes/schedule/test_tiling",
    "passes/schedule/descriptors": "codegen/test_descriptors",
    "passes/schedule/plan": "passes/schedule/test_rowwise",
    "passes/squares": "passes/test_split_reduction",
    "passes/stage": "test_stages",
    "passes/weighted_sums": "passes/test_split_loop",
    # A report is read as a whole.
    "report/emulation": "test_cli_check",
    "report/expect": "test_expect",
    "report/explained": "test_report",
    "report/explanation": "test_report",
    "report/html/collect": "test_cli_report",
    "report/html/machine_code": "report/html/test_document",
    "report/html/roofline": "report/html/test_plots",
    "report/html/steps": "report/html/test_document",
    "report/html/usage": "report/html/test_document",
    "report/comparison": "test_cli_check",
    "report/observe": "test_report",
    "report/lock_changes": "report/test_lock",
    "report/lock_text": "report/test_lock",
    "report/profile_page": "report/test_profile",
    "report/script": "test_cli_run",
    "report/parts": "test_cli_lock",
    "report/seen": "report/test_watching",
    "report/stages": "test_cli",
    "report/lint_report": "test_cli_check",
    "report/traffic": "test_report",
    # What only a process, a library or several ranks can show.
    "runtime/cpp_kernel": "codegen/test_cpp",
    "runtime/entry": "runtime/test_cache",
    "runtime/executable": "codegen/test_wrapper",
    "runtime/ranks": "distributed/test_verdicts",
    "runtime/table": "codegen/test_table_static",
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
