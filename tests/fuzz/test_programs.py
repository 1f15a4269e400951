"""Random PyTorch programs, eager against the compiled ones, forward and backward."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.fuzz import programs
from tests.fuzz.parts import FAILED, check_program
from tests.fuzz.programs import Input, Program, as_file, draw, failure, shrunk

ROOT = Path(__file__).parents[2]


def check_seed(seed: int) -> None:
    """Compare one program; where it fails, raise with a small file that does so as well."""
    program = draw(seed)
    error = failure(program)
    if error is None:
        return
    small = shrunk(program, lambda p: type(failure(p)) is type(error))
    raise AssertionError(f"seed {seed}\n{as_file(small, failure(small) or error)}") from error


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(8))
def test_compiled_program_does_what_eager_does(seed: int) -> None:
    check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_more_compiled_programs_do_what_eager_does(seed: int) -> None:
    check_seed(seed)


def test_a_seed_is_one_program_and_seeds_reach_every_kind_of_line() -> None:
    drawn = [draw(seed) for seed in range(60)]
    assert drawn[7] == draw(7)
    text = "\n".join(program.source() for program in drawn)
    for kind in programs.KINDS:
        stems = [template.lstrip("!").partition("(")[0].rpartition("}")[2] for template in kind]
        assert any(stem and stem in text for stem in stems), kind[0]
    for flag in ("train", "dynamic"):
        assert {getattr(program, flag) for program in drawn} == {True, False}
    assert {one.dtype for program in drawn for one in program.inputs} >= {
        "float32", "bfloat16", "float16", "int64", "bool",
    }  # fmt: skip


def test_lines_near_a_border_are_refused() -> None:
    near = Program(0, (Input("b", "float32"),), ("v0 = torch.relu(a0 - a0 * 1.0000001)",), ("v0",))
    with pytest.raises(programs.Refused, match="border"):
        programs._probe(near, "torch.cat((a0 * 1e-7, a0))")


def wrong_sum(program: Program) -> Exception | None:
    """Stand in for a comparison: whatever sums is wrong."""
    return AssertionError("off") if ".sum(" in program.source() else None


def test_a_failure_shrinks_to_the_lines_it_needs() -> None:
    lines = (
        "v0 = torch.tanh(a1)",
        "v1 = v0.sum(0)",
        "v2 = v1 * 2",
        "v3 = torch.cat((v2, v0[0]), 0)",
    )
    inputs = (Input("b", "bfloat16"), Input("ab", "bfloat16", "transposed"))
    program = Program(5, inputs, lines, ("v3", "v0"), dynamic=True)
    small = shrunk(program, lambda p: wrong_sum(p) is not None)
    assert small.lines == ("v1 = a1.sum(0)",)
    assert not small.dynamic
    assert small.inputs[1] == Input("ab", "float32")


def test_a_failure_is_written_as_a_file_that_runs(tmp_path: Path) -> None:
    verdicts = [check_program(seed, wrong_sum) for seed in range(40)]
    found = next(verdict for verdict in verdicts if verdict.kind == FAILED)
    path = tmp_path / "found.py"
    path.write_text(found.source)
    runpy.run_path(str(path), run_name="__main__")  # the comparison finds nothing wrong
