"""What tunes code stands in the description of a machine, ``ir/machine.py``, and nowhere else.

A number that a module of the compiler names is one of these definitions, or it belongs there. A
number within a function is the rule that the function states.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DECIDE = ("ir", "frontend", "passes", "codegen", "driver")
"""Folders of the core that decide what code is made. The runtime measures it, keeps and launches
it: its numbers are the protocol of a measurement, limits of files and of launches, and codes."""

DEFINITIONS = {
    "a limit or the form of hardware, of a language or of PyTorch": {
        "codegen/triton/arguments": {"_GRID_YZ_LIMIT", "_PROGRAMS_LIMIT"},
        "codegen/triton/descriptors": {"MAX_RANK", "MAX_TILE"},
        "codegen/triton/gluon": {"FEWEST_COLUMNS", "INSTRUCTION_BYTES", "INSTRUCTION_ROWS"},
        "codegen/triton/warp_specialization": {"MOST_COLUMNS", "TENSOR_BYTES"},
        "driver/partition": {"LEAST_BUDGET"},
        "ir/dtype": {"INT32_MAX"},
        "ir/atoms": {"MAX_SIZE"},
        "ir/program": {"MULTIPLE"},
        "frontend/aot/decompositions": {"_MEAN"},
        "frontend/aot/quantization": {"_BLOCKS", "_GROUPS"},
        "frontend/ops/scaled_products": {"BLOCK", "TILE_BLOCKS", "TILE_ROWS"},
        "ir/scaled": {"BLOCK", "SCALED_TERMS", "TILE"},
        "frontend/ops/random": {"BITS", "LARGEST_RANGE", "_LOW"},
        "passes/memory/buffers": {"_MOST_BUFFERS"},
        "passes/schedule/access": {"LINE_BYTES", "VECTOR_BYTES"},
        "passes/schedule/descriptors": {"WORD_BYTES"},
        "passes/schedule/tiling": {"MIN_LANES", "_LEAST_BYTES", "_TENSOR_LANES"},
    },
    "a value of arithmetic: beyond it, results would be wrong": {
        "codegen/triton/floats8": {"_IMPLICIT", "_QUIET_NAN"},
        "codegen/triton/base_two": {"HUGE"},
        "frontend/ops/winograd": {"OF_PIXELS", "OF_SUMS", "OF_WEIGHTS"},
        "frontend/ops/activations": {"_TANH_CUBE"},
        "frontend/ops/creation": {"_LARGEST"},
        "ir/known": {"_EXACT"},
        "ir/online": {"LEAST", "ONE"},
        "ir/ranges": {"EXACT"},
        "passes/graph/simplify": {"_NEUTRAL"},
        "passes/kernel/masks": {"FAR", "LOWEST", "PLACE"},
    },
    "a name for a position, a count or a case": {
        "codegen/lowering/orient": {"COLUMNS", "ROWS"},
        "frontend/aot/trials": {"_SYMBOLS"},
        "frontend/fx_passes/channels_last": {"IMAGES"},
        "frontend/fx_passes/memory_formats": {"_CERTAIN_US"},
        "frontend/size_facts": {"UNSEEN"},
        "ir/disjoint": {"UNKNOWN"},
        "ir/scalar": {"CHECKED", "COARSE_TERMS"},
    },
    "the length of a text, or of what is told": {
        "frontend/aot/recompiles": {"FEW"},
        "frontend/origin": {"_LINE_LIMIT"},
        "ir/names": {"LONGEST_FUNCTION", "SHOWN_OPERATIONS"},
        "ir/text": {"LONGEST_LINE", "LONG_NODE"},
    },
    "the effort of a proof, a trial or a comparison, on the host": {
        "frontend/aot/trials": {"FEW", "LARGEST", "MANY", "SMALL"},
        "ir/bounds": {"MOST_CHOICES"},
        "ir/disjoint": {"CHOICES"},
        "ir/index": {"_LONGEST_DIVISION"},
        "ir/points": {"POINTS_TRIED"},
        "passes/graph/simplify": {"NEAR"},
    },
    "what a form is, before a target is known: a cut of a graph, a literal, a panel": {
        "driver/splitting": {"MOST"},
        "frontend/ops/convolutions": {"MOST_CHANNELS", "MOST_PLACES"},
        "frontend/ops/literals": {"LONGEST"},
        "ir/streamed": {"WIDEST_PANEL"},
        "ir/transformed": {"MOST_TERMS"},
        "passes/kernel/unroll_terms": {"MOST_POINTS"},
    },
}
"""Why a number is none that tunes -> module -> its names."""


def named_numbers(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of numbers, and of tuples and tables of them, each with its module."""
    for folder in DECIDE:
        for file in sorted((root / "fusec" / folder).rglob("*.py")):
            module = file.relative_to(root / "fusec").with_suffix("").as_posix()
            if module == "ir/machine":
                continue
            for statement in ast.parse(file.read_text()).body:
                match statement:
                    case ast.Assign(targets=[target], value=value) if is_number(value):
                        yield from ((module, name) for name in names_in(target))
                    case ast.AnnAssign(target=target, value=ast.expr() as value):
                        if is_number(value):
                            yield from ((module, name) for name in names_in(target))


def is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=number):
            return isinstance(number, int | float) and not isinstance(number, bool)
        case ast.UnaryOp(operand=inner):
            return is_number(inner)
        case ast.BinOp(left=left, right=right):
            return is_number(left) or is_number(right)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
            return any(map(is_number, parts))
    return False


def names_in(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def test_no_module_names_a_number_that_tunes() -> None:
    defined = {
        (module, name)
        for modules in DEFINITIONS.values()
        for module, names in modules.items()
        for name in names
    }
    assert set(named_numbers(ROOT)) == defined


@pytest.mark.parametrize(
    "planted",
    (
        "WIDTH = 128",
        "LEAST: int = 1 << 14",
        "SHARE = 0.5",
        "A, B = 1, 2",
        "ROWS = ((8, 4), (4, 4))",
    ),
)
def test_a_number_that_a_module_names_is_found(tmp_path: Path, planted: str) -> None:
    module = tmp_path / "fusec/passes/schedule.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"NAME, TRUE, X = 'a', True, f(3)\n{planted}\n")
    found = list(named_numbers(tmp_path))
    assert {module for module, _ in found} == {"passes/schedule"}
    assert "NAME" not in {name for _, name in found}
